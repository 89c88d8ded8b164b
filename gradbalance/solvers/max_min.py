"""The cheapest combination that gives every objective its progress: min xᵀNx subject to Ax ≥ w, x ≥ 0.

What is maximised is the smallest progress (Ax)_k / w_k per unit of √(xᵀNx); at fixed progress that is to minimise the
square. It is Lawson and Hanson's least-distance problem, and its conditions are

    Nx = Aᵀν + σ,   ν, s = Ax − w ≥ 0,   σ, x ≥ 0,   ν_k s_k = σ_k x_k = 0.

``pivot`` guesses the sets {k: s_k = 0} and {k: x_k > 0}, at first all and all, solves for x and ν, and exchanges every
index that is on the wrong side, until none is; that one guess is right is the rule. It answers only what it can prove,
and needs no point to start from. ``descend`` does, and is slower, but no problem is too degenerate for it.
"""

import numpy as np

from gradbalance.solvers.constrained import proximal
from gradbalance.solvers.exact import CONDITION, TIED, Array
from gradbalance.solvers.polytope import Polytope

GUESSES = 6
"""Sets that are tried before the guessing is given up."""


def pivot(n: Array, a: Array, w: Array) -> Array | None:
    """Maximise min_k (Ax)_k / w_k over {x ≥ 0: xᵀNx ≤ 1} by exchanging sets.

    Args:
        n: N, positive semidefinite with diagonal about 1, shape (K, K).
        a: A, of about unit rows or shorter, shape (K, K).
        w: > 0, shape (K,).

    Returns:
        x, shape (K,), of any length: only its direction is determined. None if it is not found, not clearly unique, or
        the conditions are not solved to rounding.
    """
    size = len(w)
    system = np.zeros((2 * size, 2 * size))
    system[:size, :size], system[:size, size:], system[size:, :size] = n, -a.T, a
    aim = np.zeros(2 * size)
    aim[size:] = w
    inside = np.ones(2 * size, dtype=bool)  # x_k > 0, then ν_k > 0; what is outside is 0
    for _ in range(GUESSES):
        rows = inside.nonzero()[0]
        part, target = (system, aim) if len(rows) == 2 * size else (system[rows[:, None], rows], aim[rows])
        try:
            inverse = np.linalg.inv(part)
        except np.linalg.LinAlgError:
            return None
        found = inverse @ target
        found += inverse @ (target - part @ found)  # no error from the conditioning
        full = np.zeros(2 * size)
        full[rows] = found
        left = system @ full - aim  # of the conditions: σ_k and s_k, 0 for what is inside
        largest, multiplier = abs(full.reshape(2, size)).max(axis=1)
        if largest == 0 or multiplier == 0:
            return None
        margin = np.where(inside, full, left)
        margin[:size] /= largest
        margin[size:] /= np.where(inside[size:], multiplier, w)
        wrong = margin < 0
        if not np.count_nonzero(wrong):
            return full[:size] if margin.min() > TIED and abs(inverse).max() < CONDITION else None
        inside ^= wrong
    return None


def descend(n: Array, a: Array, w: Array, start: Array) -> Array:
    """Maximise min_k (Ax)_k / w_k over {x ≥ 0: xᵀNx ≤ 1}, as ``pivot`` does.

    Args:
        n: shape (K, K).
        a: shape (K, K).
        w: shape (K,).
        start: x ≥ 0 with Ax > 0, shape (K,).

    Returns:
        x; if several are optimal, the shortest.
    """
    size = len(w)
    x = start / start.sum()  # unknowns of order 1
    least = w * (a @ x / w).min()
    lengths = np.sqrt(np.square(a).sum(axis=1))
    rows, bounds = np.vstack([a / lengths[:, None], np.eye(size)]), np.append(least / lengths, np.zeros(size))
    return np.maximum(proximal(n, Polytope(np.zeros((0, size)), np.zeros(0), rows, bounds), x), 0.0)
