"""Specialist: one objective only."""

import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import integer


class Specialist(Balancer):
    """Train for one objective as if there were no others: λ = e_k.

    The yardstick for what balancing costs each objective, and the practice that training for all at once replaces. The
    other losses are watched, not trained; where objective k is absent, nothing is.

    Args:
        index: k, which objective, counted from 0.
    """

    simplex = True
    uses_gradients = False

    def __init__(self, index: int = 0) -> None:
        self.index = integer("index", index)

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return 1 for the one objective, 0 for the others. Raises ValueError if there are too few objectives."""
        if self.index >= len(gramian):
            raise ValueError(f"index is {self.index}, but there are {len(gramian)} objectives, counted from 0")
        weights = torch.zeros(len(gramian), dtype=torch.float64)
        weights[self.index] = 1.0
        return weights
