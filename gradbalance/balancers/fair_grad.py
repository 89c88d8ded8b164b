"""FairGrad: the update of largest α-fair utility, between the plain sum and max–min."""

import numpy as np
from torch import Tensor

from gradbalance.balancers.active import Rows, over_unit
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, number
from gradbalance.solvers.utility import fair_weights


class FairGrad(Balancer):
    """Maximise an α-fair utility of the objectives' progress.

    Among the updates d of bounded length, the direction maximises Σ_k ⟨g_k, d⟩^{1−α} / (1−α). It is d = Σ_k λ_k g_k,
    where λ > 0 solves (Mλ)_k = λ_k^{−1/α}, that is λ_k = ⟨g_k, d⟩^{−α}. The larger α, the more the objectives with
    little progress count: α → 0 goes to the plain sum, α = 1 is :class:`~gradbalance.balancers.NashMTL` (where the sum
    is one of logarithms), α → ∞ goes to the direction of :class:`~gradbalance.balancers.MGDA`.

    Multiplying all losses by c multiplies λ by c^{−2α/(1+α)}, so the update by c^{(1−α)/(1+α)}; the relative scales of
    the objectives matter unless α = 1. Every objective gains, ⟨g_k, d⟩ > 0, unless a convex combination of the
    gradients vanishes (Pareto stationarity). No λ solves the equation then; here λ_k becomes proportional to
    a_k / ‖g_k‖, a the weights of the min-norm point of the unit gradients, so that the update vanishes too.

    The published code minimises the squared residual of the equation by a general least-squares routine from one start,
    which may stop before it is solved; here Newton's method solves it to rounding.

    Args:
        alpha: α, the degree of fairness, in [0.1, 10]; the paper uses 1 and 2.

    References:
        H. Ban, K. Ji. Fair resource allocation in multi-task learning. ICML 2024, arXiv 2402.15638.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = number("alpha", alpha, "[0.1, 10]")

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient."""

        def solve(unit: Array, norms: Array, rows: Rows) -> Array:
            p, largest = 1.0 / self.alpha, norms.max()
            relative = norms / largest  # λ of gradients divided by the largest norm, which keeps the powers small
            return np.asarray(largest ** (1.0 - 2.0 / (1.0 + p)) * fair_weights(unit, relative ** (p - 1.0), p))

        return over_unit(gramian, solve)
