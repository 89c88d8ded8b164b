"""Signal gradients: another method balances what is left of the gradients without the part they have in common."""

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, array
from gradbalance.balancers.losses import presence
from gradbalance.balancers.wrapping import Wrapping
from gradbalance.solvers.checks import active_rows

ROUNDING = 1e-12
"""‖g_k − h‖² at most this share of ‖g_k‖² + ‖h‖² is rounding: objective k is nothing but the common part."""


class CommonPart(Wrapping):
    """Balance s_k = g_k − h, the gradients without their common part h, and step along Σ_k λ_k g_k all the same.

    Losses that share a term, such as a pull to the old policy, have gradients that all point its way: it raises every
    cosine and every norm, and so hides which objectives are in conflict and whose gradient is weak. The LAST objective
    is this term alone. With T = [I, −1] the inner balancer is given the Gramian T M Tᵀ of the s_k and answers with λ
    for the others; the common part gets 0, since Σ_k λ_k g_k holds it already.

    For DiffusionNFT h is the gradient at r = ½, where no picture is better than another. It costs one more reverse pass
    on a refresh and nothing on the steps between.

    Scale behaviour is the inner balancer's if one number multiplies all losses; a factor on one of them alone would
    have to be on its share of the common part too. Promises about conflicts hold for the s_k and Σ_k λ_k s_k; for the
    g_k they are a measured rate. An objective that is absent or has no gradient, or none but the common part, has
    s_k = 0. If the common part is absent, s_k = g_k.

    Args:
        balancer: the inner balancer, or its name. Options with one value per objective leave out the common part.

    References:
        Reward-independent part of DiffusionNFT's loss (arXiv 2509.16117): the mean of its two terms.
    """

    def __init__(self, balancer: str | Balancer = "marble") -> None:
        super().__init__(balancer)

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return the inner balancer's weights for the s_k, and 0 for the common part."""
        m = array(gramian)
        present = active_rows(np.sqrt(m.diagonal()))
        if losses is not None:
            present = present & presence(losses, len(m), "CommonPart")
            losses = losses[: _count(m)]
        differences = _differences(present)
        others = None if signal is None else _of_signals(differences, array(signal))
        return _padded(self.balancer.weights(_of_signals(differences, m), losses, others), len(m))

    def scale(self, weights: Tensor, gramian: Tensor) -> Tensor:
        """Return λ as the inner balancer makes it of the weights and the s_k, and 0 for the common part."""
        m = array(gramian)
        inner = _of_signals(_differences(active_rows(np.sqrt(m.diagonal()))), m)
        return _padded(self.balancer.scale(weights[: _count(m)], inner), len(m))


def _count(m: Array) -> int:
    """Return the number of objectives without the common part; one alone is an objective like any other."""
    return max(len(m) - 1, 1)


def _differences(present: Array) -> Array:
    """Return T, shape (K, K + 1); the row of an objective that is not there is 0."""
    count = max(len(present) - 1, 1)
    t = np.eye(count, len(present))
    t[:, count:] = -1.0
    return np.asarray(t * present[:count, None])


def _of_signals(differences: Array, m: Array) -> Tensor:
    """Return T M Tᵀ, exactly 0 in the rows of those that are nothing but the common part."""
    inner = differences @ m @ differences.T
    kept = inner.diagonal() > ROUNDING * (differences**2 @ m.diagonal())
    return torch.from_numpy(inner * (kept[:, None] & kept))


def _padded(values: Tensor, size: int) -> Tensor:
    return torch.cat([values, values.new_zeros(size - len(values))])
