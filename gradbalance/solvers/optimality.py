"""How far a point is from solving the min-norm problem, free of the gradients' scale."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradbalance.solvers.checks import active_rows, check_gramian
from gradbalance.solvers.constraints import Constraints, as_arrays
from gradbalance.solvers.exact import Array
from gradbalance.solvers.mixing import group, prefer
from gradbalance.solvers.polytope import EmptyError, simplex_with
from gradbalance.solvers.standard import ALL_FLOOR


def kkt_residual(
    gramian: Tensor,
    alpha: Tensor,
    *,
    floor: float = 0.0,
    ceiling: float = 1.0,
    preference: Sequence[float] | Tensor | None = None,
    constraints: Constraints | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> float:
    """Measure how far α is from solving the min-norm problem, free of the gradients' scale.

    With d = Σ_k α_k g_k and the length ℓ = Σ_k α_k ‖g_k‖, the residual is the largest over k of |min(a_k, s_k)|, where
    a_k = (α_k − floor) ‖g_k‖ / ℓ is the room above the floor and s_k = (⟨g_k, d⟩ − ν) / (‖g_k‖ ℓ) the slack of the
    optimality condition; ν = Σ_k (α_k − floor) ⟨g_k, d⟩ / Σ_k (α_k − floor) is the multiplier of Σ α_k = 1, equal to
    ‖d‖² for floor 0. For unit gradients (ℓ = 1) this is the natural residual |min(α_k, ⟨g_k, d⟩ − ‖d‖²)|. It is 0
    exactly at the optimum, and defined where d = 0. An error in Σ α_k = 1 counts as well.

    With a ceiling or constraints the multipliers are not known, and the residual is how far x_k = α_k ‖g_k‖ / ℓ moves,
    at most over k, when a step down the gradient, x − ⟨g_k, d⟩ / (‖g_k‖ ℓ), is taken back to the nearest x allowed; or
    by how much α misses floor, ceiling, constraints or Σ α_k = 1, if that is more. It needs norms within six decades.

    Args:
        gramian: ⟨g_k, g_l⟩, shape (K, K). Rows that are zero, relative to the largest, are left out.
        alpha: the point to judge, shape (K,).
        floor: the options are those of :func:`min_norm`.
        ceiling: see there.
        preference: see there.
        constraints: see there; affine.
        groups: see there.

    Returns:
        The residual, ≥ 0, dimensionless; infinite if the α of rows without gradient break the constraints.
    """
    gramian, weights = check_gramian(gramian).detach(), alpha.detach().to("cpu", torch.float64)
    uneven = 0.0
    if groups is not None:
        gramian, shares = group(gramian, groups)
        together = (shares > 0).to(torch.float64) @ weights
        uneven, weights = float((weights - together @ shares).abs().max()), together
    if preference is not None:
        gramian = prefer(gramian, preference).detach()
    m, point = gramian.numpy(), weights.numpy()
    if constraints is None and ceiling >= 1.0:
        return max(uneven, _floor_residual(m, point, floor))
    return max(uneven, _natural_residual(m, point, floor, ceiling, constraints))


def _floor_residual(m: Array, weights: Array, floor: float) -> float:
    norms = np.sqrt(m.diagonal())
    rows = active_rows(norms).nonzero()[0]
    residual = abs(weights.sum() - 1.0)
    if len(rows) > 0:
        m, weights, norms = m[rows[:, None], rows], weights[rows], norms[rows]
        length, room, product = abs(weights) @ norms, weights - floor, m @ weights
        multiplier = room @ product / room.sum() if room.sum() > ALL_FLOOR else product.min()
        slack = (product - multiplier) / (norms * length)
        residual = max(residual, abs(np.minimum(room * norms / length, slack)).max())
    return float(residual)


def _natural_residual(m: Array, weights: Array, floor: float, ceiling: float, constraints: Constraints | None) -> float:
    norms = np.sqrt(m.diagonal())
    active = active_rows(norms)
    allowed = simplex_with(
        np.where(active, floor, 0.0), ceiling, None if constraints is None else as_arrays(constraints, len(m))
    )
    missed = allowed.missed(weights)
    idle = np.eye(len(m))[~active]
    allowed = allowed.with_equal(idle, idle @ weights)
    length = float(abs(weights) @ norms) or 1.0
    c = np.where(active, length / np.where(active, norms, 1.0), 1.0)
    x = weights / c
    gradient = np.where(active, c * (m @ weights) / length**2, 0.0)
    try:
        return max(missed, float(abs(x - allowed.scaled(c).nearest(x - gradient)).max()))
    except EmptyError:
        return math.inf
