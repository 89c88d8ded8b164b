"""The min-norm problem over the simplex, brought to one standard form for every solver.

Given the Gramian M of g_1 … g_K, find α ≥ 0 with Σ α_k = 1 that minimises αᵀMα = ‖Σ α_k g_k‖². Three exact changes of
variables come first, so that a solver sees only well-scaled problems without special cases:

* rows without gradient leave the problem and get α_k = 0;
* a floor f: α = f + (1 − K f) γ with γ on the simplex, which is the same problem for the vectors
  h_k = (1 − K f) g_k + f Σ_j g_j;
* wide norms: α_k = c_k β_k with c_k = min_j ‖g_j‖ / ‖g_k‖ turns M into the unit Gramian and Σ α_k = 1 into cᵀβ = 1.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradbalance.solvers import convex, exact
from gradbalance.solvers.checks import AnyArray, active_rows, check_gramian
from gradbalance.solvers.exact import Array

SOLVERS = ("exact", "cvxpy", "cvxpylayers")

ALL_FLOOR = 1e-9
"""When the floors leave less than this to distribute, it is distributed evenly."""


def min_norm(gramian: Tensor, *, floor: float = 0.0, solver: str = "exact") -> Tensor:
    """Find the point of least norm in the convex hull of K vectors.

    Computes α = argmin αᵀMα over {α_k ≥ floor, Σ_k α_k = 1}. The vector d = Σ_k α_k g_k is unique; if several α give
    it, "exact" returns the one with the least Σ_k (α_k ‖g_k‖)², whatever the order of the vectors.

    Args:
        gramian: M_kl = ⟨g_k, g_l⟩, positive semidefinite, shape (K, K), any floating dtype and device; norms may differ
            by many orders of magnitude. Rows that are zero, relative to the largest, leave the problem.
        floor: smallest α_k of an objective that has a gradient, in [0, 1/K].
        solver: "exact" (an active-set method: fast, and differentiable with respect to ``gramian``), "cvxpy" (a conic
            interior-point method; its result carries no gradient) or "cvxpylayers" (the same, differentiable). The
            last two are for comparison and need ``pip install gradbalance[solvers]``.

    Returns:
        α, shape (K,), float64 on the CPU; 0 for zero rows; 1/K everywhere if all rows are zero.

    Raises:
        ValueError: ``gramian`` is not square, symmetric and finite, or ``floor`` or ``solver`` is unknown.
        ImportError: the package of ``solver`` is not installed.

    Note:
        On unit gradients the residual of the optimality conditions (:func:`kkt_residual`) is about 1e-13 or less. On
        raw ones it is the same relative to the sum of the lengths Σ α_k ‖g_k‖, but whether long gradients cancel to
        within 1e-8 of their length or exactly is a matter of rounding, which short ones among them then depend on.

        The derivative is that of the optimality conditions with the set {k: α_k > floor} held fixed. Where α has none,
        the answer is still finite: for linearly dependent vectors that of the pseudo-inverse, for an α_k just about to
        leave the floor that of staying there.

    References:
        P. Wolfe. Finding the nearest point in a polytope. Mathematical Programming 11, 1976.
    """
    gramian = check_gramian(gramian)
    size = gramian.shape[0]
    if not 0.0 <= floor * size <= 1.0 + 1e-12:
        raise ValueError(f"floor must be in [0, 1/K] = [0, {1 / size:g}] for K = {size}, got {floor!r}")
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(map(repr, SOLVERS))}, got {solver!r}")
    if solver == "cvxpylayers":
        return _differentiable_conic(gramian, floor)
    if solver == "exact" and torch.is_grad_enabled() and gramian.requires_grad:
        return _DifferentiableMinNorm.apply(gramian, floor)  # type: ignore[no-any-return,no-untyped-call]
    return torch.from_numpy(_alpha(gramian.detach().numpy(), floor, exact.solve if solver == "exact" else convex.solve))


def kkt_residual(gramian: Tensor, alpha: Tensor, *, floor: float = 0.0) -> float:
    """Measure how far α is from solving the min-norm problem, free of the gradients' scale.

    With d = Σ_k α_k g_k and the length ℓ = Σ_k α_k ‖g_k‖, the residual is the largest over k of |min(a_k, s_k)|, where
    a_k = (α_k − floor) ‖g_k‖ / ℓ is the room above the floor and s_k = (⟨g_k, d⟩ − ν) / (‖g_k‖ ℓ) the slack of the
    optimality condition; ν = Σ_k (α_k − floor) ⟨g_k, d⟩ / Σ_k (α_k − floor) is the multiplier of Σ α_k = 1, equal to
    ‖d‖² for floor 0. For unit gradients (ℓ = 1) this is the natural residual |min(α_k, ⟨g_k, d⟩ − ‖d‖²)|. It is 0
    exactly at the optimum, and defined where d = 0. An error in Σ α_k = 1 counts as well.

    Args:
        gramian: ⟨g_k, g_l⟩, shape (K, K). Rows that are zero, relative to the largest, are left out.
        alpha: the point to judge, shape (K,).
        floor: smallest α_k allowed.

    Returns:
        The residual, ≥ 0, dimensionless.
    """
    m = check_gramian(gramian).detach().numpy()
    weights = alpha.detach().to("cpu", torch.float64).numpy()
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


class _StandardForm(NamedTuple):
    """min βᵀ(unit)β subject to cᵀβ = 1, β ≥ 0 over the A active rows; γ = c β, α = floor + (1 − A floor) γ."""

    rows: NDArray[np.intp]  # indices of the active rows, (A,)
    norms: Array  # ‖h_k‖, (A,)
    c: Array  # (A,), in (0, 1]
    unit: Array  # unit Gramian of the h_k, (A, A)


def _standard_form(m: Array, floor: float) -> _StandardForm:
    norms = np.sqrt(m.diagonal())
    rows = active_rows(norms).nonzero()[0]
    if len(rows) < len(m):
        m, norms = m[rows[:, None], rows], norms[rows]
    if floor > 0 and len(rows) > 0:
        m = _raise_floor(m, floor)
        # An h_k may vanish although no gradient does: 0 is then the answer, and any positive number serves as its norm.
        norms = np.sqrt(np.maximum(m.diagonal(), np.finfo(np.float64).eps * norms.max() ** 2))
    c = norms.min(initial=math.inf) / norms
    return _StandardForm(rows, norms, c, m / (norms[:, None] * norms))


def _raise_floor(m: AnyArray, floor: float) -> AnyArray:
    """Return the Gramian of h_k = (1 − K floor) g_k + floor Σ_j g_j."""
    share = 1.0 - len(m) * floor
    sums = m.sum(0)
    lifted: AnyArray = share**2 * m + share * floor * (sums[:, None] + sums) + floor**2 * sums.sum()
    return lifted


def _alpha(m: Array, floor: float, solve: Callable[[Array, Array], Array]) -> Array:
    rows, _, c, unit = _standard_form(m, floor)
    if len(rows) == 0:
        return np.full(len(m), 1.0 / len(m))
    share = 1.0 - len(rows) * floor
    gamma = c * solve(unit, c) if share > ALL_FLOOR else np.full(len(rows), 1.0 / len(rows))
    if len(rows) == len(m):
        return floor + share * gamma
    alpha = np.zeros(len(m))
    alpha[rows] = floor + share * gamma
    return alpha


def _differentiable_conic(gramian: Tensor, floor: float) -> Tensor:
    """Take the steps of ``_alpha`` in torch, so that gradients flow through them and through the solver."""
    rows, norms, c, _ = (torch.from_numpy(part) for part in _standard_form(gramian.detach().numpy(), floor))
    if len(rows) == 0:
        return torch.full_like(gramian[0], 1.0 / len(gramian))
    m = gramian[rows][:, rows]
    m = (m + m.T) / 2  # changes nothing but the derivative, which is that of a symmetric matrix
    if floor > 0:
        m = _raise_floor(m, floor)
    share = 1.0 - len(rows) * floor
    if share > ALL_FLOOR:
        gamma = c * convex.solve_differentiable(m / (norms[:, None] * norms), c)
    else:
        gamma = torch.full_like(norms, 1.0 / len(rows))
    return torch.zeros_like(gramian[0]).index_put((rows,), floor + share * gamma)


class _DifferentiableMinNorm(torch.autograd.Function):
    """The exact solution with the derivative of its optimality conditions.

    On the set S = {k: α_k > floor} they read (Mα)_k = ν and Σ α_k = 1, the other α_k being constant. Differentiating,
    M_SS dα_S + (dM α)_S = dν 1 and Σ dα_S = 0, so that dα_S = −P (dM α)_S with P the upper left block of the inverse of
    [[M_SS, 1], [1ᵀ, 0]]. For an incoming gradient v the answer is −sym(u αᵀ), u = P v_S. The rows are scaled to unit
    gradients before the inversion; a singular system (linearly dependent vectors) gets the pseudo-inverse.
    """

    @staticmethod
    def forward(ctx: Any, gramian: Tensor, floor: float) -> Tensor:
        alpha = torch.from_numpy(_alpha(gramian.numpy(), floor, exact.solve))
        ctx.save_for_backward(gramian, alpha)
        ctx.floor = floor
        return alpha

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_alpha: Tensor) -> tuple[Tensor, None]:
        gramian, alpha = ctx.saved_tensors
        norms = gramian.diagonal().sqrt()
        rows = torch.nonzero((alpha > ctx.floor) & active_rows(norms)).flatten()
        scale = 1.0 / norms[rows]
        size = len(rows)
        system = torch.zeros(size + 1, size + 1, dtype=torch.float64)
        system[:size, :size] = gramian[rows][:, rows] * scale[:, None] * scale
        system[:size, size] = system[size, :size] = scale / scale.sum()
        u = torch.zeros_like(alpha)
        inverse = torch.linalg.pinv(system, rtol=1e-12, hermitian=True)
        u[rows] = scale * (inverse[:size, :size] @ (scale * grad_alpha[rows]))
        outer = torch.outer(u, alpha)
        return -(outer + outer.T) / 2, None
