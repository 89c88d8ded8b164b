"""The point of the simplex nearest to a given one: exact, by sorting.

The answer is max(v − θ, 0) with θ such that its entries sum to 1. If the n largest entries of v are those that stay
positive, θ = (their sum − 1) / n, and n is the largest number for which the n-th largest entry exceeds its θ.

References:
    M. Held, P. Wolfe, H. P. Crowder. Validation of subgradient optimization. Mathematical Programming 6, 1974.
"""

import numpy as np

from gradbalance.solvers.exact import Array


def onto_simplex(values: Array) -> Array:
    """Project onto {w ≥ 0, Σ_k w_k = 1}.

    Args:
        values: v, finite, shape (K,).

    Returns:
        argmin ‖w − v‖², shape (K,).
    """
    shifted = values - values.max()  # the answer stays; entries that matter come within 1 of 0, and keep their digits
    descending = np.sort(shifted)[::-1]
    thresholds = (np.cumsum(descending) - 1.0) / np.arange(1, len(values) + 1)
    positive = np.count_nonzero(descending > thresholds)
    w = np.maximum(shifted - thresholds[positive - 1], 0.0)
    return np.asarray(w / w.sum())
