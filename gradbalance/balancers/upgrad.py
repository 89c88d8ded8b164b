"""UPGrad: each gradient is freed of all its conflicts at once, then all are averaged."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradbalance.balancers.active import Rows, over_unit
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, parts, vector
from gradbalance.solvers.dual_cone import project


class UPGrad(Balancer):
    """Average the projections of the gradients onto the cone without conflict.

    The dual cone of the gradients is {d: ⟨g_k, d⟩ ≥ 0 for every k}. Each g_k is replaced by the nearest vector in it,
    and d = Σ_k p_k π(g_k) with p_k = 1/K. All that is needed of a projection are its coefficients, found exactly from
    the unit Gramian, all K at once (:mod:`gradbalance.solvers.dual_cone`).

    The cone is convex, so d lies in it: no objective is in conflict with the update. Without conflicts d is the mean
    gradient. λ does not change when all gradients are multiplied by one number; multiplying one loss by c multiplies
    that objective's part of d by c (the paper calls this linear under scaling). The update vanishes where a convex
    combination of the gradients with all weights positive does. λ_k ≥ p_k; where the gradients are linearly dependent
    several λ give the same d, and the one returned is near the least norm.

    Implementations that add a constant to the diagonal of the Gramian, or switch to the mean for short gradients,
    return something else; here all tolerances are relative and nothing is added.

    Args:
        preference: p_k > 0, the objectives' parts in the sum, shape (K,); only ratios matter (they are brought to sum 1
            over the objectives with a gradient). None: all equal.

    References:
        P. Quinton, V. Rey. Jacobian descent for multi-objective optimization. 2024, arXiv 2406.16232.
    """

    def __init__(self, preference: Sequence[float] | Tensor | None = None) -> None:
        self.preference = None if preference is None else vector("preference", preference, positive=True)

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient."""

        def solve(unit: Array, norms: Array, rows: Rows) -> Array:
            lengths = norms * parts("preference", self.preference, rows, len(gramian))
            return np.asarray(lengths @ project(unit, np.eye(len(rows))))

        return over_unit(gramian, solve)
