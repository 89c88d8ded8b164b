"""The min-norm point by general conic solvers, to compare the exact method with: cvxpy and cvxpylayers.

Both minimise ‖Fβ‖² over cᵀβ = 1, β ≥ 0 with M = F², F symmetric: squares of the root rather than the quadratic form,
whose condition number is the square and which rounding may leave not quite convex.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradbalance.solvers.constraints import require, written
from gradbalance.solvers.derivative import once
from gradbalance.solvers.exact import Array
from gradbalance.solvers.polytope import EmptyError, Polytope

CLARABEL = {"tol_gap_abs": 1e-13, "tol_gap_rel": 1e-13, "tol_feas": 1e-13, "max_iter": 200}
"""Options of cvxpy's solver. Where it cannot get that far it returns its best point with a warning."""

SCS = {"solve_method": "SCS", "eps_abs": 1e-10, "eps_rel": 1e-10, "max_iters": 100_000}
"""Options of cvxpylayers' solver; of those it offers it was the most accurate here."""

SINGULAR = 1e-9
"""Share of the largest singular value of F below which the derivative of the root is left out."""


Restriction: TypeAlias = Callable[[Any], list[Any]]
"""From the cvxpy variable β to the constraints it has to meet."""


def restriction(polytope: Polytope, c: Array, others: Callable[[Any], Any] | None) -> Restriction:
    """Return the constraints that say: β lies in the polytope, and α = c β meets the user's own."""

    def restrict(beta: Any) -> list[Any]:
        mine = [polytope.equal @ beta == polytope.target, polytope.rows @ beta >= polytope.least]
        return mine if others is None else [*mine, *written(others, _cvxpy().multiply(c, beta))]

    return restrict


def solve(gramian: Array, c: Array) -> Array:
    """Solve min βᵀMβ subject to cᵀβ = 1, β ≥ 0 by cvxpy with Clarabel; arguments and result as in ``exact.solve``.

    Raises:
        ImportError: cvxpy is not installed.
        RuntimeError: the solver gave no solution.
    """
    value = np.maximum(solve_within(gramian, lambda beta: [c @ beta == 1, beta >= 0]), 0.0)
    return np.asarray(value / (c @ value))


def solve_within(gramian: Array, restrict: Restriction) -> Array:
    """Solve min βᵀMβ subject to any constraints by cvxpy with Clarabel.

    Raises:
        EmptyError: no β meets them.
        ImportError: cvxpy is not installed.
        RuntimeError: the solver gave no solution.
    """
    cp = _cvxpy()
    root = _Root.apply(torch.from_numpy(gramian)).numpy()  # type: ignore[no-untyped-call]
    beta = cp.Variable(len(gramian))
    problem = cp.Problem(cp.Minimize(cp.sum_squares(root @ beta)), restrict(beta))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")  # measured against the options above
        try:
            problem.solve(solver=cp.CLARABEL, **CLARABEL)
        except cp.error.SolverError as error:
            raise RuntimeError("cvxpy found no min-norm point; use solver='exact'") from error
    if beta.value is None:
        raise EmptyError
    return np.asarray(beta.value)


def solve_differentiable(gramian: Tensor, c: Tensor) -> Tensor:
    """Solve the problem of ``solve`` by cvxpylayers, differentiable with respect to the Gramian.

    Args:
        gramian: M, shape (K, K), float64 on the CPU.
        c: shape (K,), constant.

    Returns:
        β, shape (K,), float64.

    Raises:
        ImportError: cvxpylayers is not installed.
    """
    weights = c.numpy()
    value = solve_within_differentiable(gramian, lambda beta: [weights @ beta == 1, beta >= 0]).clamp(min=0.0)
    normalised: Tensor = value / (c @ value)
    return normalised


def solve_within_differentiable(gramian: Tensor, restrict: Restriction) -> Tensor:
    """Solve the problem of ``solve_within`` by cvxpylayers, differentiable with respect to the Gramian.

    Raises:
        EmptyError: no β meets the constraints.
        ImportError: cvxpylayers is not installed.
    """
    layers = require("cvxpylayers.torch", "solver='cvxpylayers'")
    cp = _cvxpy()
    size = len(gramian)
    root, beta = cp.Parameter((size, size)), cp.Variable(size)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(root @ beta)), restrict(beta))
    layer = layers.CvxpyLayer(problem, parameters=[root], variables=[beta])

    def run(m: Tensor) -> Tensor:
        (solution,) = layer(_Root.apply(m), solver_args=SCS)  # type: ignore[no-untyped-call]
        return solution  # type: ignore[no-any-return]

    return _Quiet.apply(gramian, run)  # type: ignore[no-any-return,no-untyped-call]


def _cvxpy() -> Any:
    return require("cvxpy", "solver='cvxpy'")


class _Quiet(torch.autograd.Function):
    """Run a function forwards and backwards without the warning that cvxpylayers' use of numpy 2 causes in both."""

    @staticmethod
    def forward(ctx: Any, argument: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad(), _quiet():
            ctx.save_for_backward(argument)
            ctx.leaf = argument.detach().requires_grad_()
            ctx.result = function(ctx.leaf)
        return ctx.result.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_result: Tensor) -> tuple[Tensor, None]:
        with _quiet():
            (grad,) = torch.autograd.grad(ctx.result, ctx.leaf, grad_result.detach(), retain_graph=True)
        return once(grad, *ctx.saved_tensors, grad_result), None


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        yield


class _Root(torch.autograd.Function):
    """The symmetric root F of a positive semidefinite M = F².

    From dM = F dF + dF F, in the eigenbasis of M with eigenvalues σ_i² : (dF)_ij = (dM)_ij / (σ_i + σ_j). Unlike the
    derivative of an eigendecomposition this has no trouble with repeated eigenvalues.
    """

    @staticmethod
    def forward(ctx: Any, gramian: Tensor) -> Tensor:
        eigenvalues, vectors = torch.linalg.eigh(gramian)
        sigma = eigenvalues.clamp(min=0.0).sqrt()
        ctx.save_for_backward(sigma, vectors)
        root: Tensor = (vectors * sigma) @ vectors.T
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_root: Tensor) -> Tensor:
        sigma, vectors = ctx.saved_tensors
        sums = sigma[:, None] + sigma
        inner = vectors.T @ (grad_root + grad_root.T) @ vectors / 2
        inner = torch.where(sums > SINGULAR * sigma.max(), inner / sums, 0.0)
        grad: Tensor = vectors @ inner @ vectors.T
        return grad
