"""Projections onto the dual cone {d: ⟨g_k, d⟩ ≥ 0 for every k}, of many vectors at once.

The projection of Σ_k u_k g_k is Σ_k (u_k + y_k) g_k with the y ≥ 0 of least ‖Σ_k (u_k + y_k) g_k‖². Its conditions are

    y ≥ 0,   s = M(u + y) ≥ 0,   y_k s_k = 0   for every k,

a linear complementarity problem. Block principal pivoting guesses the set F = {k: y_k > 0}, solves for y on it, and
exchanges every index that turns out to be on the wrong side; the first guess is where the vector itself is in conflict.
A handful of rounds is the rule. The problems share M, so each round is one stacked solve over those still unsettled,
on systems as large as the largest F among them.

Block pivoting may cycle, and a singular M leaves y undetermined. For the first there is Lawson and Hanson's method,
one problem at a time. For the second, a ridge ρ‖y − c‖² is added: first with c = 0, which picks a y of about the least
norm, then with c the last answer (proximal-point steps), which leaves nothing of the ridge in the projection.

References:
    J. J. Júdice, F. M. Pires. A block principal pivoting algorithm for large-scale strictly monotone linear
    complementarity problems. Computers & Operations Research 21, 1994.
"""

import math

import numpy as np
from numpy.typing import NDArray

from gradbalance.solvers.exact import Array, active_set

CONDITION = 1e6
"""The inverse of M̂ may have entries up to this for its problems to be solved as they are."""

ACCURATE = 1e3
"""With entries up to this the inverse is accurate enough to solve with."""

RIDGE, PROXIMAL_STEPS = 1e-8, 10
"""ρ, and the most proximal-point steps."""

SOLVED = 1e-13
"""The error in the conditions, which is ρ |y − c|, that needs no further step (relative to y, if above 1)."""

ROUNDING = 1e-13
"""y and s above minus this (relative to the largest |u| + |y|) count as non-negative."""

ROUNDS = 20
"""Most rounds of block pivoting."""


def project(unit: Array, vectors: Array) -> Array:
    """Project vectors onto the dual cone of K unit vectors.

    Args:
        unit: M̂, Gramian of unit vectors, shape (K, K).
        vectors: u, the vectors to project as coefficients of the unit vectors, shape (B, K).

    Returns:
        u + y, shape (B, K).
    """
    inner = vectors @ unit
    inverse, size = _inverse(unit)
    if size < CONDITION:
        return vectors + _complementary(unit, inner, inner < 0, inverse if size < ACCURATE else None)
    ridged = unit + RIDGE * np.eye(len(unit))
    y = _complementary(ridged, inner, inner < 0)
    for _ in range(PROXIMAL_STEPS):
        last, y = y, _complementary(ridged, inner - RIDGE * y, y > 0)
        if RIDGE * abs(y - last).max() <= SOLVED * max(1.0, y.max()):
            break
    return vectors + y


def _inverse(m: Array) -> tuple[Array | None, float]:
    """Return the inverse and its largest entry, infinite where there is none."""
    try:
        inverse = np.asarray(np.linalg.inv(m), dtype=np.float64)
    except np.linalg.LinAlgError:
        return None, math.inf
    diagonal = inverse.diagonal()  # no entry of a positive definite matrix exceeds it
    return inverse, float(diagonal.max()) if diagonal.min() > 0 else math.inf


def _complementary(m: Array, b: Array, guess: NDArray[np.bool_], inverse: Array | None = None) -> Array:
    """Solve y ≥ 0, My + b ≥ 0, yᵀ(My + b) = 0 for every row of b, with M positive definite.

    Args:
        m: M, shape (K, K).
        b: shape (B, K).
        guess: where y may be positive, shape (B, K).
        inverse: of M, if accurate.

    Returns:
        y, shape (B, K).
    """
    y = np.zeros_like(b)
    free = guess.copy()
    open_ = np.flatnonzero((free | (b < 0)).any(axis=1))  # the problems still to be solved
    for _ in range(ROUNDS):
        if len(open_) == 0:
            return y
        inside = free[open_]
        found, slack = _solve(m, inverse, b[open_], inside)
        tolerance = ROUNDING * np.maximum(1.0, found.max(1, keepdims=True))
        wrong = np.where(inside, found, slack) < -tolerance
        y[open_] = np.where(inside, np.maximum(found, 0.0), 0.0)
        free[open_] = inside ^ wrong
        open_ = open_[wrong.any(1)]
    for row in open_:
        y[row] = _without_cycling(m, b[row])
    return y


def _solve(m: Array, inverse: Array | None, b: Array, inside: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return y and s = My + b with s_k = 0 inside and y_k = 0 outside.

    With y = M⁻¹s − M⁻¹b in place of s = My + b the two change roles, and the smaller systems can be chosen.
    """
    if inverse is not None and (~inside).sum(1).max() < inside.sum(1).max():
        s = _solve_inside(inverse, -b @ inverse, ~inside)
        return (s - b) @ inverse, s
    y = _solve_inside(m, b, inside)
    return y, b + y @ m


def _solve_inside(m: Array, b: Array, inside: NDArray[np.bool_]) -> Array:
    """Solve (My + b)_k = 0 for k inside, y_k = 0 outside; each problem's inside is gathered to the front."""
    count, size = inside.sum(axis=1), len(m)
    padding = np.arange(count.max()) >= count[:, None]
    order = (~inside).argsort(1, kind="stable")[:, : count.max()]
    order[padding] = size  # a row of zeros
    bordered = np.zeros((size + 1, size + 1))
    bordered[:size, :size] = m
    systems = bordered.ravel().take(order[:, :, None] * (size + 1) + order[:, None, :])
    systems.reshape(len(b), -1)[:, :: count.max() + 1] += padding  # 1 on its diagonal
    rows = np.arange(len(b))[:, None]
    y = np.zeros((len(b), size + 1))
    right = np.concatenate([-b, y[:, :1]], 1)[rows, order]
    y[rows, order] = np.linalg.solve(systems, right[..., None])[..., 0]
    return y[:, :size]


def _without_cycling(m: Array, b: Array) -> Array:
    """Solve a single problem by Lawson and Hanson's method."""

    def solve_rows(rows: NDArray[np.intp]) -> Array:
        return np.asarray(np.linalg.solve(m[rows[:, None], rows], -b[rows]), dtype=np.float64)

    return active_set(solve_rows, lambda y: m @ y + b, len(b), np.zeros(len(b)))[0]
