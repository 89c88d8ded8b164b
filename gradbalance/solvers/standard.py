"""The min-norm problem over the simplex with a floor, brought to one standard form for every solver.

Given the Gramian M of g_1 … g_K, find α ≥ floor with Σ α_k = 1 that minimises αᵀMα = ‖Σ α_k g_k‖². Three exact changes
of variables come first, so that a solver sees only well-scaled problems without special cases:

* rows without gradient leave the problem and get α_k = 0;
* a floor f: α = f + (1 − K f) γ with γ on the simplex, which is the same problem for the vectors
  h_k = (1 − K f) g_k + f Σ_j g_j;
* wide norms: α_k = c_k β_k with c_k = min_j ‖g_j‖ / ‖g_k‖ turns M into the unit Gramian and Σ α_k = 1 into cᵀβ = 1.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradbalance.solvers.checks import AnyArray, active_rows
from gradbalance.solvers.exact import Array

ALL_FLOOR = 1e-9
"""When the floors leave less than this to distribute, it is distributed evenly."""


class StandardForm(NamedTuple):
    """min βᵀ(unit)β subject to cᵀβ = 1, β ≥ 0 over the A active rows; γ = c β, α = floor + (1 − A floor) γ."""

    rows: NDArray[np.intp]  # indices of the active rows, (A,)
    norms: Array  # ‖h_k‖, (A,)
    c: Array  # (A,), in (0, 1]
    unit: Array  # unit Gramian of the h_k, (A, A)


def standard_form(m: Array, floor: float) -> StandardForm:
    """Apply the three changes of variables to a Gramian of shape (K, K)."""
    norms = np.sqrt(m.diagonal())
    rows = active_rows(norms).nonzero()[0]
    if len(rows) < len(m):
        m, norms = m[rows[:, None], rows], norms[rows]
    if floor > 0 and len(rows) > 0:
        m = raise_floor(m, floor, 1.0 - len(rows) * floor)
        # An h_k may vanish although no gradient does: 0 is then the answer, and any positive number serves as its norm.
        norms = np.sqrt(np.maximum(m.diagonal(), np.finfo(np.float64).eps * norms.max() ** 2))
    c = norms.min(initial=math.inf) / norms
    return StandardForm(rows, norms, c, m / (norms[:, None] * norms))


def raise_floor(m: AnyArray, floor: float, share: float | AnyArray) -> AnyArray:
    """Return the Gramian of h_k = share g_k + floor Σ_j g_j, share = 1 − K floor; any leading dimensions."""
    sums = m.sum(-1)
    lifted: AnyArray = (
        share**2 * m
        + share * floor * (sums[..., :, None] + sums[..., None, :])
        + floor**2 * sums.sum(-1)[..., None, None]
    )
    return lifted


def min_norm_with_floor(m: Array, floor: float, solve: Callable[[Array, Array], Array]) -> Array:
    """Return α for a Gramian of shape (K, K), by a solver of the standard form; uniform if all rows are zero."""
    rows, _, c, unit = standard_form(m, floor)
    if len(rows) == 0:
        return np.full(len(m), 1.0 / len(m))
    share = 1.0 - len(rows) * floor
    gamma = c * solve(unit, c) if share > ALL_FLOOR else np.full(len(rows), 1.0 / len(rows))
    if len(rows) == len(m):
        return floor + share * gamma
    alpha = np.zeros(len(m))
    alpha[rows] = floor + share * gamma
    return alpha
