"""The least-norm solution of a linear system with a unit Gramian, which may be singular.

Both equal-projection methods need it: a combination Σ_k a_k ĝ_k of unit gradients has the inner products M̂a with them.
A well-conditioned system is inverted, which is several times faster; otherwise the eigenvectors of M̂ whose eigenvalue
is 0 up to rounding are left out, and a solves the system as well as it can be solved (in the least-squares sense).
"""

import numpy as np

from gradbalance.solvers.exact import CONDITION, Array

RANK = 1e-13
"""Eigenvalues below this share of the largest are rounding."""


def least_norm(unit: Array, target: Array) -> Array:
    """Compute a = M̂⁺ t.

    Args:
        unit: M̂, positive semidefinite with diagonal 1, shape (K, K).
        target: t, shape (K,).

    Returns:
        a, shape (K,).
    """
    try:
        inverse = np.linalg.inv(unit)
    except np.linalg.LinAlgError:
        return _by_eigenvectors(unit, target)
    diagonal = inverse.diagonal()
    if diagonal.min() <= 0 or diagonal.max() >= CONDITION:
        return _by_eigenvectors(unit, target)
    a = inverse @ target
    return np.asarray(a + inverse @ (target - unit @ a))


def _by_eigenvectors(unit: Array, target: Array) -> Array:
    eigenvalues, vectors = np.linalg.eigh(unit)
    kept = eigenvalues > RANK * eigenvalues[-1]
    basis = vectors[:, kept]
    return np.asarray(basis @ ((target @ basis) / eigenvalues[kept]))
