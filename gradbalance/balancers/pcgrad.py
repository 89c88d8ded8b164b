"""PCGrad: each gradient is freed of its conflicts with the others, one after the other, then all are added."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import array, integer
from gradbalance.balancers.orders import random_orders
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
        m = array(gramian)
        size = len(m)
        orders = random_orders(self.seed, self.calls, size)
        self.calls += 1
        squares = m.diagonal()
        active = active_rows(np.sqrt(squares))
        divisors = np.where(active, squares, np.inf)
        combinations = np.diag(active.astype(np.float64))  # row k: v_k in terms of the gradients
        rows = np.arange(size)
        for others in orders.T:
            inner = np.einsum("kl,kl->k", combinations, m[others])  # ⟨v_k, g_j⟩, all k at once
            combinations[rows, others] -= np.minimum(inner, 0.0) / divisors[others]
        return torch.from_numpy(combinations.sum(axis=0))
