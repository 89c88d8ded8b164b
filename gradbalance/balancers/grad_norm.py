"""GradNorm: the weighted gradients get norms that follow how far each objective has come."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, array, number
from gradbalance.balancers.losses import check_nonnegative, remembered, seen
from gradbalance.solvers.checks import active_rows

LEVEL = 1e-9
"""A norm that is its target up to this share is left alone, so that rounding does not decide the sign of a step."""


class GradNorm(Balancer):
    """Learn weights that bring the norms of the weighted gradients to common targets.

    λ_k = w_k, Σ_k w_k = K, all 1 at first. With G_k = w_k ‖g_k‖, Ḡ their mean, and L̃_k = L_k / L_k(0) an objective's
    loss relative to its first one, the targets are Ḡ r_k^α with r_k = L̃_k / mean L̃: an objective that is behind gets
    a longer gradient. Each call ends with a step that lowers Σ_k |G_k − Ḡ r_k^α|, the targets held constant.

    The paper takes the gradient step in w_k. Its length goes with ‖g_k‖ and can carry w_k below 0, and where the norms
    are orders of magnitude apart it never settles. Here the step is in log w_k and relative to Ḡ:

        w_k ← w_k exp(−lr (G_k / Ḡ) sign(G_k − Ḡ r_k^α)),

    then w is brought back to its sum. The signs, and so the point of rest, are the paper's; w stays positive, and a
    common factor of all losses has no influence. The norms are those over all shared parameters; the paper takes the
    last shared layer's.

    Losses must be ≥ 0; L_k(0) is the first that is > 0. No promise about conflicts: only norms are looked at.

    Args:
        alpha: α in [0, 100], how strongly those behind are favoured; 0 makes all norms equal. The paper uses up to 1.5.
        lr: in (0, 1]; near balance the weights change by this share in a call.

    References:
        Z. Chen, V. Badrinarayanan, C.-Y. Lee, A. Rabinovich. GradNorm: Gradient normalization for adaptive loss
        balancing in deep multitask networks. ICML 2018, arXiv 1711.02257.
    """

    STATE: ClassVar[tuple[str, ...]] = ("factors", "initial")

    def __init__(self, alpha: float = 1.5, lr: float = 0.025) -> None:
        self.alpha = number("alpha", alpha, "[0, 100]")
        self.lr = number("lr", lr, "(0, 1]")
        self.factors: list[float] = []  # w
        self.initial: list[float] = []  # L(0), 0 before it

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return w before this call, 0 for objectives without gradient, then take its step."""
        values, here = seen(losses, len(gramian), "GradNorm")
        check_nonnegative("GradNorm: losses", values)
        norms = np.sqrt(array(gramian).diagonal())
        active = here & active_rows(norms)
        initial = remembered(self.initial, len(gramian))
        first = here & (initial == 0)
        initial[first] = values[first]
        w = remembered(self.factors, len(gramian), start=1.0)
        result = np.where(active, w, 0.0)
        if active.any():
            progress = np.divide(values, initial, out=np.ones_like(w), where=initial > 0)
            w[active] = self._step(w[active], norms[active], progress[active])
        self.factors, self.initial = w.tolist(), initial.tolist()
        return torch.from_numpy(result)

    def _step(self, w: Array, norms: Array, progress: Array) -> Array:
        lengths = w * norms
        relative = lengths * (len(w) / lengths.sum())
        total = progress.sum()
        targets = (progress * (len(w) / total)) ** self.alpha if total > 0 else np.ones_like(w)
        excess = relative - targets
        signs = np.where(abs(excess) > LEVEL * targets, np.sign(excess), 0.0)
        stepped = w * np.exp(-self.lr * relative * signs)
        rescaled: Array = stepped * (w.sum() / stepped.sum())
        return rescaled
