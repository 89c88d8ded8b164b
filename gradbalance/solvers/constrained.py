"""The min-norm point under ceilings and linear constraints, exact: min ½ βᵀUβ over {β: Eβ = t, Aβ ≥ b}.

U is the unit Gramian and the set any polytope (``polytope.py``). As in ``exact.py`` two ways serve the same conditions,

    Uβ = Eᵀμ + Aᵀν,   ν ≥ 0,   ν_i (Aβ − b)_i = 0   for every i,

and the first, fast one is trusted only with a unique and well-conditioned answer:

* *Guess and correct.* Take a set of inequalities as equations, solve the linear system, release those with a negative
  multiplier and add those that are violated, all at once, until nothing changes. A few steps as a rule; it may cycle.
* *Descend*, by a primal active-set method: minimise over the face that the working set describes, stopping at the first
  inequality in the way, which joins the set. At a face's minimum the gradient is projected on the cone of ALL
  inequalities that hold with equality there, by non-negative least squares. Nothing left means optimal; else what is
  left, reversed, is a direction of descent that leaves none of them, and those with ν > 0 are the new working set.
  Every such step makes the objective smaller, so that no set returns, however many inequalities meet in one point.

For the second a small ridge makes the objective strictly convex, which picks the shortest of several optimal β, and
proximal-point steps take it away again. Nearly dependent gradients need it, and some milliseconds.

References:
    J. Nocedal, S. J. Wright. Numerical Optimization, 2nd edition, sections 16.4 and 16.5. Springer, 2006.
    C. L. Lawson, R. J. Hanson. Solving Least Squares Problems, chapter 23. Prentice-Hall, 1974.
"""

import numpy as np

from gradbalance.solvers.checks import active_rows
from gradbalance.solvers.exact import (
    CONDITION,
    ROUNDING,
    SOLVED,
    TIED,
    Array,
    least_squares,
    non_negative_least_squares,
)
from gradbalance.solvers.polytope import EmptyError, Polytope, null_space

GUESSES = 9
"""Corrections of the guessed set before it is given up."""

RIDGE, STEPS = 1e-10, 6
"""Weight of ½ ‖β − β_last‖² in a proximal-point step, and the most steps taken."""

STATIONARY = 1e-13
"""Size of the projected gradient, relative to Σ |β_k|, that counts as 0."""


def solve(gramian: Array, polytope: Polytope, guess: Array) -> Array:
    """Minimise αᵀMα over a polytope.

    Args:
        gramian: M, positive semidefinite, shape (K, K).
        polytope: bounded.
        guess: any α, the better the faster.

    Returns:
        α, shape (K,). Rows without gradient get the least α that the polytope allows, 0 as a rule. If several α are
        optimal, the one with the least Σ (α_k ‖g_k‖)².

    Raises:
        EmptyError: the polytope has no point.
    """
    if not gramian.any():
        return polytope.nearest(guess)
    norms, c, scaled, start = scaled_form(gramian, polytope, guess)
    unit = gramian / (norms[:, None] * norms)
    beta = guess_and_correct(unit, np.zeros(len(c)), scaled, guess / c, unique=True)
    if beta is None:
        beta = proximal(unit, scaled, (polytope.nearest(guess) if start is None else start) / c)
    return c * beta


def scaled_form(gramian: Array, polytope: Polytope, guess: Array) -> tuple[Array, Array, Polytope, Array | None]:
    """Prepare the change to unit gradients, α = c β, for a Gramian that is not 0.

    Returns:
        The ‖g_k‖, infinite for rows without gradient; c; and the set of β, in which the α of those rows are fixed: at 0
        if that can be, else at the least values (in their Euclidean norm). Then an α of the set, if one was found.
    """
    norms = np.sqrt(gramian.diagonal())
    idle = ~active_rows(norms)
    norms = np.where(idle, np.inf, norms)
    c, start = np.where(idle, 1.0, norms.min() / norms), None
    if idle.any():
        picked = np.eye(len(idle))[idle]
        try:
            rest = polytope.with_equal(picked, np.zeros(len(picked)))
            start = rest.nearest(guess)
        except EmptyError:
            share = np.diag(np.where(idle, 1.0, SOLVED))
            start = _descend(share, np.zeros(len(idle)), polytope, polytope.nearest(guess))
            rest = polytope.with_equal(picked, start[idle])
        polytope = rest
    return norms, c, polytope.scaled(c), start


