"""IMTL-L, the loss balance of impartial multi-task learning: scales are learned that make all losses alike."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import number
from gradbalance.balancers.log_scales import advance
from gradbalance.balancers.losses import remembered, seen


class IMTLL(Balancer):
    """Learn a scale e^{s_k} of each loss along with the model.

    The total is Σ_k e^{s_k} L_k − s_k. So λ_k = e^{s_k}, and each call ends with the gradient step s_k ← s_k − lr
    (e^{s_k} L_k − 1). It comes to rest at λ_k L_k = 1: weights inverse to the losses. With s_k for −s_k and twice the
    total this is :class:`~gradbalance.balancers.UncertaintyWeighting`: λ is twice that of ``UncertaintyWeighting(2 *
    lr)``, and the same is to be said of the losses' scale and sign and of the limits on steps and s_k. The paper trains
    s_k by the model's optimizer, here it is plain gradient descent.

    The paper means it for parameters that one objective alone reaches, and for shared ones together with its balance of
    gradients (IMTL-G). Here it weighs the shared parameters' gradients.

    Args:
        lr: learning rate of s_k, > 0.

    References:
        L. Liu et al. Towards impartial multi-task learning. ICLR 2021, openreview.net/forum?id=IMPnRXEWpvr.
    """

    uses_gradients = False
    STATE: ClassVar[tuple[str, ...]] = ("log_scales",)

    def __init__(self, lr: float = 0.01) -> None:
        self.lr = number("lr", lr, "(0, ∞)")
        self.log_scales: list[float] = []

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ of the scales before this call, then take their step."""
        values, here = seen(losses, len(gramian), "IMTLL")
        s = remembered(self.log_scales, len(gramian))
        self.log_scales = advance(s, values, here, self.lr).tolist()
        return torch.from_numpy(np.exp(s))
