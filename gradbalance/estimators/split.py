"""Cross products of independent parts of one step's micro-batches."""

import numpy as np

from gradbalance.balancers.checks import Array, integer
from gradbalance.estimators.averages import Averaged
from gradbalance.estimators.base import Estimate, total
from gradbalance.solvers.checks import NEGLIGIBLE_NORM


class SplitGramian(Averaged):
    """Tell signal from noise by comparing micro-batches of the same step.

    Micro-batch i goes to part i mod A, and g_k = Σ_a g_k^a. Noise of different parts is independent, so
    E⟨g_k^a, g_l^b⟩ = w_ka w_lb U_kl for a ≠ b, where w_ka is part a's share of objective k, and

        Û_kl = Σ_{a≠b} ⟨g_k^a, g_l^b⟩ / (1 − Σ_a w_ka w_la)

    is unbiased; with equal shares the divisor is (A−1)/A. Over the steps numerator and divisor are averaged apart, so
    that a step counts as much as it tells.

    **Shares.** w_ka is the share of the micro-batches in which objective k was present and not all of its part's
    gradient was zero. So a rare reward that only one part holds takes nothing from its estimate (the divisor is then 0
    for itself, and right for its pairs with the others), instead of pulling it to 0. If the samples that count are
    spread unevenly over micro-batches that all count alike (n_k rare samples in all), ‖s_k‖² is under-estimated, by a
    factor of about 1 − 1/n_k on average.

    **Micro-batches should be alike:** of about one size, each with samples of its own. A share is a count of
    micro-batches, so sizes of 9 : 1 in two parts give a third of ‖s_k‖²; and samples that come again in another part (a
    picture at a second noise level) bring their noise into the product. An objective that one part alone ever sees has
    no estimate of its own: N_kk stands for U_kk, as if it had no noise, and ``signal_to_noise`` stays NaN.

    A step with one micro-batch tells nothing; the averages go on as they are. Averages and validity: see
    :class:`~gradbalance.estimators.Averaged`.

    Args:
        parts: A ≥ 2. More parts use more of the products, (A−1)/A of them, and hold A·K gradients. 2 is enough: all
            cross products of a step of m micro-batches would halve the variance of Û at most.
        ema_decay: ρ in [0, 1) of the averages over refreshes.
        min_signal: least U_kk / N_kk, in (0, 1]: an objective is never taken for weaker than √min_signal of its
            gradient's norm.
    """

    least_micro_batches = 2

    def __init__(self, parts: int = 2, ema_decay: float = 0.9, min_signal: float = 0.01) -> None:
        super().__init__(ema_decay, min_signal)
        self.parts = integer("parts", parts, least=2)

    def _estimate(self, products: Array, counts: Array, share: float) -> Estimate:
        if np.count_nonzero(counts.any(axis=1)) < 2 and not any(self.mass):
            raise RuntimeError(
                "SplitGramian compares micro-batches, and its first refresh has one only: split the batch and pass the "
                "pieces with backward(..., accumulate=True), the last with accumulate=False, or use "
                'gramian_estimator="history" or "plain"'
            )
        squares = np.einsum("akak->ak", products)
        counts = np.where(squares > NEGLIGIBLE_NORM**2 * squares.max(axis=0), counts, 0.0)
        across = products.copy()
        for a in range(self.parts):
            across[a, :, a] = 0.0
        shares = counts / np.maximum(counts.sum(axis=0), 1.0)
        together = shares.T @ shares
        # Shares are ratios of small integers: what is left over by rounding is nothing.
        amount = np.where(together < 1.0 - 1e-9, 1.0 - together, 0.0)
        return self._averaged(total(products, self.parts), total(across, self.parts), amount, share)
