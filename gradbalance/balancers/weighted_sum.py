"""The weighted sum: fixed coefficients, whatever the gradients are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer


class WeightedSum(Balancer):
    """Use fixed coefficients: λ = weights.

    Args:
        weights: λ, one finite number per objective, shape (K,). None: all 1, the plain sum of the losses.
    """

    def __init__(self, weights: Sequence[float] | Tensor | None = None) -> None:
        self.fixed: list[float] | None = None
        if weights is not None:
            values = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
            if values.dim() != 1 or not len(values) or not bool(values.isfinite().all()):
                raise ValueError(f"weights must hold one finite number per objective, got {values.tolist()}")
            self.fixed = values.tolist()

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return the fixed weights, also for objectives without gradient."""
        if self.fixed is None:
            return torch.ones(len(gramian), dtype=torch.float64)
        if len(self.fixed) != len(gramian):
            raise ValueError(f"weights has {len(self.fixed)} values, but there are {len(gramian)} objectives")
        return torch.tensor(self.fixed, dtype=torch.float64)

    def __repr__(self) -> str:
        return f"WeightedSum(weights={self.fixed!r})"
