"""Small linear programs over the simplex: the dual simplex method on a dictionary of K variables.

The problem is max fᵀα subject to α ≥ 0, Σα = 1, Aα ≥ b. Without Aα ≥ b the answer is the corner α_j = 1 of the largest
f_j. The dual method starts there and brings in violated constraints one by one, each time giving up as little of fᵀα as
it must. It needs no search for a feasible point, and about as many steps as constraints hold with equality at the end.

The dictionary states the objective and the basic variables (α_j and the slacks s = Aα − b at the start) as affine
functions of the nonbasic ones, which are 0 at the current point; a step exchanges one variable of either kind.

References:
    C. E. Lemke. The dual method of solving the linear programming problem. Naval Research Logistics 1, 1954.
"""

import numpy as np
from numpy.typing import NDArray

from gradbalance.solvers.exact import Array

ROUNDING = 1e-12
"""Entries of a dictionary, whose rows are scaled to 1 at the start, below this are zero."""

SMALLEST_PIVOT = 1e-9
"""Entries below this are not divided by, which would magnify rounding."""


def maximise(f: Array, a: Array, b: Array) -> Array | None:
    """Solve max fᵀα subject to α ≥ 0, Σα = 1, Aα ≥ b.

    Args:
        f: shape (K,).
        a: A, shape (M, K).
        b: shape (M,).

    Returns:
        α, shape (K,), a corner; None if there is no feasible point.
    """
    size = len(f)
    corner = int(f.argmax())
    others = np.delete(np.arange(size), corner)
    constant = np.append(a[:, corner] - b, 1.0)
    slopes = np.vstack([a[:, others] - a[:, corner, None], -np.ones(size - 1)])
    rows = np.column_stack([constant, slopes])
    rows /= np.maximum(abs(rows).max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    reduced = np.append(0.0, f[others] - f[corner])
    reduced /= max(float(abs(reduced).max()), np.finfo(np.float64).tiny)
    dictionary = np.vstack([rows, reduced])
    basic = np.append(np.full(len(a), -1), corner)  # which α is basic in a row; slacks are all called −1
    nonbasic = others.copy()
    if not _dual_simplex(dictionary, basic, nonbasic):
        return None
    alpha = np.zeros(size)
    held = basic >= 0
    alpha[basic[held]] = np.maximum(dictionary[:-1][held, 0], 0.0)
    alpha /= alpha.sum()
    return alpha


def _dual_simplex(dictionary: Array, basic: NDArray[np.intp], nonbasic: NDArray[np.intp]) -> bool:
    """Exchange variables, in place, until all basic ones are ≥ 0; False if that is impossible.

    The reduced costs in the last row are ≤ 0 and stay so. The most negative variable leaves; should the method not be
    done after many steps, the first one does (Bland's rule), which cannot cycle.
    """
    limit = 10 * len(dictionary)
    for step in range(2 * limit):
        values = dictionary[:-1, 0]
        leaving = int(values.argmin()) if step < limit else int((values < -ROUNDING).argmax())
        if values[leaving] >= -ROUNDING:
            return True
        row = dictionary[leaving, 1:]
        candidates = np.flatnonzero(row > SMALLEST_PIVOT)
        if len(candidates) == 0:
            return False
        entering = int(candidates[(-dictionary[-1, 1:][candidates] / row[candidates]).argmin()])
        _exchange(dictionary, leaving, entering + 1)
        basic[leaving], nonbasic[entering] = nonbasic[entering], basic[leaving]
    return False


def _exchange(dictionary: Array, row: int, column: int) -> None:
    """Solve a row for a nonbasic variable and insert it in all others."""
    pivot = dictionary[row, column]
    solved = dictionary[row] / -pivot
    solved[column] = 1.0 / pivot
    factors = dictionary[:, column].copy()
    dictionary[:, column] = 0.0
    dictionary += factors[:, None] * solved
    dictionary[row] = solved
