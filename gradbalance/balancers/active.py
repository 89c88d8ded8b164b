"""Methods that solve something for the objectives that have a gradient, and give the others 0."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbalance.balancers.checks import Array, array
from gradbalance.solvers.checks import active_rows, unit_gramian

Rows = NDArray[np.intp]


def over_active(gramian: Tensor, solve: Callable[[Array, Rows], Array]) -> Tensor:
    """Solve over the objectives with a gradient.

    Args:
        gramian: ⟨g_k, g_l⟩, shape (K, K).
        solve: the Gramian of the A objectives that have a gradient, and their indices -> A coefficients.

    Returns:
        The coefficients, 0 for the others, shape (K,).
    """
    m = array(gramian)
    rows = active_rows(np.sqrt(m.diagonal())).nonzero()[0]
    coefficients = np.zeros(len(m))
    if len(rows) > 0:
        part = m if len(rows) == len(m) else m[rows[:, None], rows]
        coefficients[rows] = solve(part, rows)
    return torch.from_numpy(coefficients)


def over_unit(gramian: Tensor, solve: Callable[[Array, Array, Rows], Array]) -> Tensor:
    """Solve over the objectives with a gradient, given their unit gradients.

    Args:
        gramian: ⟨g_k, g_l⟩, shape (K, K).
        solve: the Gramian of the A unit gradients ĝ_k, the norms ‖g_k‖, and the indices -> A coefficients of the ĝ_k.

    Returns:
        The coefficients of the g_k, 0 for those without gradient, shape (K,).
    """
    rows, norms, unit = unit_gramian(array(gramian))
    coefficients = np.zeros(len(gramian))
    if len(rows) > 0:
        coefficients[rows] = solve(unit, norms, rows) / norms
    return torch.from_numpy(coefficients)


def only_active(weights: Tensor, gramian: Tensor) -> Tensor:
    """Return the weights, 0 for objectives without gradient."""
    active = active_rows(np.sqrt(array(gramian).diagonal()))
    return torch.from_numpy(np.where(active, array(weights), 0.0))
