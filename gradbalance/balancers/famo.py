"""FAMO: all losses fall at one relative rate, judged from the losses alone."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, number, sized, vector
from gradbalance.balancers.losses import Mask, check_nonnegative, remembered, seen, softmax

BETAS = (0.9, 0.999)
EPSILON = 1e-8  # Adam's, added to the root of the mean square of numbers that are free of the losses' scale


class FAMO(Balancer):
    """Weigh the log losses by z = softmax(ξ), and move ξ towards those that fall too slowly.

    With D_k = L_k − b_k, the update is c Σ_k z_k ∇ log D_k, that is λ_k = c z_k / D_k with c such that Σ_k λ_k = 1.
    A step from D to D′ improves objective k by δ_k = log D_k − log D′_k. ξ then goes down along z_k (δ_k − Σ_j z_j δ_j)
    + γ ξ_k, by Adam as in the paper's practical algorithm: what improved more than the z-weighted mean loses weight.
    Multiplying a loss (and its b_k) by a positive number does not change the direction. No promise about conflicts.

    The paper computes δ by evaluating the same batch again after the step. Here δ compares this call's losses with
    those of the last call in which the objective was present: no second forward, but the difference of two batches is
    in it, which γ and Adam's averages have to even out.

    γ ξ is weighed against one step's change of the log losses. Where steps are so small that they change them by 1e-4,
    the default γ keeps z near uniform: choose it smaller, or 0.

    Losses must be ≥ b; one that equals it is taken for absent, as nothing is left to gain (published code adds 1e-8).

    Args:
        gamma: γ ≥ 0, the decay that draws ξ back to 0.
        lr: Adam's learning rate for ξ, > 0; its averages have decays .9 and .999.
        min_losses: b_k, a lower bound of each loss, shape (K,). None: all 0.

    References:
        B. Liu, Y. Feng, P. Stone, Q. Liu. FAMO: Fast adaptive multitask optimization. NeurIPS 2023, arXiv 2306.03792.
    """

    simplex = True
    uses_gradients = False
    STATE: ClassVar[tuple[str, ...]] = ("logits", "previous", "means", "squares", "updates")

    def __init__(
        self, gamma: float = 1e-3, lr: float = 0.025, min_losses: Sequence[float] | Tensor | None = None
    ) -> None:
        self.gamma = number("gamma", gamma, "[0, ∞)")
        self.lr = number("lr", lr, "(0, ∞)")
        self.min_losses = None if min_losses is None else vector("min_losses", min_losses)
        self.logits: list[float] = []  # ξ
        self.previous: list[float] = []  # D of an objective's last call, 0 before it
        self.means: list[float] = []  # Adam's averages of the gradient, of its square, and the number of its steps
        self.squares: list[float] = []
        self.updates: list[float] = []

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Move ξ by what changed since the last call, then return λ. Raises ValueError if a loss is below its bound."""
        size = len(gramian)
        values, here = seen(losses, size, "FAMO")
        if self.min_losses is not None:
            values = np.where(here, values - sized("min_losses", self.min_losses, size), 0.0)
        check_nonnegative("FAMO: losses − min_losses", values)
        here = values > 0
        logs = np.log(np.where(here, values, 1.0))
        logits, previous = remembered(self.logits, size), remembered(self.previous, size)
        again = here & (previous > 0)
        gain = np.log(previous[again]) - logs[again]
        logits[again] -= self._step(logits[again], gain, again)
        previous[here] = values[here]
        self.logits, self.previous = logits.tolist(), previous.tolist()
        return torch.from_numpy(softmax(logits - logs, here))

    def _step(self, logits: Array, gain: Array, again: Mask) -> Array:
        """Return Adam's step, to be subtracted from ξ, for the objectives that were present before, too."""
        means, squares, updates = (remembered(x, len(again)) for x in (self.means, self.squares, self.updates))
        z = np.exp(logits - np.logaddexp.reduce(logits))
        slope = z * (gain - z @ gain) + self.gamma * logits
        means[again] = mean = BETAS[0] * means[again] + (1 - BETAS[0]) * slope
        squares[again] = square = BETAS[1] * squares[again] + (1 - BETAS[1]) * slope**2
        updates[again] = count = updates[again] + 1.0
        self.means, self.squares, self.updates = means.tolist(), squares.tolist(), updates.tolist()
        root = np.sqrt(square / (1 - BETAS[1] ** count))
        step: Array = self.lr * mean / (1 - BETAS[0] ** count) / (root + EPSILON)
        return step
