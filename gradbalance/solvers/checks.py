"""What makes a K×K matrix a usable Gramian, and which of its rows take part in a solve.

Every decision is relative to the largest row, so that rescaling all gradients changes nothing.
"""

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbalance.solvers.exact import Array

AnyArray = TypeVar("AnyArray", NDArray[Any], Tensor)

NEGLIGIBLE_NORM = 1e-20
"""A gradient is taken for zero when its norm is at most this share of the largest norm."""

ASYMMETRY = 1e-2
"""Largest |M_kl − M_lk| / (‖g_k‖ ‖g_l‖) put down to rounding (bfloat16 inner products reach a few 1e-3)."""


def check_gramian(gramian: Tensor) -> Tensor:
    """Check a Gramian and bring it to the CPU in float64.

    Args:
        gramian: ⟨g_k, g_l⟩, shape (K, K), any real dtype and device.

    Returns:
        The same matrix as a float64 CPU tensor, exactly symmetric; it shares memory where nothing had to change.

    Raises:
        TypeError: ``gramian`` is not a real floating-point tensor.
        ValueError: it is not square and symmetric, or a row is not finite or has a negative square norm.
    """
    if not isinstance(gramian, Tensor) or not gramian.is_floating_point():
        found = gramian.dtype if isinstance(gramian, Tensor) else type(gramian).__name__
        raise TypeError(f"gramian must be a real floating-point tensor of shape (K, K), got {found}")
    if gramian.dim() != 2 or gramian.shape[0] != gramian.shape[1] or gramian.shape[0] == 0:
        raise ValueError(
            f"gramian must be a square matrix of shape (K, K) with K ≥ 1, got shape {tuple(gramian.shape)}; "
            "for gradients G of shape (K, P) pass G @ G.T"
        )
    checked = gramian.to(device="cpu", dtype=torch.float64)
    values = checked.detach().numpy()
    diagonal = values.diagonal()
    finite = np.isfinite(values)
    if np.count_nonzero(finite) < finite.size:
        # A non-finite gradient spoils its row AND its column: blame the rows whose own square norm is spoilt, if any.
        bad = ~finite.diagonal() if not finite.diagonal().all() else ~finite.all(axis=1)
        rows = ", ".join(map(str, bad.nonzero()[0]))
        raise ValueError(f"gramian has non-finite values in row {rows}: {values.tolist()}")
    if diagonal.min() < 0:
        row = int(diagonal.argmin())
        raise ValueError(f"gramian[{row}, {row}] is a squared norm and must be ≥ 0, got {diagonal[row]}")
    if np.count_nonzero(values != values.T):
        norms = np.sqrt(diagonal)
        excess = abs(values - values.T) - ASYMMETRY * norms[:, None] * norms
        if excess.max() > 0:
            row, column = divmod(int(excess.argmax()), len(values))
            raise ValueError(
                f"gramian must be symmetric, got {values[row, column]} at [{row}, {column}] and "
                f"{values[column, row]} at [{column}, {row}]; for gradients G of shape (K, P) pass G @ G.T"
            )
        checked = (checked + checked.T) / 2
    return checked


def active_rows(norms: AnyArray) -> AnyArray:
    """Say which objectives have a gradient at all.

    Args:
        norms: ‖g_k‖, shape (K,), in numpy or torch.

    Returns:
        Boolean, shape (K,): norm above ``NEGLIGIBLE_NORM`` times the largest; all False if all norms are 0.
    """
    active: AnyArray = norms > NEGLIGIBLE_NORM * norms.max()
    return active


def unit_gramian(gramian: Array) -> tuple[NDArray[np.intp], Array, Array]:
    """Reduce a Gramian to its active rows, scaled to unit vectors.

    Args:
        gramian: M, shape (K, K).

    Returns:
        Indices of the A active rows, their norms ‖g_k‖, and M̂_kl = M_kl / (‖g_k‖ ‖g_l‖), shape (A, A).
    """
    norms = np.sqrt(gramian.diagonal())
    rows = active_rows(norms).nonzero()[0]
    norms = norms[rows]
    return rows, norms, gramian[rows[:, None], rows] / (norms[:, None] * norms)
