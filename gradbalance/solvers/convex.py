"""The min-norm point by general conic solvers, to compare the exact method with: cvxpy and cvxpylayers.

Both minimise ‖Fβ‖ over cᵀβ = 1, β ≥ 0 with M = F², F symmetric: the norm of the root, not the quadratic form, because
squaring the condition number would cost half of the digits on nearly dependent gradients.
"""

import importlib
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradbalance.solvers.exact import Array

TOLERANCES = {"tol_gap_abs": 1e-13, "tol_gap_rel": 1e-13, "tol_feas": 1e-13, "max_iter": 500}
"""Clarabel stops at 1e-8 by default; it still returns its best point where it cannot reach these."""

SINGULAR = 1e-9
"""Share of the largest singular value of F below which the derivative of the root is left out."""


def solve(gramian: Array, c: Array) -> Array:
    """Solve min βᵀMβ subject to cᵀβ = 1, β ≥ 0 by cvxpy with Clarabel; arguments and result as in ``exact.solve``.

    Raises:
        ImportError: cvxpy is not installed.
        RuntimeError: the solver gave no solution.
    """
    cp = _require("cvxpy")
    root = _Root.apply(torch.from_numpy(gramian)).numpy()  # type: ignore[no-untyped-call]
    beta = cp.Variable(len(c), nonneg=True)
    problem = cp.Problem(cp.Minimize(cp.norm(root @ beta)), [c @ beta == 1])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")  # than TOLERANCES, far below its own
        problem.solve(solver=cp.CLARABEL, **TOLERANCES)
    if beta.value is None:
        raise RuntimeError(f"cvxpy found no min-norm point (status {problem.status!r}); use solver='exact'")
    value = np.maximum(beta.value, 0.0)
    return np.asarray(value / (c @ value))


def solve_differentiable(gramian: Tensor, c: Tensor) -> Tensor:
    """Solve the same by cvxpylayers, differentiable with respect to the Gramian.

    Args:
        gramian: M, shape (K, K), float64 on the CPU.
        c: shape (K,), constant.

    Returns:
        β, shape (K,), float64.

    Raises:
        ImportError: cvxpylayers is not installed.
    """
    cp, layers = _require("cvxpy"), _require("cvxpylayers.torch")
    size = len(c)
    root, weights, beta = cp.Parameter((size, size)), cp.Parameter(size), cp.Variable(size, nonneg=True)
    problem = cp.Problem(cp.Minimize(cp.norm(root @ beta)), [weights @ beta == 1])
    layer = layers.CvxpyLayer(problem, parameters=[root, weights], variables=[beta])
    with warnings.catch_warnings():
        # cvxpylayers hands tensors to numpy in a way that numpy 2 is going to refuse.
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        options = {"solve_method": "Clarabel", **TOLERANCES}
        (solution,) = layer(_Root.apply(gramian), c, solver_args=options)  # type: ignore[no-untyped-call]
    solution = solution.clamp(min=0.0)
    return solution / (c @ solution)  # type: ignore[no-any-return]


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"solver={module.split('.')[0]!r} needs a package that is missing ({error.name}): "
            "pip install gradbalance[solvers], or use solver='exact'"
        ) from error


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
        return (vectors * sigma) @ vectors.T

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_root: Tensor) -> Tensor:
        sigma, vectors = ctx.saved_tensors
        sums = sigma[:, None] + sigma
        inner = vectors.T @ (grad_root + grad_root.T) @ vectors / 2
        inner = torch.where(sums > SINGULAR * sigma.max(), inner / sums, 0.0)
        return vectors @ inner @ vectors.T
