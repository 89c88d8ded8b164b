"""DualProj: the mean gradient, freed of all its conflicts."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import array, parts, vector
from gradbalance.solvers.checks import unit_gramian
from gradbalance.solvers.dual_cone import project


class DualProj(Balancer):
    """Project the mean gradient onto the cone without conflict.

    d is the vector nearest to Σ_k p_k g_k, with p_k = 1/K, in the dual cone {d: ⟨g_k, d⟩ ≥ 0 for every k}. Its
    coefficients are found exactly from the unit Gramian (:mod:`gradbalance.solvers.dual_cone`).

    No objective is in conflict with the update, and where none conflicts with the mean, d is the mean. λ does not
    change when all gradients are multiplied by one number; an objective with a long gradient dominates. The update
    vanishes where a convex combination of the gradients with all weights positive does. λ_k ≥ p_k; where the gradients
    are linearly dependent several λ give the same d, and the one returned is near the least norm.

    In the paper, which is about continual learning, the vector projected is the gradient of the present task and the
    cone that of all tasks; projecting the mean is the form known in multi-task learning. The other is a
    ``preference`` with nearly all its weight on one objective. See :class:`~gradbalance.balancers.UPGrad` for the
    mean of projections instead of the projection of the mean.

    Args:
        preference: p_k > 0, shape (K,). None: 1/K for K objectives with a gradient.

    References:
        D. Lopez-Paz, M. Ranzato. Gradient episodic memory for continual learning. NeurIPS 2017, arXiv 1706.08840.
    """

    def __init__(self, preference: Sequence[float] | Tensor | None = None) -> None:
        self.preference = None if preference is None else vector("preference", preference, positive=True)

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient."""
        rows, norms, unit = unit_gramian(array(gramian))
        found = np.zeros(len(gramian))
        if len(rows) > 0:
            lengths = norms * parts("preference", self.preference, rows, len(gramian))
            largest = lengths.max()
            found[rows] = largest * project(unit, lengths[None] / largest)[0] / norms
        return torch.from_numpy(found)
