"""Uniform: the mean of the losses."""

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.losses import presence, softmax


class Uniform(Balancer):
    """Weigh all objectives alike: λ_k = 1/K, K counting those that are present.

    The update is the gradient of the mean of the losses: the objectives with the largest gradients decide, and others
    may be in conflict with it. Multiplying all losses by one number leaves λ as it is.
    """

    simplex = True
    uses_gradients = False

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return equal weights for the present objectives, also for those without gradient."""
        size = len(gramian)
        return torch.from_numpy(softmax(np.zeros(size), presence(losses, size, type(self).__name__)))
