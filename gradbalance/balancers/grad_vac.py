"""GradVac: each gradient is turned towards the others until its cosines reach what they have been on average."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, array, integer, number, sized
from gradbalance.balancers.orders import Orders, random_orders
from gradbalance.solvers.checks import active_rows

LARGEST_TARGET = 1.0 - 1e-6
"""Cosines are not raised above this: the multiple of g_j needed for it grows without bound towards 1."""

CANCELLED = 1e-7
"""‖v_k‖ below this share of the lengths it was added up from is rounding, and v_k has no direction."""

VANISHED = 1e-30
"""Stands for the length 0, to divide by."""


class GradVac(Balancer):
    """Raise the cosine of each pair of gradients to a target that follows its own average, and sum.

    Each v_k starts as g_k. It meets the other objectives l in random order: with φ = cos(v_k, g_l) and the target φ̂_kl,
    if φ < φ̂_kl then v_k ← v_k + w g_l, w = ‖v_k‖ (φ̂ √(1 − φ²) − φ √(1 − φ̂²)) / (‖g_l‖ √(1 − φ̂²)), after which
    cos(v_k, g_l) = φ̂_kl. Then φ̂_kl ← (1 − β) φ̂_kl + β φ. All targets start at 0, and β = 0 keeps them there: this is
    :class:`~gradbalance.balancers.PCGrad`. The update is Σ_k v_k; λ_k ≥ 1, since multiples are only ever added.

    Multiplying all losses by one number changes nothing; the objectives' relative norms matter. For K ≥ 3 the order is
    random, and exchanging objectives exchanges the coefficients in distribution only. Nothing is promised about
    conflicts: a later projection may undo an earlier one. Where two objectives have long agreed and suddenly do not,
    the target is close to 1 and the multiple of g_l very large.

    The paper leaves open what happens where the formula has no value. Here targets count as at most 1 − 1e-6, and a
    v_k that has cancelled to 0 is left as it is, its targets too. So are those of objectives without gradient. The
    paper's targets are kept for each part of a network; here there is one for the whole gradient.

    Args:
        beta: β in [0, 1], the weight of the newest cosine in the targets; 0.01 in the paper.
        seed: of the random order; call number n of two balancers with one seed draws the same order.

    References:
        Z. Wang, Y. Tsvetkov, O. Firat, Y. Cao. Gradient Vaccine: investigating and improving multi-task optimization in
        massively multilingual models. ICLR 2021, arXiv 2010.05874.
    """

    STATE: ClassVar[tuple[str, ...]] = ("calls", "targets")

    def __init__(self, beta: float = 0.01, seed: int = 0) -> None:
        self.beta = number("beta", beta, "[0, 1]")
        self.seed = integer("seed", seed)
        self.calls = 0
        self.targets: list[float] = []
        """φ̂_kl, row after row."""

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient. Moves the targets and advances the random order."""
        m = array(gramian)
        size = len(m)
        norms = np.sqrt(m.diagonal())
        active = active_rows(norms)
        lengths = np.where(active, norms, np.inf)
        orders = random_orders(self.seed, self.calls, size)
        # Every pair meets once in a call, so what is known of the targets is worked out for all in their order.
        place = (np.arange(size)[:, None], orders)
        targets = sized("targets", self.targets, size * size) if self.targets else np.zeros(size * size)
        targets = targets.reshape(size, size)
        old = targets[place]
        combinations, cosines = _vaccinate(m / (lengths[:, None] * lengths), orders, old)

        targets[place] = np.where(np.isnan(cosines), old, old + self.beta * (cosines - old))
        self.calls += 1
        self.targets = targets.ravel().tolist()
        return torch.from_numpy((norms * active) @ combinations / lengths)


def _vaccinate(unit: Array, orders: Orders, targets: Array) -> tuple[Array, Array]:
    """Turn each unit gradient towards the others.

    Args:
        unit: the unit Gramian, zero where an objective has no gradient, shape (K, K).
        orders: the others in the order in which each objective meets them, shape (K, K − 1).
        targets: φ̂ in that order.

    Returns:
        The v_k / ‖g_k‖ in terms of the unit gradients, row by row, and the cosines met, in that order, NaN where there
        was none.
    """
    size = len(unit)
    active = unit.diagonal() > 0
    meeting = (active[:, None] & active[orders]).T.copy()
    highest = np.clip(targets.T, -LARGEST_TARGET, LARGEST_TARGET)
    sines = np.sqrt((1.0 - highest) * (1.0 + highest))
    combinations = np.eye(size)
    places = (np.arange(size) * size + orders.T).copy()  # of the coefficients that a step changes
    cosines = np.empty(highest.shape)
    length, added = np.ones(size), np.ones(size)  # ‖v_k‖, and the lengths v_k was added up from
    for step, others in enumerate(orders.T):  # all k at once
        meeting[step] &= length > CANCELLED * added
        cosine = np.einsum("kl,kl->k", combinations, unit[others]) / length
        cosines[step] = cosine
        raised = meeting[step] & (cosine < highest[step])
        # The part of v_k across g_l stays, so that ‖v_k‖ √(1 − φ²) is the same before and after.
        ratio = np.where(raised, np.sqrt(np.maximum(1.0 - cosine * cosine, 0.0)) / sines[step], 1.0)
        multiple = raised * length * (highest[step] * ratio - cosine)
        combinations.ravel()[places[step]] += multiple
        length = np.maximum(length * ratio, VANISHED)
        added += multiple
    return combinations, np.where(meeting, np.clip(cosines, -1.0, 1.0), np.nan).T
