"""The weighted sum: fixed coefficients, whatever the gradients are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import sized, vector


class WeightedSum(Balancer):
    """Use fixed coefficients: λ = weights.

    Args:
        weights: λ, one finite number per objective, shape (K,). None: all 1, the plain sum of the losses.
    """

    uses_gradients = False

    def __init__(self, weights: Sequence[float] | Tensor | None = None) -> None:
        self.fixed = None if weights is None else vector("weights", weights)

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return the fixed weights, also for objectives without gradient."""
        if self.fixed is None:
            return torch.ones(len(gramian), dtype=torch.float64)
        return torch.from_numpy(sized("weights", self.fixed, len(gramian)))

    def __repr__(self) -> str:
        return f"WeightedSum(weights={self.fixed!r})"
