"""How many micro-batches a refresh should measure: as many as make the noise no larger than the signal.

Objective k's gradient of one micro-batch is s + ε with the noise power E‖ε‖² = ν ‖s‖². Summed over m independent
micro-batches the signal grows as m and the noise as √m, so in U_kk / N_kk = ρ² noise has ν / m = (1 − ρ²) / ρ² of the
signal's power. A refresh that measured m knows

    ν = m (1 − ρ²) / ρ²,

the number of micro-batches at which both are alike, ρ² = ½: the gradient noise scale B_simple = tr Σ / ‖s‖² of
McCandlish et al. (arXiv 1812.06162, section 2.2), in micro-batches. It is the m to measure. For noise that spreads over
D directions the cross product of two halves estimates ‖s‖² with a relative variance of

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


def needed(estimate: Estimate, measured: float, least: int) -> int:
    """Return how many micro-batches the next refresh should measure, the largest ν of the objectives, rounded up.

    All of them (0) as long as of some objective with a gradient nothing is known, and where the signal of one is lost
    in the noise (U_kk ≤ 0): measuring more is the one way to find it. An absent objective counts as it was, for it may
    be back in the next step. The noise scale of a loss that nears its minimum grows without bound; steps that have
    fewer micro-batches than are asked for measure all of them.

    Args:
        estimate: of the refresh, with ρ as its ``signal_to_noise``.
        measured: m, how many micro-batches it measured.
        least: the estimator's ``least_micro_batches``.
    """
    if estimate.signal_to_noise is None:
        return 0
    known = ~np.isnan(estimate.signal_to_noise)
    powers = estimate.signal_to_noise[known] ** 2
    if (~known & (estimate.gramian.diagonal() > 0)).any() or (powers <= _ROUNDING).any():
        return 0
    scale: float = (measured * (1.0 - powers) / powers).max()
    return max(least, math.ceil(scale))
