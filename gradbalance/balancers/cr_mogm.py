"""CR-MOGM: the moving average of another method's coefficients."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import array, number, sized
from gradbalance.balancers.losses import presence
from gradbalance.balancers.wrapping import Wrapping


class CRMOGM(Wrapping):
    """Average another balancer's weights over the steps, so that they depend less on the noise of one batch.

    ω_t = ρ ω_{t−1} + (1 − ρ) ω̂_t with ω̂_t the inner balancer's weights at step t; the first ones set ω. The inner
    balancer's ``scale`` turns ω into λ: for :class:`~gradbalance.balancers.Marble` α is averaged and divided by the
    gradients' present norms, for most others λ itself is averaged, as in the paper. The paper lets ρ_t grow as the
    learning rate falls; here it is constant.

    Scale behaviour and cost are the inner balancer's. Promises about conflicts are not kept: they hold for weights of
    the very gradients that are weighted. An objective that is absent (its loss is NaN) keeps its average and gets 0;
    on the simplex the averages of the others are then normalised to sum 1.

    ``BalancedOptimizer(ema_decay=ρ)`` does the same for any balancer, and also keeps the coefficients of absent
    objectives; prefer it there. This class is for use without that optimizer, inside another balancer (``Grouped``),
    or to average on top of a balancer chosen by name in a configuration.

    Args:
        balancer: the inner balancer, or its name.
        decay: ρ in [0, 1); 0 changes nothing.

    References:
        S. Zhou, W. Zhang, J. Jiang, W. Zhong, J. Gu, W. Zhu. On the convergence of stochastic multi-objective gradient
        manipulation and beyond. NeurIPS 2022.
    """

    STATE: ClassVar[tuple[str, ...]] = ("average", "seen")

    def __init__(self, balancer: str | Balancer = "mgda", decay: float = 0.9) -> None:
        super().__init__(balancer)
        self.decay = number("decay", decay, "[0, 1)")
        self.average: list[float] = []
        self.seen: list[int] = []
        """1 for the objectives that have an average, 0 for those absent so far."""

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return ω, 0 for absent objectives. Moves the averages."""
        fresh = array(self.balancer.weights(gramian, losses, signal))
        size = len(fresh)
        present = presence(losses, size, "CRMOGM")
        average = sized("average", self.average, size) if self.average else np.zeros(size)
        seen = np.array(self.seen or [0] * size) == 1
        moved = np.where(seen, self.decay * average + (1.0 - self.decay) * fresh, fresh)
        average = np.where(present, moved, average)
        self.average, self.seen = average.tolist(), (seen | present).astype(int).tolist()
        weights = np.where(present, average, 0.0)
        if self.simplex and weights.sum() > 0:
            weights /= weights.sum()
        return torch.from_numpy(weights)

    def scale(self, weights: Tensor, gramian: Tensor) -> Tensor:
        """Return what the inner balancer makes of the weights."""
        return self.balancer.scale(weights, gramian)
