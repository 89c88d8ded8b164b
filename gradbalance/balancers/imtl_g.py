"""IMTL-G: coefficients with sum 1 for which the update has the same projection onto every gradient."""

import numpy as np
from torch import Tensor

from gradbalance.balancers.active import Rows, over_active
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array
from gradbalance.solvers.least_norm import least_norm

VANISHED = 1e-12
"""A sum below this share of the absolute values it was added up from is rounding."""


class IMTLG(Balancer):
    """Make equal progress along every unit gradient, with coefficients that sum to 1.

    For linearly independent gradients there is one α with Σ_k α_k = 1 for which ⟨ĝ_k, d⟩ is the same for every k, where
    d = Σ_k α_k g_k and ĝ_k = g_k / ‖g_k‖. It is α_k = a_k / (s ‖g_k‖) with a = M̂⁻¹ 1, M̂ the Gramian of the ĝ_k, and
    s = Σ_k a_k / ‖g_k‖. Coefficients may be negative.

    **Fails** where s < 0: the common projection is 1 / s, so the published update then goes up every loss at once; and
    near s = 0 it is arbitrarily long. This happens when a short gradient has a negative a_k.
    :class:`~gradbalance.balancers.ConFIG` has the same direction with a length that is always positive.

    The paper does not say what holds for dependent gradients. Here a = M̂⁺ 1 is then the least-norm least-squares
    solution, which leaves the direction independent of the losses' scales; and where s = 0 no α with sum 1 has equal
    projections: α = 0. That is so for two opposite gradients.

    Multiplying all losses by one number changes nothing. Multiplying one of them keeps the line of the update, though
    not its length, nor its sense where s changes sign.

    References:
        L. Liu et al. Towards impartial multi-task learning. ICLR 2021.
    """

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return α; 0 for objectives without gradient."""
        return over_active(gramian, _equal_projections)


def _equal_projections(m: Array, rows: Rows) -> Array:
    norms = np.sqrt(m.diagonal())
    alpha = least_norm(m / (norms[:, None] * norms), np.ones(len(m))) * (norms.min() / norms)
    total = alpha.sum()
    if abs(total) <= VANISHED * np.abs(alpha).sum():
        return np.zeros(len(m))
    return np.asarray(alpha / total)
