"""Making a valid Gramian of an estimated one: a diagonal that is not too small, correlations that can exist."""

import numpy as np

from gradbalance.balancers.checks import Array
from gradbalance.solvers.semidefinite import correlations


def floored(squares: Array, noisy: Array, least: float) -> Array:
    """Return squared signal norms no smaller than a share of the noisy ones, and no larger than they are.

    The unbiased estimate of a small ‖s_k‖² is often negative; and as ‖s_k‖² ≤ E‖g_k‖², more than N_kk is an error too.

    Args:
        squares: the estimates of ‖s_k‖², shape (K,), of any sign.
        noisy: N_kk, shape (K,).
        least: the share, in (0, 1].
    """
    return np.clip(squares, least * noisy, noisy)


def with_norms(matrix: Array, squares: Array) -> Array:
    """Return a valid Gramian with a given diagonal, its correlations those of a matrix as far as they can exist.

    Args:
        matrix: symmetric, shape (K, K); its own diagonal is not looked at.
        squares: the diagonal of the result, shape (K,), positive.
    """
    norms = np.sqrt(squares)
    unit = matrix / norms[:, None] / norms
    np.fill_diagonal(unit, 1.0)
    result: Array = correlations(unit) * norms[:, None] * norms
    np.fill_diagonal(result, squares)
    return result
