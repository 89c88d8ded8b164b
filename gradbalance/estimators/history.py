"""Cross products of this step's gradients with averages of the past ones, for one micro-batch a step."""

from typing import ClassVar

import numpy as np

from gradbalance.balancers.checks import Array, number, sized
from gradbalance.estimators.averages import Averaged, gained
from gradbalance.estimators.base import Estimate, total


class HistoryGramian(Averaged):
    """Tell signal from noise by comparing a step's gradients with those of the steps before.

    ḡ_l is the moving average of the past gradients of objective l (no bias to its beginning). This step's noise is
    independent of it, so while the parameters move slowly Û_kl = (⟨g_k, ḡ_l⟩ + ⟨ḡ_k, g_l⟩) / 2 has the expectation
    ⟨s_k, s_l⟩; where only one of the two has a past, its term alone. It needs no second micro-batch but K buffers of
    the parameters' size, kept in the inner optimizer's state.

    **What it assumes.** The gradients change little over the 1 / (1 − ``history_decay``) refreshes that ḡ looks back
    to: a gradient that turns makes Û too small. A step also moves the parameters by a bit of its own noise, which
    lowers the next gradient along it: −η tr(H Σ) in all, small where the learning rate η suits the curvature H.

    The first refresh has no past; its own inner products stand for both Gramians. Averages and validity: see
    :class:`~gradbalance.estimators.Averaged`.

    Args:
        history_decay: decay of the averages of gradients, in [0, 1); with 0 each step is compared with the one before.
        ema_decay: ρ in [0, 1) of the averages of inner products over refreshes.
        min_signal: least U_kk / N_kk, in (0, 1].
    """

    uses_history = True
    STATE: ClassVar[tuple[str, ...]] = (*Averaged.STATE, "past")

    def __init__(self, history_decay: float = 0.9, ema_decay: float = 0.9, min_signal: float = 0.01) -> None:
        super().__init__(ema_decay, min_signal)
        self.history_decay = number("history_decay", history_decay, "[0, 1)")
        self.past: list[float] = []
        """Weights behind the averages of the gradients; 0 where there is none."""

    def _estimate(self, products: Array, counts: Array, share: float) -> Estimate:
        measured, cross = total(products, 1), products[0, :, 1]
        size = len(measured)
        # A past that a checkpoint has lost is no past.
        there = products[1, :, 1].diagonal() > 0
        past = np.where(there, sized("past", self.past, size) if self.past else 0.0, 0.0)
        known = (past > 0) / 2.0
        estimate = self._averaged(measured, (cross * (past > 0) + (cross * (past > 0)).T) / 2, known[:, None] + known)
        past, newest = gained(past, (estimate.gramian.diagonal() > 0).astype(np.float64), self.history_decay)
        self.past = list(map(float, past))
        return estimate._replace(newest=newest)
