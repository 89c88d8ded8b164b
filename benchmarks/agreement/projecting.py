"""How far the methods with closed forms or simple steps are from independent implementations of the same.

Each function of ``PAIRS`` returns the largest difference of λ, relative to the largest |λ|, over one set of draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import cvxpy as cp
import numpy as np
import torch
from conflictfree.grad_operator import ConFIGOperator, IMTLGOperator, PCGradOperator
from conflictfree.weight_model import WeightModel
from numpy.typing import NDArray
from torch import Tensor
from torchjd import aggregation

from gradbalance.balancers import (
    CRMOGM,
    IMTLG,
    MGDA,
    AlignedMTL,
    Balancer,
    ConFIG,
    GradVac,
    Marble,
    MoDo,
    PCGrad,
    SDMGrad,
    pcgrad,
)
from gradbalance.balancers.orders import random_orders

Array = NDArray[np.float64]
Step = Callable[[Tensor], Tensor]

SIZES = (2, 3, 5, 10, 16)
SEEDS = range(5)
CALLS = 4
"""Calls of a method with state on one draw."""


def _draws() -> Iterator[Array]:
    """Gradients in random directions, and crowded against a common one; norms of both within a factor of 10."""
    for size in SIZES:
        for seed in SEEDS:
            rng = np.random.default_rng((size, seed))
            free = rng.standard_normal((size, 200))
            conflicting = free - 0.8 * free.mean(axis=0)
            for gradients in (free, conflicting):
                yield gradients * 10.0 ** rng.uniform(-0.5, 0.5, (size, 1))


def _relative(own: Tensor, other: Tensor) -> float:
    return float((own - other).abs().max() / own.abs().max())


def _difference(make: Callable[[int], tuple[Step, Step]], calls: int = 1) -> float:
    """Compare two methods of a Gramian; ``make`` gives fresh ones for K objectives."""
    worst = 0.0
    for gradients in _draws():
        own, other = make(len(gradients))
        for call in range(calls):
            # The gradients turn from call to call, so that what was remembered matters.
            seen = gradients + 0.3 * call * np.roll(gradients, call, axis=1)
            gramian = torch.from_numpy(seen @ seen.T)
            worst = max(worst, _relative(own(gramian), other(gramian)))
    return worst


def _against_vectors(own: Callable[[int], Balancer], update: Callable[[Tensor], Tensor]) -> float:
    """Compare with a method that turns gradients into the update itself: λ is found by least squares."""
    worst = 0.0
    for gradients in _draws():
        target = update(torch.from_numpy(gradients)).numpy()
        other = torch.from_numpy(np.linalg.lstsq(gradients.T, target, rcond=None)[0])
        found = own(len(gradients)).coefficients(torch.from_numpy(gradients @ gradients.T))
        worst = max(worst, _relative(found, other))
    return worst


def _ramp(size: int) -> list[float]:
    return [1.0 + k for k in range(size)]


def _imtl_g_torchjd() -> float:
    return _difference(lambda size: (IMTLG().coefficients, aggregation.IMTLGWeighting()))


def _imtl_g_conflictfree() -> float:
    return _against_vectors(lambda size: IMTLG(), IMTLGOperator().calculate_gradient)


def _aligned_mtl_torchjd() -> float:
    def pair(mode: Any, preference: list[float] | None, size: int) -> tuple[Step, Step]:
        shares = None if preference is None else torch.tensor(preference, dtype=torch.float64) / sum(preference)
        other = aggregation.AlignedMTLWeighting(shares, scale_mode=mode)
        return AlignedMTL(preference, scale_mode=mode).coefficients, other

    return max(
        _difference(lambda size, mode=mode, ramp=ramp: pair(mode, ramp(size), size))  # type: ignore[misc]
        for mode in AlignedMTL.SCALES
        for ramp in (_ramp, lambda size: None)
    )


def _config_torchjd() -> float:
    def update(preference: bool) -> Callable[[Tensor], Tensor]:
        return lambda g: aggregation.ConFIG(
            torch.tensor(_ramp(len(g)), dtype=torch.float64) if preference else torch.ones(len(g), dtype=torch.float64)
        )(g)

    return max(
        _against_vectors(lambda size: ConFIG(), update(False)),
        _against_vectors(lambda size: ConFIG(_ramp(size)), update(True)),
    )


class _Wanted(WeightModel):  # type: ignore[misc]
    """conflictfree's own model of equal weights is in float32, whatever the gradients are."""

    def get_weights(self, gradients: Tensor, losses: Sequence[float] | None = None, device: Any = None) -> Tensor:
        return torch.ones(len(gradients), dtype=gradients.dtype)


