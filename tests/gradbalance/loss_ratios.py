"""A balancer that looks at losses alone and remembers, to see when and with what the optimizer calls it."""

import math
from typing import ClassVar

import torch

from gradbalance.balancers import Balancer


class LossRatios(Balancer):
    """λ_k = 1 + L_k now / L_k at the last call that had it; 1 at its first."""

    uses_gradients = False
    STATE: ClassVar[tuple[str, ...]] = ("last", "calls")

    def __init__(self):
        self.last = []
        self.calls = 0

    def weights(self, gramian, losses=None, signal=None):
        now, last = losses.tolist(), self.last or [0.0] * len(losses)
        self.last = [old if math.isnan(new) else new for new, old in zip(now, last, strict=True)]
        self.calls += 1
        ratios = [1 + new / old if old else 1.0 for new, old in zip(now, last, strict=True)]
        return torch.tensor(ratios, dtype=torch.float64).nan_to_num()
