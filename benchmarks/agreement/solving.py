"""Agreement of the balancers that solve a small convex problem with independent implementations of the same problem."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import cvxpy as cp
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog, root
from torch import Tensor
from torchjd.aggregation import CAGradWeighting, DualProjWeighting, FairGradWeighting, UPGradWeighting
from torchjd.linalg import QuadprogProjector

from gradbalance.balancers import EPO, CAGrad, DualProj, FairGrad, NashMTL, UPGrad

Array = NDArray[np.float64]


def gramians() -> Iterator[Tensor]:
    """Fixed draws: gradients of norms about 1 in twice as many dimensions as there are objectives."""
    for k in (2, 3, 5, 10, 16):
        for seed in range(10):
            gradients = np.random.default_rng([k, seed]).standard_normal((k, 2 * k)) / np.sqrt(2 * k)
            yield torch.from_numpy(gradients @ gradients.T)


def largest_difference(own: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]) -> float:
    """Largest |λ − λ'| relative to the largest |λ|, over the draws."""
    return max(float((own(m) - other(m)).abs().max() / own(m).abs().max()) for m in gramians())


def nash_by_cvxpy(m: Tensor) -> Tensor:
    """Maximise the product of the ⟨g_k, d⟩ over ‖d‖² = K, then λ_k = 1 / ⟨g_k, d⟩; the last digits by scipy's root."""
    factor = _factor(m)
    d = cp.Variable(len(m))
    _solve(cp.Problem(cp.Maximize(cp.sum(cp.log(factor @ d))), [cp.norm(d) <= np.sqrt(len(m))]))
    return torch.from_numpy(_polished(lambda x: m.numpy() @ x - 1 / x, 1 / (factor @ d.value)))


def ca_grad_by_cvxpy(m: Tensor, c: float) -> Tensor:
    """Maximise the smallest ⟨g_k, d⟩ over ‖d − g_0‖ ≤ c ‖g_0‖ with d − g_0 = Σ_k x_k g_k.

    x and the smallest progress ν are then polished by scipy's root: (Mx + M1/K)_k = ν where x_k > 0, xᵀMx = c² ‖g_0‖².
    """
    size, factor = len(m), _factor(m)
    mean = factor.mean(axis=0)
    radius = c * np.linalg.norm(mean)
    d, least = cp.Variable(size), cp.Variable()
    progress = factor @ d >= least
    _solve(cp.Problem(cp.Maximize(least), [progress, cp.norm(d - mean) <= radius]))
    w = progress.dual_value / progress.dual_value.sum()
    rows = np.flatnonzero(w > 1e-6)
    part, inner = m.numpy()[np.ix_(rows, rows)], (factor @ mean)[rows]

    def conditions(unknown: Array) -> Array:
        x, nu = unknown[:-1], unknown[-1]
        return np.append(part @ x + inner - nu, x @ part @ x - radius**2)

    start = np.append(w[rows] * radius / np.linalg.norm(w @ factor), least.value)
    found = np.full(size, 1 / size)
    found[rows] += _polished(conditions, start)[:-1]
    return torch.from_numpy(found)


def epo_losses(m: Tensor) -> Tensor:
    """Losses to go with a Gramian, away from the wanted proportion."""
    return m.diagonal() * (1.0 + torch.arange(len(m)) / len(m))


def epo_by_scipy(m: Tensor, tolerance: float) -> Tensor:
    """State the paper's two linear programs (equal preferences) and solve them by scipy's HiGHS."""
    c, size = m.numpy(), len(m)
    shares = (epo_losses(m) / epo_losses(m).sum()).numpy()
    non_uniformity = shares @ np.log(size * shares)
    by_anchor = c @ (np.log(size * shares) - non_uniformity) / size
    if non_uniformity > tolerance:
        objective, constraints = by_anchor, c
        least = np.where(by_anchor > 0, -np.inf, by_anchor if by_anchor.max() > 0 else 0.0)
        least[shares.argmax()] = 0.0
    else:
        objective, constraints = c.sum(axis=1), np.vstack([c, by_anchor])
        least = np.append(np.zeros(size), min(0.0, by_anchor.max()))
    for rows in (least > -np.inf, np.arange(len(least)) < size):
        found = linprog(-objective, -constraints[rows], -least[rows], np.ones((1, size)), [1.0], method="highs")
        if found.status == 0:
            break
    return torch.from_numpy(found.x)


def _epo_difference(tolerance: float) -> float:
    def own(m: Tensor) -> Tensor:
        return EPO(tolerance=tolerance).coefficients(m, epo_losses(m))

    return largest_difference(own, lambda m: epo_by_scipy(m, tolerance))


def _factor(m: Tensor) -> Array:
    eigenvalues, vectors = np.linalg.eigh(m.numpy())
    return np.asarray(vectors * np.sqrt(np.maximum(eigenvalues, 0.0)))


def _solve(problem: cp.Problem) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")  # than the tolerances asked for
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-14, tol_gap_rel=1e-14, tol_feas=1e-14, max_iter=200)


def _polished(conditions: Callable[[Array], Array], start: Array) -> Array:
    return np.asarray(root(conditions, start, tol=1e-14).x)


EXACT = QuadprogProjector(norm_eps=0.0, reg_eps=0.0)
"""torchjd's projector without what it adds to the Gramian by default, which biases the result by some 1e-3."""

PAIRS: dict[tuple[str, str], Callable[[], float]] = {
    ("nash_mtl", "cvxpy"): lambda: largest_difference(NashMTL().coefficients, nash_by_cvxpy),
    ("fair_grad, α = 2", "torchjd"): lambda: largest_difference(FairGrad(2.0).coefficients, FairGradWeighting(2.0)),
    ("fair_grad, α = 1/2", "torchjd"): lambda: largest_difference(FairGrad(0.5).coefficients, FairGradWeighting(0.5)),
    ("ca_grad", "cvxpy"): lambda: largest_difference(CAGrad(0.5).coefficients, lambda m: ca_grad_by_cvxpy(m, 0.5)),
    ("ca_grad", "torchjd"): lambda: largest_difference(CAGrad(0.5).coefficients, CAGradWeighting(0.5, norm_eps=0.0)),
    ("upgrad", "torchjd"): lambda: largest_difference(UPGrad().coefficients, UPGradWeighting(projector=EXACT)),
    ("epo, balance", "scipy"): lambda: _epo_difference(0.0),
    ("epo, descent", "scipy"): lambda: _epo_difference(100.0),
    ("dual_proj", "torchjd"): lambda: largest_difference(DualProj().coefficients, DualProjWeighting(projector=EXACT)),
}
"""(method, oracle) -> largest difference. torchjd's NashMTL is not here: it needs a solver (ecos) that is no longer
packaged for current Pythons."""

EXPLAINED = {
    ("ca_grad", "torchjd"): "theirs runs its solver at default accuracy; cvxpy with tight tolerances agrees with ours",
}
"""Pairs that differ by more than 1e-6, and why that is not ours."""
