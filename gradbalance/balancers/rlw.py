"""RLW, random loss weighting: new weights from one distribution at every step."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import array, choice, integer
from gradbalance.balancers.losses import presence, softmax
from gradbalance.balancers.randomness import generator

DISTRIBUTIONS = ("normal", "dirichlet")


class RLW(Balancer):
    """Draw the weights at random, on the simplex, and afresh for every call.

    ``"normal"``: λ = softmax(x), x_k standard normal. ``"dirichlet"``: λ uniform on the simplex, which is the Dirichlet
    distribution with all parameters 1. On average λ_k = 1/K, so the expected update is that of the mean of the losses;
    the noise around it is the method. Neither losses nor gradients have any influence.

    The authors' library puts Dirichlet draws through another softmax, which keeps every λ_k near 1/K; here they are
    used as they are.

    Args:
        distribution: "normal" or "dirichlet".
        seed: call number n of two balancers with one seed draws the same weights.

    References:
        B. Lin, F. Ye, Y. Zhang, I. W. Tsang. Reasonable effectiveness of random weighting: a litmus test for multi-task
        learning. TMLR 2022, arXiv 2111.10603.
    """

    simplex = True
    uses_gradients = False
    STATE: ClassVar[tuple[str, ...]] = ("calls",)

    def __init__(self, distribution: str = "normal", seed: int = 0) -> None:
        self.distribution: str = choice("distribution", distribution, DISTRIBUTIONS)
        self.seed = integer("seed", seed)
        self.calls = 0

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return new random weights for the present objectives. Advances the count of calls."""
        size = len(gramian)
        chance = generator(self.seed, self.calls)
        self.calls += 1
        if self.distribution == "normal":
            logits = array(torch.randn(size, generator=chance, dtype=torch.float64))
        else:  # exponential numbers, divided by their sum
            exponential = torch.empty(size, dtype=torch.float64).exponential_(generator=chance)
            logits = np.log(array(exponential))
        return torch.from_numpy(softmax(logits, presence(losses, size, type(self).__name__)))
