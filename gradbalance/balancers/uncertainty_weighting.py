"""Uncertainty weighting: each objective's noise level is learned, and its loss divided by it."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import number
from gradbalance.balancers.log_scales import advance
from gradbalance.balancers.losses import remembered, seen


class UncertaintyWeighting(Balancer):
    """Learn log-variances s_k along with the model and divide the losses by them.

    The total is Σ_k ½ e^{−s_k} L_k + ½ s_k, the paper's form for regression with s_k = log σ_k² (for classification it
    has e^{−s_k} L_k + ½ s_k, not offered here). So λ_k = ½ e^{−s_k}, and each call ends with the gradient step
    s_k ← s_k + lr ½ (e^{−s_k} L_k − 1). It comes to rest at s_k = log L_k, where λ_k L_k = ½ for all: weights inverse
    to the losses, whatever the gradients.

    s_k starts at 0. λ is not free of the losses' scale until s_k has found it, which takes about |log L_k| / lr calls
    or more. A loss that stays ≤ 0 has no resting point: its λ_k grows without end. So that nothing overflows or is
    thrown off for long by one large loss, steps are limited to 1 and |s_k| to 50; the paper has no such limits, and
    they change nothing as long as neither is reached. The paper trains s_k by the model's optimizer, here it is plain
    gradient descent.

    Args:
        lr: learning rate of s_k, > 0.

    References:
        A. Kendall, Y. Gal, R. Cipolla. Multi-task learning using uncertainty to weigh losses for scene geometry and
        semantics. CVPR 2018, arXiv 1705.07115.
    """

    uses_gradients = False
    STATE: ClassVar[tuple[str, ...]] = ("log_variances",)

    def __init__(self, lr: float = 0.01) -> None:
        self.lr = number("lr", lr, "(0, ∞)")
        self.log_variances: list[float] = []

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ of the log-variances before this call, then take their step."""
        values, here = seen(losses, len(gramian), "UncertaintyWeighting")
        s = remembered(self.log_variances, len(gramian))
        self.log_variances = (-advance(-s, values, here, self.lr / 2)).tolist()
        return torch.from_numpy(0.5 * np.exp(-s))
