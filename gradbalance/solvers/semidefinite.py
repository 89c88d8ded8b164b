"""What is missing to a Gramian that was estimated: raw estimates may be indefinite, a Gramian is not."""

import numpy as np

from gradbalance.solvers.exact import Array

ROUNDING = 1e-12
"""Eigenvalues of K unit vectors' Gramian are at most K: K times this little below zero is rounding."""


def positive_part(m: Array) -> Array:
    """Return the positive semidefinite matrix nearest to a symmetric one: its negative eigenvalues become 0."""
    try:
        np.linalg.cholesky(m)
    except np.linalg.LinAlgError:
        eigenvalues, vectors = np.linalg.eigh(m)
        return np.asarray((vectors * np.maximum(eigenvalues, 0.0)) @ vectors.T)
    return m


def correlations(unit: Array) -> Array:
    """Return a Gramian of unit vectors close to a symmetric matrix with diagonal 1; one that is such stays as it is.

    Entries are cut to [−1, 1], negative eigenvalues are set to 0, which gives the closest positive semidefinite matrix,
    and that is scaled to unit diagonal. It is the first round of the alternating projections that lead to the closest
    correlation matrix (Higham, IMA J. Numer. Anal. 22, 2002); the rounds that are left out would cost an eigenvalue
    decomposition each and change the matrix less than it is uncertain. Both steps treat all vectors alike, so the
    result is permutation-equivariant.

    Args:
        unit: shape (K, K).
    """
    cut: Array = np.clip(unit, -1.0, 1.0)
    try:
        np.linalg.cholesky(cut)
    except np.linalg.LinAlgError:
        eigenvalues, vectors = np.linalg.eigh(cut)
    else:
        return cut
    if eigenvalues[0] >= -ROUNDING * len(cut):
        return cut
    closest = (vectors * np.maximum(eigenvalues, 0.0)) @ vectors.T
    lengths = np.sqrt(closest.diagonal())
    halves = closest / lengths[:, None] / lengths / 2
    found: Array = np.clip(halves + halves.T, -1.0, 1.0)
    np.fill_diagonal(found, 1.0)
    return found
