"""EPO: towards the Pareto-optimal point where the losses stand in a wanted proportion."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, array, loss_values, number, parts, vector
from gradbalance.solvers import linear, min_norm
from gradbalance.solvers.checks import active_rows

SMALLEST_SHARE = 1e-12
"""Share of a weighted loss in their sum below which it counts as this much, since the logarithm of 0 is not finite."""

ROUNDING = 1e-13
"""A progress this much smaller than the sum of its parts is zero."""


class EPO(Balancer):
    """Search the exact Pareto-optimal point for a preference: p_1 L_1 = … = p_K L_K.

    The shares q_k = p_k L_k / Σ_j p_j L_j of the weighted losses are as wanted where they are all 1/K. Their
    non-uniformity is μ = Σ_k q_k log(K q_k), and falls fastest, as a function of the losses, along the anchor
    a_k = p_k (log(K q_k) − μ). The update is d = Σ_k λ_k g_k with λ on the simplex, from one of two linear programs:

    - balance, while μ > ``tolerance``: maximise ⟨d, Σ_k a_k g_k⟩, subject to ⟨g_k, d⟩ ≥ 0 for the objective with the
      largest p_k L_k, and ⟨g_k, d⟩ ≥ (Ma)_k where (Ma)_k ≤ 0: no loss rises more than the anchor itself would make it.
      If no (Ma)_k is positive, no loss may rise.
    - descent, once μ ≤ ``tolerance``: maximise ⟨d, Σ_k g_k⟩, subject to ⟨g_k, d⟩ ≥ 0 for every k and to μ not growing,
      ⟨d, Σ_k a_k g_k⟩ ≥ min(0, max_k (Ma)_k). If nothing satisfies the last, it is left out (the paper's relaxed form).

    So the update may conflict with objectives while it balances, on purpose. λ does not change when all losses are
    multiplied by one number, but does when one is: the preference refers to the losses as they are. λ is a corner of a
    polytope and jumps from step to step; averaging it (``ema_decay``) calms the path. Training ends near the wanted
    point if it exists on the Pareto front; but where all gradients agree and a loss that is nearly 0 would have to
    rise, no (Ma)_k is positive, and the method heads for the minimum of that loss, where small steps can get stuck.
    Objectives without gradient leave the problem, their losses too.

    The programs are solved exactly by a dual simplex method, in place of a general solver. The published training code
    multiplies λ by K, a change of the learning rate.

    Args:
        preference: p_k > 0, shape (K,): the larger, the smaller the loss that is wanted; only ratios matter (they are
            normalised to sum 1). None: equal losses.
        tolerance: of μ, ≥ 0.

    References:
        D. Mahapatra, V. Rajan. Multi-task learning with user preferences: gradient descent with controlled ascent in
        Pareto optimization. ICML 2020, PMLR 119.
    """

    def __init__(self, preference: Sequence[float] | Tensor | None = None, tolerance: float = 1e-4) -> None:
        self.preference = None if preference is None else vector("preference", preference, positive=True)
        self.tolerance = number("tolerance", tolerance, "[0, ∞)")

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ ≥ 0 with sum 1; 0 for objectives without gradient. Raises ValueError if a loss is negative."""
        m = array(gramian)
        values = loss_values(losses, len(m), "EPO")
        norms = np.sqrt(m.diagonal())
        rows = active_rows(norms).nonzero()[0]
        bad = [int(k) for k in rows if not 0.0 <= values[k] < np.inf]
        if bad:
            raise ValueError(f"EPO needs losses ≥ 0, got {values[bad[0]]} for objective {bad[0]}")
        found = np.zeros(len(m))
        if len(rows) > 0:
            preference = parts("preference", self.preference, rows, len(m))
            relative = m[rows[:, None], rows] / norms.max() ** 2
            found[rows] = _search(relative, values[rows], preference / preference.sum(), self.tolerance)
        return torch.from_numpy(found)


def _search(m: Array, losses: Array, preference: Array, tolerance: float) -> Array:
    """Return λ of the balance or the descent program."""
    weighted = preference * losses / max(float(losses.max()), np.finfo(np.float64).tiny)
    shares = np.maximum(weighted / weighted.sum(), SMALLEST_SHARE) if weighted.any() else np.ones_like(m[0]) / len(m)
    logarithms = np.log(len(m) * shares)
    non_uniformity = float(shares @ logarithms)
    anchor = preference * (logarithms - non_uniformity)
    by_anchor = m @ anchor  # the progress that the anchor makes
    by_anchor[abs(by_anchor) <= ROUNDING * (abs(m) @ abs(anchor))] = 0.0
    if non_uniformity > tolerance:
        return _balance(m, by_anchor, weighted)
    return _descend(m, by_anchor)


def _balance(m: Array, by_anchor: Array, weighted: Array) -> Array:
    falling = by_anchor > 0
    least = np.where(falling, -np.inf, by_anchor if falling.any() else 0.0)
    least[weighted == weighted.max()] = 0.0
    bound = least > -np.inf
    return _or_shortest(linear.maximise(by_anchor, m[bound], least[bound]), m)


def _descend(m: Array, by_anchor: Array) -> Array:
    least = np.append(np.zeros(len(m)), min(0.0, float(by_anchor.max())))
    restricted = linear.maximise(m.sum(axis=1), np.vstack([m, by_anchor]), least)
    if restricted is not None:
        return restricted
    return _or_shortest(linear.maximise(m.sum(axis=1), m, least[:-1]), m)


def _or_shortest(found: Array | None, m: Array) -> Array:
    """Return ``found``; if there is none by rounding, the min-norm point, which satisfies the constraints by rights."""
    return min_norm(torch.from_numpy(m)).numpy() if found is None else found
