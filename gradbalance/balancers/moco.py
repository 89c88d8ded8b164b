"""MoCo: one projected gradient step on the coefficients at each call, on a Gramian that is tracked over the steps."""

from typing import ClassVar

import numpy as np

from gradbalance.balancers.active import Rows
from gradbalance.balancers.checks import Array, number, sized
from gradbalance.balancers.modo import MoDo


class MoCo(MoDo):
    """Follow the min-norm point of averaged gradients, as far as Gramians tell it.

    The paper tracks every gradient, y_k ← y_k − β (y_k − g_k), K buffers as large as the model; then
    λ ← Π(λ − γ (YᵀY + ρ I) λ) on the simplex, starting from 1/K, and the update is Σ_k λ_k y_k.

    Here the Gramian is tracked, Y ← (1 − β) Y + β M, and the update is Σ_k λ_k g_k. **What differs:** tracked gradients
    lose their noise, tracked Gramians keep its mean, the variance on the diagonal, so noisy objectives get too little;
    and the update is not smoothed (momentum of the inner optimizer does that). Where ``signal``, an unbiased Gramian,
    is given, it is tracked instead of M, and Y has no such bias.

    For constant gradients and ρ = 0, λ goes to MGDA's min-norm weights. Scale behaviour and ``normalize`` are those of
    :class:`~gradbalance.balancers.MoDo`, with β = 1 its coefficients too; each Gramian is normalised before it is
    tracked. The first Gramian sets Y; entries of objectives without gradient stay as they are.

    Args:
        gamma: γ > 0, the step size of λ.
        rho: ρ ≥ 0, pulls towards equal coefficients.
        beta: β in (0, 1], the weight of the newest Gramian.
        normalize: whether to make the step free of the losses' scale, which the paper does not.

    References:
        H. Fernando, H. Shen, M. Liu, S. Chaudhury, K. Murugesan, T. Chen. Mitigating gradient bias in multi-objective
        learning: a provably convergent approach. ICLR 2023, arXiv 2210.12624.
    """

    STATE: ClassVar[tuple[str, ...]] = ("shares", "tracked", "seen")

    def __init__(self, gamma: float = 0.1, rho: float = 0.0, beta: float = 0.5, normalize: bool = True) -> None:
        super().__init__(gamma, rho, normalize)
        self.beta = number("beta", beta, "(0, 1]")
        self.tracked: list[float] = []
        """Y, row after row."""
        self.seen: list[int] = []
        """1 for the entries of Y that have been set, 0 for the others."""

    def _descend(self, start: Array, gramian: Array, rows: Rows, size: int) -> tuple[Array, Array]:
        return super()._descend(start, self._track(gramian, rows, size), rows, size)

    def _track(self, gramian: Array, rows: Rows, size: int) -> Array:
        """Move the entries of Y, and return them."""
        pairs = rows[:, None] * size + rows
        tracked = sized("tracked", self.tracked, size * size) if self.tracked else np.zeros(size * size)
        seen = np.array(self.seen or [0] * size * size)
        old = tracked[pairs]
        tracked[pairs] = np.where(seen[pairs] == 1, old + self.beta * (gramian - old), gramian)
        seen[pairs] = 1
        self.tracked, self.seen = tracked.tolist(), seen.tolist()
        return np.asarray(tracked[pairs])
