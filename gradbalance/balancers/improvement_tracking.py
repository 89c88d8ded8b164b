"""Improvement tracking: weight goes to the objectives whose improvement stalls."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import number
from gradbalance.balancers.losses import remembered, seen, softmax

NEGLIGIBLE = 1e-9
"""Changes below this share of a loss are rounding, not improvement."""


class ImprovementTracking(Balancer):
    """Weigh by how far each loss is below its own moving average, in units of what is usual for it.

    With m_k the moving average of L_k before this call, the improvement is ρ_k = (m_k − L_k) / s_k, s_k being the
    moving average of |m_k − L_k|, this call included, and λ = softmax(−ρ / T). An objective that has stopped improving
    has ρ = 0 and gains weight over those that still do (ρ > 0); one that gets worse (ρ < 0) gains more. λ lies on the
    simplex and ignores the scale and offset of every loss; gradients are not looked at.

    The practice this follows sets the coefficient to 1 / (L_k − m_k): that changes its sign where a loss crosses its
    average and has no bound next to it. Here every weight is positive and |ρ_k| ≤ 1 / (1 − decay), with ρ = 0 at an
    objective's first call and where nothing changes. Where noise from batch to batch is larger than the progress, ρ is
    mostly noise, of size 1: raise T, or let the optimizer's ``ema_decay`` average the weights.

    Args:
        decay: of both averages, in [0, 1); usual are .95 to .99.
        temperature: T > 0; larger is more uniform.

    References:
        A practice of training with several rewards; the formula is ours.
    """

    simplex = True
    uses_gradients = False
    STATE: ClassVar[tuple[str, ...]] = ("averages", "deviations", "known")

    def __init__(self, decay: float = 0.97, temperature: float = 1.0) -> None:
        self.decay = number("decay", decay, "[0, 1)")
        self.temperature = number("temperature", temperature, "(0, ∞)")
        self.averages: list[float] = []  # m
        self.deviations: list[float] = []  # s
        self.known: list[float] = []  # 1 for an objective that has been present

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ from the averages before this call, then take the losses into them."""
        size = len(gramian)
        values, here = seen(losses, size, "ImprovementTracking")
        averages, deviations, known = (remembered(x, size) for x in (self.averages, self.deviations, self.known))
        change = np.where(here & (known > 0), averages - values, 0.0)
        change = np.where(abs(change) > NEGLIGIBLE * abs(values), change, 0.0)
        new = 1.0 - self.decay
        smoothed = np.where(deviations > 0, self.decay * deviations + new * abs(change), abs(change))
        rho = change / np.where(smoothed > 0, smoothed, 1.0)

        self.averages = np.where(here, np.where(known > 0, averages - new * change, values), averages).tolist()
        self.deviations = np.where(here, smoothed, deviations).tolist()
        self.known = np.where(here, 1.0, known).tolist()
        return torch.from_numpy(softmax(-rho / self.temperature, here))