def guess_and_correct(unit: Array, pull: Array, polytope: Polytope, guess: Array, *, unique: bool) -> Array | None:
    """Minimise ½ xᵀUx − pullᵀx by looking for the inequalities that hold with equality.

    Returns:
        x; None if there is none, or if ``unique`` and this one is not clearly the only one.
    """
    equal, target, rows, least = polytope
    size = len(unit)
    most = max(size - len(equal), 0)
    working, room = polytope.held(guess), rows @ guess - least
    for _ in range(GUESSES):
        if np.count_nonzero(working) > most:  # more equations than unknowns: keep those that are violated most
            working[np.where(working, room, np.inf).argsort()[most:]] = False
        a, b = np.vstack([equal, rows[working]]), np.append(target, least[working])
        system = np.zeros((size + len(a), size + len(a)))
        system[:size, :size], system[:size, size:], system[size:, :size] = unit, a.T, a
        aim = np.append(pull, b)
        try:
            solution = np.linalg.solve(system, aim)
            solution += np.linalg.solve(system, aim - system @ solution)  # no error from the conditioning
        except np.linalg.LinAlgError:
            return None
        room = np.where(working, 0.0, rows @ solution[:size] - least)
        multipliers = np.zeros(len(rows))
        multipliers[working] = -solution[size + len(equal) :]
        wrong = np.where(working, multipliers, room) < -ROUNDING
        if not wrong.any():
            break
        working ^= wrong
    else:
        return None
    if abs(aim - system @ solution).max() > SOLVED * max(1.0, float(abs(solution).max())):
        return None
    trusted = not unique or (
        np.where(working, multipliers, room).min() > TIED and abs(np.linalg.inv(system)).max() < CONDITION
    )
    return np.asarray(solution[:size], dtype=np.float64) if trusted else None


def proximal(unit: Array, polytope: Polytope, start: Array) -> Array:
    """Find the optimal β of least Euclidean norm: a small ridge, then taken away by centring it on the last answer."""
    eigenvalues, vectors = np.linalg.eigh(unit)
    ridged = (vectors * (np.maximum(eigenvalues, 0.0) + RIDGE)) @ vectors.T
    x, last = start, np.zeros(len(unit))
    for _ in range(STEPS):
        found = guess_and_correct(ridged, RIDGE * last, polytope, x, unique=False)
        x = _descend(ridged, RIDGE * last, polytope, x) if found is None else found
        if RIDGE * abs(x - last).max() <= SOLVED * max(1.0, abs(x).sum()):
            break
        last = x
    return x


def _descend(h: Array, pull: Array, polytope: Polytope, x: Array) -> Array:
    """Minimise ½ xᵀHx − pullᵀx over the polytope, from a point of it, for a positive definite H."""
    free = null_space(polytope.equal)
    equal, rows = null_space(free.T).T, polytope.rows  # what the equations span, each only once
    working: list[int] = []
    for _ in range(10 * (len(rows) + 1)):
        x, blocking = _walk(x, _to_face(h, h @ x - pull, np.vstack([equal, rows[working]])), 1.0, polytope, working)
        if blocking is not None:
            working.append(blocking)
            continue
        held = polytope.held(x).nonzero()[0]
        gradient, cone = free.T @ (h @ x - pull), (rows[held] @ free).T
        multipliers = non_negative_least_squares(cone, gradient, np.zeros(len(held)))  # on independent rows
        working = held[multipliers > 0].tolist()
        # What is left of the gradient, free of the rounding of the rest.
        basis = null_space(np.vstack([equal, rows[working]]))
        left = basis @ (basis.T @ (h @ x - pull))
        if np.sqrt(left @ left) <= STATIONARY * max(1.0, abs(x).sum()):
            break
        x, blocking = _walk(x, -left, float(left @ left / (left @ h @ left)), polytope, working)
        if blocking is not None:
            working.append(blocking)
    return x


def _to_face(h: Array, gradient: Array, a: Array) -> Array:
    """Return the step to the minimum over {x: ax stays what it is}."""
    size = len(h)
    system = np.zeros((size + len(a), size + len(a)))
    system[:size, :size], system[:size, size:], system[size:, :size] = h, a.T, a
    try:
        return np.asarray(np.linalg.solve(system, np.append(-gradient, np.zeros(len(a))))[:size])
    except np.linalg.LinAlgError:  # rows that are dependent up to rounding
        basis = null_space(a)
        return -basis @ least_squares(basis.T @ h @ basis, basis.T @ gradient)


def _walk(x: Array, direction: Array, step: float, polytope: Polytope, but: list[int]) -> tuple[Array, int | None]:
    """Walk up to ``step`` or until an inequality not in ``but`` is met; returns the point and the inequality."""
    fall = polytope.rows @ direction
    fall[but] = 0.0
    falling = (fall < -1e-14 * max(1.0, float(abs(direction).max()))).nonzero()[0]
    room = np.maximum(polytope.rows[falling] @ x - polytope.least[falling], 0.0)
    steps = room / -fall[falling]
    if steps.min(initial=np.inf) >= step:
        return x + step * direction, None
    first = int(steps.argmin())
    return x + steps[first] * direction, int(falling[first])
