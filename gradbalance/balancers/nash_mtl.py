"""Nash-MTL: the update on which the objectives agree in a bargaining game."""

import math

import numpy as np
from torch import Tensor

from gradbalance.balancers.active import Rows, over_unit
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, number
from gradbalance.solvers.utility import fair_weights


class NashMTL(Balancer):
    """Take the Nash bargaining solution between the objectives.

    Among the updates d of bounded length, the direction maximises the product of the progresses ⟨g_k, d⟩. It is
    d = Σ_k λ_k g_k, where λ > 0 solves (Mλ)_k = 1/λ_k: each objective contributes the same, ⟨λ_k g_k, d⟩ = 1.
    λ is found by Newton's method on the unit Gramian, to rounding, in about five steps.

    Multiplying a loss by a positive number divides its λ_k by that number and changes nothing else. So the length of
    the update does not follow the gradients: it is ‖d‖ = √K always, for K objectives with a gradient, and the learning
    rate alone sets the step, far from a solution and near it. Every objective gains, ⟨g_k, d⟩ > 0, unless a convex
    combination of the gradients vanishes (Pareto stationarity). No λ solves the equation then; here λ_k becomes
    √K α_k / ‖g_k‖, α the weights of the min-norm point of the unit gradients, so that the update vanishes too.

    The published code approaches λ by up to 20 convex problems and stops short of it; here it is exact. It also
    cuts updates longer than ``max_norm=1``, which is not in the paper's algorithm: as ‖d‖ = √K, all of them.
    Its weights kept for several steps are ``refresh_every`` of the optimizer here.

    Args:
        max_norm: longest update ‖d‖ allowed, > 0; longer ones are scaled down. None: no limit, as in the paper.

    References:
        A. Navon et al. Multi-task learning as a bargaining game. ICML 2022, arXiv 2202.01017.
    """

    def __init__(self, max_norm: float | None = None) -> None:
        self.max_norm = None if max_norm is None else number("max_norm", max_norm, "(0, ∞)")

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient."""

        def solve(unit: Array, norms: Array, rows: Rows) -> Array:
            beta = fair_weights(unit, np.ones(len(rows)), 1.0)
            if self.max_norm is not None:
                beta *= self.max_norm / max(self.max_norm, math.sqrt(max(float(beta @ unit @ beta), 0.0)))
            return beta

        return over_unit(gramian, solve)
