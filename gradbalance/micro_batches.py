"""How many micro-batches a refresh should measure: as many as make the noise no larger than the signal.

Let objective k's gradient of one micro-batch be s + ε, with noise of power E‖ε‖² = ν ‖s‖². In the sum over n
independent micro-batches the signal's power is n² ‖s‖² and the noise's n ν ‖s‖²: where U_kk = ρ² N_kk for such sums,

    (1 − ρ²) / ρ² = ν / n   and   ν = n (1 − ρ²) / ρ²,

the number of micro-batches that makes both alike: the gradient noise scale tr Σ / ‖s‖² of McCandlish et al. (arXiv
1812.06162, section 2.2), in micro-batches. It is the m to measure. For noise that spreads over D directions the cross
product of two halves of m micro-batches estimates ‖s‖² with a relative variance of

    4 (ν/m + (ν/m)²) / D.

Below ν the square rules: twice the micro-batches give a quarter of the variance. Averaging two refreshes gives a half.
Above ν the first term rules and more micro-batches a refresh do no better than more refreshes, so there the passes are
better spent on those. Variance times cost is at m = ν within a factor of 2 of the least that any m reaches.
"""

import math

import numpy as np

from gradbalance.estimators import Estimate

AUTO = "auto"
"""The value of ``refresh_micro_batches`` that asks for it."""

# So little of a gradient's squared norm is rounding, not signal.
_ROUNDING = 1e-12


def needed(estimate: Estimate, count: float, least: int) -> int:
    """Return how many micro-batches the next refresh should measure: the largest ν of the objectives, rounded up.

    All of them (0) as long as nothing is known of some objective that has a gradient, and where the signal of one is
    lost in the noise (U_kk ≤ 0): measuring more is the one way to find it. An absent objective counts as it was, for it
    may be back in the next step. As a loss nears its minimum its ν grows without bound; a step with fewer micro-batches
    than are asked for measures all of them.

    Args:
        estimate: with ρ as its ``signal_to_noise``.
        count: n, of how many micro-batches the gradients are that it is about.
        least: the estimator's ``least_micro_batches``.
    """
    if estimate.signal_to_noise is None:
        return 0
    known = ~np.isnan(estimate.signal_to_noise)
    powers = estimate.signal_to_noise[known] ** 2
    if (~known & (estimate.gramian.diagonal() > 0)).any() or (powers <= _ROUNDING).any():
        return 0
    scale: float = (count * (1.0 - powers) / powers).max()
    return max(least, math.ceil(scale))
