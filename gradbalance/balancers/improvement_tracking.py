"""Improvement tracking: weight goes to the objectives whose improvement stalls."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, number
from gradbalance.balancers.losses import remembered, seen, softmax

NEGLIGIBLE = 1e-9
"""Changes below this share of a loss are rounding, not improvement."""


class ImprovementTracking(Balancer):
    """Weigh by how far each loss is below its own moving average, in units of what is usual for it.

    With m_k the moving average of L_k before this call, the improvement is ρ_k = (m_k − L_k) / s_k, s_k being the
    moving average of |m_k − L_k|, this call included; the weights are λ = softmax(−ρ / T). In both averages the first
    values count no more than in the mean. An objective that has stopped improving has ρ = 0 and gains weight over those
    that still do (ρ > 0); one that gets worse (ρ < 0) gains more. λ lies on the simplex and ignores the scale and
    offset of every loss; gradients are not looked at.

    It is a practice of training with several rewards, with no paper of its own; this form of it is ours. Where the
    coefficient is simply 1 / (L_k − m_k), it changes its sign as a loss crosses its average and has no bound next to
    it. Here every weight is positive and |ρ_k| ≤ 1 / (1 − decay), with ρ = 0 at an objective's first call and where
    nothing changes. Where noise from batch to batch is larger than the progress, ρ is mostly noise, of size 1: raise T,
    or let the optimizer's ``ema_decay`` average the weights.

    Args:
        decay: of both averages, in [0, 1); usual are .95 to .99.
        temperature: T > 0; larger is more uniform.
    """

    simplex = True
    uses_gradients = False
    STATE: ClassVar[tuple[str, ...]] = ("averages", "deviations", "counts")

    def __init__(self, decay: float = 0.97, temperature: float = 1.0) -> None:
        self.decay = number("decay", decay, "[0, 1)")
        self.temperature = number("temperature", temperature, "(0, ∞)")
        self.averages: list[float] = []  # m
        self.deviations: list[float] = []  # s
        self.counts: list[float] = []  # calls in which an objective was present

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ from the averages before this call, then take the losses into them."""
        size = len(gramian)
        values, here = seen(losses, size, "ImprovementTracking")
        averages, deviations, counts = (remembered(x, size) for x in (self.averages, self.deviations, self.counts))
        averages = np.where(here & (counts == 0), values, averages)
        change = np.where(here, averages - values, 0.0)
        change[abs(change) <= NEGLIGIBLE * abs(values)] = 0.0
        smoothed = deviations + self._rate(counts) * (abs(change) - deviations)
        rho = change / np.where(smoothed > 0, smoothed, 1.0)

        self.averages = (averages - self._rate(counts + 1.0) * change).tolist()
        self.deviations = np.where(here, smoothed, deviations).tolist()
        self.counts = (counts + here).tolist()
        return torch.from_numpy(softmax(-rho / self.temperature, here))

    def _rate(self, counts: Array) -> Array:
        """Return the weight of the last of ``counts`` values in an average whose weights sum to 1 from the start."""
        rates: Array = (1.0 - self.decay) / (1.0 - self.decay ** np.maximum(counts, 1.0))
        return rates
