"""PCGrad: each gradient is freed of its conflicts with the others, one after the other, then all are added."""

from typing import ClassVar

import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import integer
from gradbalance.balancers.randomness import generator
from gradbalance.solvers.checks import active_rows


class PCGrad(Balancer):
    """Project conflicting gradients, and sum.

    Each v_k starts as g_k. For the other objectives j in random order, if ⟨v_k, g_j⟩ < 0 then v_k loses its component
    along g_j: v_k ← v_k − ⟨v_k, g_j⟩ / ‖g_j‖² g_j. The update is Σ_k v_k, as in the paper (not the mean).
    Every v_k is a combination of the gradients, so its coefficients and the Gramian are all that is computed with.

    The order is drawn afresh for every k and every call, so for K ≥ 3 the result is random, and exchanging objectives
    exchanges the coefficients in distribution only. Without conflicts λ = 1. Multiplying all gradients by one number
    changes nothing; the objectives' relative norms matter. For K ≥ 3 the sum may still conflict with an objective.

    Args:
        seed: of the random order; call number n of two balancers with one seed draws the same order.

    References:
        T. Yu et al. Gradient surgery for multi-task learning. NeurIPS 2020, arXiv 2001.06782.
    """

    STATE: ClassVar[tuple[str, ...]] = ("calls",)

    def __init__(self, seed: int = 0) -> None:
        self.seed = integer("seed", seed)
        self.calls = 0

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient. Advances the random order."""
        gramian = gramian.to("cpu", torch.float64)
        size = len(gramian)
        keys = torch.rand(size, size, generator=generator(self.seed, self.calls), dtype=torch.float64)
        self.calls += 1
        keys.fill_diagonal_(2.0)  # sorts an objective itself last
        order = keys.argsort(dim=1)[:, : size - 1]

        squares = gramian.diagonal()
        active = active_rows(squares.sqrt())
        divisors = torch.where(active, squares, torch.inf)
        combinations = torch.diag(active.to(torch.float64))  # row k: v_k in terms of the gradients
        rows = torch.arange(size)
        for others in order.T:
            inner = (combinations * gramian[others]).sum(dim=1)  # ⟨v_k, g_j⟩, all k at once
            combinations[rows, others] -= inner.clamp(max=0.0) / divisors[others]
        return combinations.sum(dim=0)
