"""What is missing to a Gramian that was estimated: raw estimates may be indefinite, a Gramian is not."""

import numpy as np

from gradbalance.solvers.exact import Array


def positive_part(m: Array) -> Array:
    """Return the positive semidefinite matrix nearest to a symmetric one: its negative eigenvalues become 0."""
    try:
        np.linalg.cholesky(m)
    except np.linalg.LinAlgError:
        eigenvalues, vectors = np.linalg.eigh(m)
        return np.asarray((vectors * np.maximum(eigenvalues, 0.0)) @ vectors.T)
    return m


def correlations(unit: Array) -> Array:
    """Return a Gramian of unit vectors near a symmetric matrix with diagonal 1.

    Entries beyond ±1 are cut, then negative eigenvalues become 0 and the diagonal is scaled back to 1. What is a
    Gramian already stays as it is, up to rounding.
    """
    if positive_part(unit) is unit:
        return unit
    found = positive_part(np.clip(unit, -1.0, 1.0))
    lengths = np.sqrt(found.diagonal())
    return np.asarray(found / (lengths[:, None] * lengths))
