"""Exact min-norm point of K vectors: an active-set method on the K×K Gramian, in microseconds.

The problem is min βᵀMβ subject to cᵀβ = 1, β ≥ 0, with M the Gramian of unit vectors and 0 < c ≤ 1. Writing
β = y / cᵀy turns it into min ½ yᵀHy − cᵀy over y ≥ 0 alone, with H = M + c cᵀ: the non-negative least squares
problem ‖[F; cᵀ] y − e‖², M = FᵀF, e the last unit vector. Its optimality conditions are

    y ≥ 0,   s = Hy − c ≥ 0,   y_k s_k = 0   for every k.

Lawson and Hanson's method finds the set {k: y_k > 0} exactly in finitely many steps: solve the linear system of the
current set, walk towards its solution until an entry would turn negative and drop that one, else add the entry with
the most negative s. It starts here from the full set instead of the empty one, since few objectives drop out as a rule.

Two linear algebras serve the same method. The first inverts H restricted to the set; it is fast, and its answer is
accepted only if H is well-conditioned there and no objective outside the set is tied with those inside. Otherwise
the set is not unique (duplicated, opposite or linearly dependent gradients); the second then works on the factor F,
whose condition number is the square root, and returns, of all optimal β, the one of least Euclidean norm, which
does not depend on the order of the objectives. (Where gradients are dependent up to rounding only, rounding decides
between β that give the same point.)

References:
    C. L. Lawson, R. J. Hanson. Solving Least Squares Problems, chapter 23. Prentice-Hall, 1974.
    P. Wolfe. Finding the nearest point in a polytope. Mathematical Programming 11, 1976.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

ROUNDING = 4e-15
"""s above minus this (times Σ y, if above 1) counts as non-negative; H has entries of order 1."""

TIED = 1e-11
"""|s| up to this cannot be told from 0 after the rounding of a well-conditioned solve."""

CONDITION = 1e8
"""The inverse of H may have entries up to this for the fast path to be trusted."""

RIDGE = 1e-8
"""Weight of ‖y‖² that picks one of many optimal y; with s exact to ROUNDING it tells y_k > 4e-7 from y_k = 0."""

NOISE = 1e-7
"""Singular values of the factor below this share of the largest are rounding: the root of 1e-16, with room."""

SOLVED = 1e-13
"""Optimality residual (relative to Σ y, if above 1) that needs no further step."""

PROXIMAL_RIDGE, PROXIMAL_STEPS = 1e-13, 5
"""Weight of ‖y − y_last‖² in a proximal-point step, and the most steps taken."""


def solve(gramian: Array, c: Array) -> Array:
    """Solve min βᵀMβ subject to cᵀβ = 1, β ≥ 0.

    Args:
        gramian: M, positive semidefinite with diagonal at most 1, shape (K, K).
        c: in (0, 1], shape (K,).

    Returns:
        β, shape (K,). If several are optimal, the one with the least ‖β‖ among them.
    """
    if len(c) == 1:
        return 1.0 / c
    if len(c) == 2:
        return _two(gramian, c)
    y = _well_conditioned(gramian, c)
    if y is None:
        y = _degenerate(gramian, c)
    return y / (c @ y)


def _two(gramian: Array, c: Array) -> Array:
    """Solve K = 2 in closed form: α_1 = clip((m22 − m12) / (m11 + m22 − 2 m12), 0, 1) with m_kl = M_kl / (c_k c_l)."""
    (first, cross), (_, second) = gramian.tolist()
    c1, c2 = c.tolist()
    first, second, cross = first * c2 * c2, second * c1 * c1, cross * c1 * c2  # all times (c1 c2)²
    a1, a2 = max(second - cross, 0.0), max(first - cross, 0.0)  # not 1 − α_1, which has no digits for a tiny α_2
    if a1 + a2 <= 1e-15 * (first + second):
        a1, a2 = 1.0, 1.0  # equal vectors: any split is optimal
    return np.array([a1 / (a1 + a2) / c1, a2 / (a1 + a2) / c2])


def _well_conditioned(gramian: Array, c: Array) -> Array | None:
    """Run the active set on H itself; None unless the optimal set is unique and well-conditioned."""
    h = gramian + c[:, None] * c
    last: Array = h  # the inverse over the final set

    def solve_rows(rows: NDArray[np.intp]) -> Array:
        nonlocal last
        part, target = (h, c) if len(rows) == len(c) else (h[rows[:, None], rows], c[rows])
        last = np.asarray(np.linalg.inv(part), dtype=np.float64)
        y = last @ target
        return y + last @ (target - part @ y)  # one refinement makes the residual independent of the conditioning

    try:
        y, slack, free = active_set(solve_rows, lambda y: h @ y - c, len(c))
    except np.linalg.LinAlgError:
        return None
    trusted = last.diagonal().min() > 0 and last.max() < CONDITION  # no entry of a PSD matrix exceeds its diagonal's
    undecided = np.count_nonzero((slack < TIED) != free)  # it should be tight inside the set, clearly slack outside
    return y if trusted and not undecided else None


def _degenerate(gramian: Array, c: Array) -> Array:
    """Run the active set on a factor of H with a ridge, then remove the ridge: exactly if possible, else in steps."""
    size = len(c)
    eigenvalues, vectors = np.linalg.eigh(gramian)
    # Rounding may leave negative eigenvalues, of size 1e-7 if the inner products were taken in float32.
    factor = np.vstack([np.sqrt(np.maximum(eigenvalues, 0.0))[:, None] * vectors.T, c])
    target = np.append(np.zeros(size), 1.0)

    def ridged(ridge: float, centre: Array | None) -> Array:
        a = np.vstack([factor, math.sqrt(ridge) * np.eye(size)])
        b = np.append(target, np.zeros(size) if centre is None else math.sqrt(ridge) * centre)
        return non_negative_least_squares(a, b, centre)

    def solved(y: Array) -> bool:
        slack = factor.T @ (factor @ y - target)
        return bool(abs(np.minimum(y, slack)).max() <= SOLVED * max(1.0, y.sum()))

    y = ridged(RIDGE, None)
    exact = non_negative_least_squares(factor, target, y, NOISE)
    if solved(exact):
        return exact
    # Dependent up to about the ridge, neither more nor less: proximal-point steps, each centred on the last answer.
    for _ in range(PROXIMAL_STEPS):
        y = ridged(PROXIMAL_RIDGE, y)
        if solved(y):
            break
    return y


def non_negative_least_squares(a: Array, b: Array, start: Array | None = None, rcond: float | None = None) -> Array:
    """Minimise ‖ay − b‖ over y ≥ 0; singular values below ``rcond`` times the largest count as 0."""
    return active_set(lambda rows: least_squares(a[:, rows], b, rcond), lambda y: a.T @ (a @ y - b), a.shape[1], start)[
        0
    ]


def least_squares(a: Array, b: Array, rcond: float | None = None) -> Array:
    """Minimise ‖ay − b‖; of several y the shortest."""
    return np.asarray(np.linalg.lstsq(a, b, rcond=rcond)[0])


def active_set(
    solve_rows: Callable[[NDArray[np.intp]], Array],
    slack_of: Callable[[Array], Array],
    size: int,
    start: Array | None = None,
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Find y ≥ 0 with s ≥ 0 and y_k s_k = 0, by Lawson and Hanson's method.

    Args:
        solve_rows: indices of a set -> the entries of the unconstrained minimiser over that set.
        slack_of: y -> s, the gradient of the objective.
        size: K.
        start: y ≥ 0 whose positive entries make up the first set; None: start from the full set.

    Returns:
        y, s and the mask of the set. In exact arithmetic the objective falls with every change of the set, so that none
        returns; rounding could break this, hence the limit, after which the last non-negative y is returned.
    """
    y = start
    free = np.ones(size, dtype=bool) if start is None else start > 0
    slack = np.zeros(size)
    for _ in range(3 * size):
        rows = free.nonzero()[0]
        z = np.zeros(size)
        z[rows] = solve_rows(rows)
        negative = z < 0
        if not np.count_nonzero(negative):
            y, slack = z, slack_of(z)
            if len(rows) == size:
                break
            outside = np.where(free, 0.0, slack)
            entering = int(outside.argmin())
            if outside[entering] >= -ROUNDING * max(1.0, y.sum()):
                break
            free[entering] = True
        elif y is None:
            free &= ~negative  # no feasible point yet: shrink the set until there is one
        else:
            falling = negative.nonzero()[0]
            steps = y[falling] / (y[falling] - z[falling])
            step = steps.min()
            if step == 0:  # only by rounding: the entry that was to enter would leave at once
                break
            y = np.maximum(y + step * (z - y), 0.0)
            free[falling[steps.argmin()]] = False
            free &= ~negative | (y > ROUNDING)
            y[~free] = 0.0
            slack = slack_of(y)
    if y is None:
        raise np.linalg.LinAlgError("no non-negative point found")
    return y, slack, free
