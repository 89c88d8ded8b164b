"""DWA, dynamic weight average: more weight for the objectives whose losses have lately fallen less."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, integer, number
from gradbalance.balancers.losses import remembered, seen, softmax

NEGLIGIBLE = 1e-9
"""An average loss below this share of the next one's size counts as this share of it."""


class DWA(Balancer):
    """Weigh by the rate at which average losses fall.

    λ_k = K softmax(r_k / T)_k with r_k = L̄_k(t−1) / L̄_k(t−2), the ratio of an objective's average losses over the
    last two complete periods, T the temperature. Σ_k λ_k = K, counting the present objectives; before two periods are
    complete, r_k = 1. Nothing depends on the scale of any loss; the gradients are not looked at.

    The paper's period is an epoch; here it is a number of calls, and an objective's own clock stands still while it is
    absent. For losses of any sign, r_k = 1 + (L̄(t−1) − L̄(t−2)) / |L̄(t−2)|: the paper's ratio for positive losses,
    and below 1 exactly where the loss fell for all others too. Where L̄(t−2) is 0 or next to it, r_k stays finite, but
    such an objective can take all the weight: ratios say little about losses that pass through 0.

    Args:
        period: calls that are averaged over, at least 1.
        temperature: T > 0; larger is more uniform. The paper uses 2.

    References:
        S. Liu, E. Johns, A. J. Davison. End-to-end multi-task learning with attention. CVPR 2019, arXiv 1803.10704.
    """

    uses_gradients = False
    STATE: ClassVar[tuple[str, ...]] = ("counts", "sums", "older", "newer")

    def __init__(self, period: int = 100, temperature: float = 2.0) -> None:
        self.period = integer("period", period, least=1)
        self.temperature = number("temperature", temperature, "(0, ∞)")
        self.counts: list[float] = []  # calls in which an objective was present
        self.sums: list[float] = []  # of its losses in the period that runs
        self.older: list[float] = []  # average over the last complete period but one
        self.newer: list[float] = []  # average over the last complete period

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ from the periods before this call, then take the losses into the running one."""
        size = len(gramian)
        values, here = seen(losses, size, "DWA")
        counts, sums, older, newer = (remembered(x, size) for x in (self.counts, self.sums, self.older, self.newer))
        rates = np.where(counts >= 2 * self.period, _rates(older, newer), 1.0)

        counts, sums = counts + here, sums + values
        over = here & (counts % self.period == 0)
        self.older = np.where(over, newer, older).tolist()
        self.newer = np.where(over, sums / self.period, newer).tolist()
        self.sums = np.where(over, 0.0, sums).tolist()
        self.counts = counts.tolist()
        return torch.from_numpy(here.sum() * softmax(rates / self.temperature, here))


def _rates(older: Array, newer: Array) -> Array:
    """Return the ratio newer/older, carried on to losses ≤ 0 as the docstring of the class says."""
    size = np.maximum(abs(older), NEGLIGIBLE * abs(newer))
    rates: Array = 1.0 + (newer - older) / np.where(size > 0, size, 1.0)
    return rates
