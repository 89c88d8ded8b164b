"""The derivative of the exact min-norm point, by the implicit function theorem on its active set."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradbalance.solvers.checks import active_rows
from gradbalance.solvers.exact import Array
from gradbalance.solvers.polytope import Polytope, null_space, with_unit_rows

SINGULAR = 1e-12
"""Eigenvalues of the reduced Gramian below this share of the largest count as 0."""


Solve: TypeAlias = Callable[[Array], tuple[Array, Polytope | None]]
"""Gramian -> α and, if there is more than a floor, the set that α was looked for in."""


def differentiable(gramian: Tensor, floor: float, solve: Solve) -> Tensor:
    """Return ``solve``'s α for a Gramian of shape (K, K), float64 on the CPU, as a function that autograd knows."""
    return _Implicit.apply(gramian, floor, solve)  # type: ignore[no-any-return,no-untyped-call]


class _Implicit(torch.autograd.Function):
    """The exact solution with the derivative of its optimality conditions.

    Let Aα = b be all that holds with equality: Σ α_k = 1, α_k at a bound, constraints that are met exactly. With Z a
    basis of the null space of A, the conditions read Zᵀ M α = 0. Differentiating with dα = Z w,

        dα = −P dM α   with   P = Z (Zᵀ M Z)⁺ Zᵀ,

    and for an incoming gradient v the answer is −sym(P v αᵀ). The entries are scaled to unit gradients first.
    """

    @staticmethod
    def forward(ctx: Any, gramian: Tensor, floor: float, solve: Solve) -> Any:
        solution, ctx.polytope = solve(gramian.numpy())
        alpha = torch.from_numpy(solution)
        ctx.save_for_backward(gramian, alpha)
        ctx.floor = floor
        return alpha

    @staticmethod
    def backward(ctx: Any, grad_alpha: Tensor) -> tuple[Tensor, None, None]:
        gramian, saved = ctx.saved_tensors
        return (
            once(_gradient(ctx, gramian.detach(), saved.detach(), grad_alpha.detach()), gramian, grad_alpha),
            None,
            None,
        )


def _gradient(ctx: Any, gramian: Tensor, alpha: Tensor, grad_alpha: Tensor) -> Tensor:
    m, solution = gramian.numpy(), alpha.numpy()
    norms = np.sqrt(m.diagonal())
    idle = ~active_rows(norms)
    scale = 1.0 / np.where(idle, np.inf, norms)
    fixed, equations = idle | (solution <= ctx.floor), np.ones((1, len(m)))
    if ctx.polytope is not None:
        c = np.where(idle, 1.0, scale / scale.max())
        scaled = ctx.polytope.scaled(c)
        equations = np.vstack([scaled.equal / c, scaled.rows[scaled.held(solution / c)] / c])
        bounds = np.count_nonzero(equations, axis=1) == 1
        fixed, equations = idle | equations[bounds].any(axis=0), equations[~bounds]
    free = ~fixed
    scale = scale[free]
    z = null_space(with_unit_rows(equations[:, free] * scale))
    reduced = z.T @ (m[free][:, free] * scale[:, None] * scale) @ z
    u = np.zeros(len(m))
    if z.size:
        inverse = np.linalg.pinv(reduced, rcond=SINGULAR, hermitian=True)
        u[free] = scale * (z @ (inverse @ (z.T @ (scale * grad_alpha.numpy()[free]))))
    outer = torch.outer(torch.from_numpy(u), alpha)
    return -(outer + outer.T) / 2


def once(gradient: Tensor, *sources: Tensor) -> Tensor:
    """Return a derivative that refuses to be differentiated again, rather than be taken for a constant."""
    refused: Tensor = _Once.apply(gradient, *sources) if torch.is_grad_enabled() else gradient  # type: ignore[no-untyped-call]
    return refused


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("min_norm can be differentiated once; solver='enumeration' (K ≤ 8) as often as you like")
