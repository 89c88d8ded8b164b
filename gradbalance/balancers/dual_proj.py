"""DualProj: the mean gradient, freed of all its conflicts."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradbalance.balancers.active import Rows, over_unit
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, parts, vector
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
        preference: p_k > 0, the objectives' parts in the mean, shape (K,); only ratios matter (they are brought to sum
            1 over the objectives with a gradient). None: all equal.

    References:
        D. Lopez-Paz, M. Ranzato. Gradient episodic memory for continual learning. NeurIPS 2017, arXiv 1706.08840.
    """

    def __init__(self, preference: Sequence[float] | Tensor | None = None) -> None:
        self.preference = None if preference is None else vector("preference", preference, positive=True)

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient."""

        def solve(unit: Array, norms: Array, rows: Rows) -> Array:
            lengths = norms * parts("preference", self.preference, rows, len(gramian))
            largest = lengths.max()
            return np.asarray(largest * project(unit, lengths[None] / largest)[0])

        return over_unit(gramian, solve)
