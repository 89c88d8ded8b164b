"""Making a valid Gramian of an estimated one: a diagonal that is not too small, correlations that can exist."""

import numpy as np

from gradbalance.balancers.checks import Array

# Eigenvalues of a correlation matrix are at most K: this little below zero is rounding.
_ROUNDING = 1e-12


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
    correlations = matrix / norms[:, None] / norms
    np.fill_diagonal(correlations, 1.0)
    result: Array = valid_correlation(correlations) * norms[:, None] * norms
    np.fill_diagonal(result, squares)
    return result


def valid_correlation(matrix: Array) -> Array:
    """Return a correlation matrix close to a symmetric matrix with unit diagonal; a valid one is returned as it is.

    Entries are cut to [−1, 1], negative eigenvalues are set to 0, which gives the closest positive semidefinite matrix,
    and that is scaled to unit diagonal. It is the first round of the alternating projections that lead to the closest
    correlation matrix (Higham, IMA J. Numer. Anal. 22, 2002). The rounds that are left out would cost an eigenvalue
    decomposition each, and there is little left for them: on valid matrices with random errors the result is at most a
    quarter further away than the closest correlation matrix (tested). All objectives are treated alike, so it is
    permutation-equivariant.

    Args:
        matrix: shape (K, K).
    """
    cut: Array = np.clip(matrix, -1.0, 1.0)
    values, vectors = np.linalg.eigh(cut)
    if values[0] >= -_ROUNDING * len(cut):
        return cut
    closest = (vectors * values.clip(min=0.0)) @ vectors.T
    lengths = np.sqrt(closest.diagonal())
    halves = closest / lengths[:, None] / lengths / 2
    scaled: Array = (halves + halves.T).clip(-1.0, 1.0)
    np.fill_diagonal(scaled, 1.0)
    return scaled