def _config_conflictfree() -> float:
    operators = [
        ConFIGOperator(weight_model=_Wanted(), allow_simplified_model=two, use_least_square=least)
        for two, least in ((True, True), (False, True), (False, False))
    ]
    return max(_against_vectors(lambda size: ConFIG(), operator.calculate_gradient) for operator in operators)


def _cr_mogm_torchjd() -> float:
    """Over methods in which both agree, so that only the averaging is compared."""
    inner: list[tuple[Callable[[], Balancer], Callable[[], Any]]] = [
        (IMTLG, aggregation.IMTLGWeighting),
        (AlignedMTL, aggregation.AlignedMTLWeighting),
    ]
    return max(
        _difference(
            lambda size, own=own, other=other: (  # type: ignore[misc]
                CRMOGM(own(), decay=0.7).coefficients,
                aggregation.CRMOGMWeighting(other(), alpha=0.7),
            ),
            CALLS,
        )
        for own, other in inner
    )


def _modo_torchjd() -> float:
    """With one draw for both samples, and steps so long that the projection matters."""
    return max(
        _difference(
            lambda size, gamma=gamma: (  # type: ignore[misc]
                MoDo(gamma, rho=0.1, normalize=False).coefficients,
                aggregation.MoDoWeighting(gamma, rho=0.1),
            ),
            CALLS,
        )
        for gamma in (1e-4, 1e-3, 1e-2)
    )


def _sdm_grad_torchjd() -> float:
    """With one draw for both samples. Theirs divides by the squared mean norm + 1e-8, so ours is given the quotient."""

    def pair(size: int) -> tuple[Step, Step]:
        preference = torch.tensor(_ramp(size), dtype=torch.float64) / sum(_ramp(size))
        options = {"gamma": 0.1, "momentum": 0.5, "steps": 20}
        own = SDMGrad(regularization=0.3, preference=preference, normalize=False, **options)  # type: ignore[arg-type]
        other = aggregation.SDMGradWeighting(lr=0.1, momentum=0.5, n_iter=20, lambda_=0.3, pref_vector=preference)

        def ours(gramian: Tensor) -> Tensor:
            return own.coefficients(gramian / (gramian.diagonal().sqrt().mean() ** 2 + 1e-8))

        return ours, other

    return _difference(pair, CALLS)


class _Orders:
    """Stands for ``torch.randperm`` in torchjd's code: the orders that a balancer of ours draws."""

    def __init__(self, size: int, *, positions: bool) -> None:
        self.size, self.positions, self.calls = size, positions, 0
        self.rows: list[list[int]] = []

    def __call__(self, count: int) -> Tensor:
        if not self.rows:
            self.rows = random_orders(0, self.calls, self.size).tolist()
            self.calls += 1
        k = self.size - len(self.rows)
        order = self.rows.pop(0)
        if self.positions:  # among the others, in ascending order
            return torch.tensor([j - (j > k) for j in order])
        return torch.tensor([*order, k])


def _in_our_order(other: Step, size: int, *, positions: bool) -> Step:
    orders = _Orders(size, positions=positions)

    def step(gramian: Tensor) -> Tensor:
        with mock.patch.object(torch, "randperm", orders):
            return other(gramian)

    return step


