"""The optimizer of the MARBLE paper: the engine with the MARBLE balancer and the paper's averaging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from gradbalance.balancers import Marble
from gradbalance.optimizer import BalancedOptimizer
from gradbalance.solvers.constraints import Constraints


class MarbleOptimizer(BalancedOptimizer):
    """A :class:`BalancedOptimizer` with the MARBLE balancer: steps along n̄ Σ_k ᾱ_k g_k/‖g_k‖ (arXiv 2605.06507).

    α is the min-norm point of the unit gradients, so with ``ema_decay=0`` and a solve on every step the update has a
    non-negative cosine with every objective's gradient. With smoothing or amortisation that is a measured rate, not a
    promise: ``report.min_cosine`` and ``report.conflicts`` show it.

    Args:
        optimizer: The inner optimizer; it makes the step.
        ema_decay: ρ of the average of α over solves; the paper's best is 0.7.
        preference: K positive numbers: progress on objective k is made in proportion to them. Default: equal.
        floor: Least α of an objective that has a gradient, in [0, 1/K].
        ceiling: Largest α, at least 1/K.
        constraints: Linear constraints on α, see :func:`gradbalance.solvers.min_norm`.
        solver: ``"exact"``, ``"cvxpy"`` or ``"cvxpylayers"``.
        **options: Those of :class:`BalancedOptimizer`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        ema_decay: float = 0.7,
        preference: Sequence[float] | None = None,
        floor: float = 0.0,
        ceiling: float = 1.0,
        constraints: Constraints | None = None,
        solver: str = "exact",
        **options: Any,
    ) -> None:
        balancer = Marble(preference=preference, floor=floor, solver=solver, ceiling=ceiling, constraints=constraints)
        super().__init__(optimizer, balancer, ema_decay=ema_decay, **options)
