"""STCH, smooth Tchebycheff scalarisation: a smooth maximum of the losses is minimised."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import number, sized, vector
from gradbalance.balancers.losses import seen, softmax


class STCH(Balancer):
    """Attend to the objective that is furthest from its ideal value, smoothly.

    The gradient of μ log Σ_k exp(p_k (L_k − z_k) / μ): λ_k = p_k softmax(p (L − z) / μ)_k. As μ → 0 this becomes the
    Tchebycheff scalarisation max_k p_k (L_k − z_k), whose minimisers for all p are the whole (weak) Pareto front, also
    where it is not convex; as μ → ∞ the mean weighted by p. It compares the losses themselves, so their units matter: a
    common factor of all losses acts like μ divided by it. Losses of any sign. No promise about conflicts.

    Published code for deep networks trains on log(L_k / n_k) in place of L_k − z_k, n_k being average losses of a
    warm-up, with p = 1 and K times the value, so that its λ_k is K softmax(log(L / n) / μ)_k / L_k; here the losses are
    taken as the paper's formula has them. Bring them to one scale by ``preference``.

    Args:
        mu: μ > 0, how smooth the maximum is; the paper tries .01 to 1.
        preference: p_k > 0, shape (K,), divided by their sum. None: all 1/K. Absent objectives keep their p_k.
        ideal: z_k, the best value each loss can reach, shape (K,). None: all 0.

    References:
        X. Lin, X. Zhang, Z. Yang, F. Liu, Z. Wang, Q. Zhang. Smooth Tchebycheff scalarization for multi-objective
        optimization. ICML 2024, arXiv 2402.19078.
    """

    uses_gradients = False

    def __init__(
        self,
        mu: float = 1.0,
        preference: Sequence[float] | Tensor | None = None,
        ideal: Sequence[float] | Tensor | None = None,
    ) -> None:
        self.mu = number("mu", mu, "(0, ∞)")
        self.preference = None if preference is None else vector("preference", preference, positive=True)
        self.ideal = None if ideal is None else vector("ideal", ideal)

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for absent objectives."""
        size = len(gramian)
        values, here = seen(losses, size, "STCH")
        p = np.ones(size) if self.preference is None else sized("preference", self.preference, size)
        p = p / p.sum()
        if self.ideal is not None:
            values = values - sized("ideal", self.ideal, size)
        return torch.from_numpy(np.where(here, p * softmax(p * values / self.mu, here), 0.0))