def _pcgrad_torchjd() -> float:
    return _difference(
        lambda size: (PCGrad().coefficients, _in_our_order(aggregation.PCGradWeighting(), size, positions=False)), CALLS
    )


def _pcgrad_conflictfree() -> float:
    """Theirs goes through the objectives in ascending order."""

    def ascending(seed: int, calls: int, size: int) -> NDArray[np.intp]:
        return np.array([[j for j in range(size) if j != k] for k in range(size)])

    with mock.patch.object(pcgrad, "random_orders", ascending):
        return _against_vectors(lambda size: PCGrad(), PCGradOperator().calculate_gradient)


def _grad_vac_torchjd() -> float:
    """Theirs without the 1e-8 it adds to denominators."""

    def pair(size: int) -> tuple[Step, Step]:
        other = aggregation.GradVacWeighting(beta=0.5, eps=0.0)
        return GradVac(beta=0.5).coefficients, _in_our_order(other, size, positions=True)

    return _difference(pair, CALLS)


def _min_norm_cvxpy(gradients: Array) -> Array:
    alpha = cp.Variable(len(gradients), nonneg=True)
    root = np.linalg.qr(gradients.T, mode="r")
    problem = cp.Problem(cp.Minimize(cp.sum_squares(root @ alpha)), [cp.sum(alpha) == 1])
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13)
    return np.asarray(alpha.value)


def _mgda_cvxpy() -> float:
    return _against_weights(MGDA(), _min_norm_cvxpy)


def _marble_cvxpy() -> float:
    def harmonised(gradients: Array) -> Array:
        norms = np.linalg.norm(gradients, axis=1)
        return np.asarray(norms.mean() * _min_norm_cvxpy(gradients / norms[:, None]) / norms)

    return _against_weights(Marble(), harmonised)


def _against_weights(own: Balancer, other: Callable[[Array], Array]) -> float:
    return max(
        _relative(own.coefficients(torch.from_numpy(g @ g.T)), torch.from_numpy(other(g / np.abs(g).max())))
        for g in _draws()
    )


def _mgda_torchjd() -> float:
    return _difference(lambda size: (MGDA().coefficients, aggregation.MGDAWeighting()))


def mgda_excess() -> float:
    """The largest relative excess of ‖d‖² of torchjd's MGDA over ours, which is what both are to minimise."""
    worst = 0.0
    for gradients in _draws():
        gramian = torch.from_numpy(gradients @ gradients.T)
        own, other = MGDA().coefficients(gramian), aggregation.MGDAWeighting()(gramian)
        worst = max(worst, float((other @ gramian @ other) / (own @ gramian @ own)) - 1.0)
    return worst


PAIRS: dict[tuple[str, str], Callable[[], float]] = {
    ("aligned_mtl", "torchjd"): _aligned_mtl_torchjd,
    ("config", "conflictfree"): _config_conflictfree,
    ("config", "torchjd"): _config_torchjd,
    ("cr_mogm", "torchjd"): _cr_mogm_torchjd,
    ("grad_vac", "torchjd"): _grad_vac_torchjd,
    ("imtl_g", "conflictfree"): _imtl_g_conflictfree,
    ("imtl_g", "torchjd"): _imtl_g_torchjd,
    ("marble", "cvxpy"): _marble_cvxpy,
    ("mgda", "cvxpy"): _mgda_cvxpy,
    ("mgda", "torchjd"): _mgda_torchjd,
    ("modo", "torchjd"): _modo_torchjd,
    ("pcgrad", "conflictfree"): _pcgrad_conflictfree,
    ("pcgrad", "torchjd"): _pcgrad_torchjd,
    ("sdm_grad", "torchjd"): _sdm_grad_torchjd,
}

EXPLAINED = {
    ("mgda", "torchjd"): "theirs takes Frank-Wolfe steps until they are short; its update is longer (mgda_excess)",
}
"""Pairs that differ by more than 1e-6, and why that is not ours."""
