"""ConFIG: the direction whose cosines with all gradients are equal; its length is the sum of their projections."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradbalance.balancers.active import Rows, over_unit
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, parts, vector
from gradbalance.solvers.least_norm import least_norm

VANISHED = 1e-12
"""Inner products below this share of the wanted ones are rounding."""


class ConFIG(Balancer):
    """Go in the direction of equal cosines; the length is the sum of the gradients' projections.

    With Ĝ the stack of the unit gradients ĝ_k = g_k / ‖g_k‖ and M̂ = Ĝ Ĝᵀ, u = Ĝ⁺ p = Ĝᵀ a with a = M̂⁺ p is the shortest
    vector with ⟨ĝ_k, u⟩ = p_k. The update is d = ℓ û with û = u / ‖u‖ and ℓ = Σ_k ⟨g_k, û⟩, that is
    λ_k = ℓ a_k / (‖u‖ ‖g_k‖). Coefficients may be negative.

    For linearly independent gradients every objective has a positive cosine with d, in the ratios of the p_k. The
    direction does not change when a loss is multiplied by a positive number; λ does not change when all are.

    **Fails** for dependent gradients (always so with more objectives than parameters, and at Pareto-stationary points):
    then u comes as close to the p_k as it can in the sense of least squares, need not vanish where no common descent
    direction exists, and may conflict with objectives; if ℓ < 0 it is the opposite of u. Close to a Pareto-stationary
    point d is short, though, as long as the gradients are independent.

    Args:
        preference: p_k > 0, the cosine wanted for each objective relative to the others, shape (K,). None: all equal.

    References:
        Q. Liu, M. Chu, N. Thuerey. ConFIG: towards conflict-free training of physics informed neural networks.
        ICLR 2025, arXiv 2408.11104.
    """

    def __init__(self, preference: Sequence[float] | Tensor | None = None) -> None:
        self.preference = None if preference is None else vector("preference", preference, positive=True)

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient."""

        def solve(unit: Array, norms: Array, rows: Rows) -> Array:
            wanted = parts("preference", self.preference, rows, len(gramian))
            a = least_norm(unit, wanted)
            projections = unit @ a  # ⟨ĝ_k, u⟩
            if np.abs(projections).max() <= VANISHED * wanted.max():
                return np.zeros(len(a))
            return np.asarray((norms @ projections) / (a @ projections) * a)  # ‖u‖² = aᵀM̂a

        return over_unit(gramian, solve)
