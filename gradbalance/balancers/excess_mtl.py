"""ExcessMTL: weight goes to the objectives that are furthest from their own optimum, as their gradients tell it."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.active import only_active
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import array, number
from gradbalance.balancers.losses import remembered, softmax
from gradbalance.solvers.checks import active_rows


class ExcessMTL(Balancer):
    """Weigh by estimated excess risk: how much an objective could still gain, not how large its loss is.

    A loss that is large because its labels are noisy cannot be lowered, so the excess risk is estimated from the
    gradient g_k and a diagonal H_k that stands for the curvature, E_k = g_kᵀ H_k⁻¹ g_k. Relative to its first value,
    e_k = E_k / E_k(0), it drives the weights on the simplex: λ_k ∝ λ_k exp(lr e_k). Multiplying a loss by a number, the
    same at all calls, changes nothing.

    In the paper H_k holds, for every parameter p, the root of the sum of g_kp² over the calls, which takes K × P
    accumulators and is more than a Gramian tells. Here H_k is one number, the root of the sum of ‖g_k‖², so that
    E_k(t) = ‖g_k(t)‖² / (Σ_τ≤t ‖g_k(τ)‖²)^½. The e_k agree where a gradient has one parameter, or keeps its direction
    and changes in length only; else E_k sees the norm alone.

    Published code uses the raw E_k at its first call, so that the units of the losses decide the first weights; with
    the paper's warm-up (E_k(0) is the mean over it), of one call, it goes as here: uniform at first. The weights are a
    memory without decay: e_k that stay apart drive λ to one objective exponentially. No promise about conflicts.

    Args:
        lr: step size of the weights, > 0.

    References:
        Y. He et al. Robust multi-task learning with excess risks. ICML 2024, arXiv 2402.02009.
    """

    simplex = True
    STATE: ClassVar[tuple[str, ...]] = ("logits", "sums", "initial")

    def __init__(self, lr: float = 1.0) -> None:
        self.lr = number("lr", lr, "(0, ∞)")
        self.logits: list[float] = []  # log λ up to a constant
        self.sums: list[float] = []  # Σ ‖g‖²
        self.initial: list[float] = []  # E(0), 0 before it

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Take the step of the weights and return them; 0 for objectives without gradient, uniform if none has one."""
        squares = array(gramian).diagonal()
        active = active_rows(np.sqrt(squares))
        logits, sums, initial = (remembered(x, len(squares)) for x in (self.logits, self.sums, self.initial))
        if active.any():
            sums[active] += squares[active]
            risk = squares[active] / np.sqrt(sums[active])
            first = initial[active]
            initial[active] = first = np.where(first > 0, first, risk)
            old = logits[active]
            stepped = old + self.lr * risk / first
            # As a whole the active ones keep their weight: one that was absent comes back with the weight it had.
            logits[active] = stepped + (np.logaddexp.reduce(old) - np.logaddexp.reduce(stepped))
        self.logits, self.sums, self.initial = logits.tolist(), sums.tolist(), initial.tolist()
        return torch.from_numpy(softmax(logits, active))

    def scale(self, weights: Tensor, gramian: Tensor) -> Tensor:
        """Return the weights, 0 for objectives without gradient."""
        return only_active(weights, gramian)
