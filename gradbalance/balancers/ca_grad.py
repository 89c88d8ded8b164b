"""CAGrad: near the mean gradient, the update that serves the worst-served objective best."""

import math

import numpy as np
from torch import Tensor

from gradbalance.balancers.active import Rows, over_unit
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, number
from gradbalance.solvers import exact
from gradbalance.solvers.dual_cone import project

VANISHING = 1e-7
"""A combination of gradients this much shorter than the sum of its parts is zero: the root of rounding, with room."""

SMALL = 1e-3
"""A combination this short may be one that vanishes at t = 0."""

ACCURACY = 1e-12
"""Relative error of the squared distance from the mean that needs no further solve."""

ROUNDING = 1e-15
"""Error of the square of a sum of gradients, relative to the square of the sum of their norms."""

RIDGE = 1e-14
"""Added to the diagonal of a unit Gramian that may be singular, where only the length of Σ_k v_k g_k counts."""

HELD = 1e-9
"""A weight up to this is a rounding of 0."""

SOLVES = 60
"""Most min-norm problems solved; about three are needed."""


class CAGrad(Balancer):
    """Maximise the smallest progress within a ball around the mean gradient.

    With g_0 the mean of the gradients, d maximises min_k ⟨g_k, d⟩ over ‖d − g_0‖ ≤ c ‖g_0‖. It is
    d = g_0 + c ‖g_0‖ g_w / ‖g_w‖, that is λ_k = 1/K + c ‖g_0‖ w_k / ‖g_w‖, where g_w = Σ_k w_k g_k and w minimises
    ⟨g_w, g_0⟩ + c ‖g_0‖ ‖g_w‖ over the simplex. With t = ‖g_w‖ / (c ‖g_0‖), w also gives the point of least norm among
    the convex combinations of the g_k + t g_0. So the problem is one min-norm point and one number t; on a fixed set of
    objectives with w_k > 0, t follows in closed form, and about three min-norm problems are solved in all.

    λ does not change when all gradients are multiplied by one number; their relative norms matter. c = 0 is the mean
    gradient, and for c < 1 the update vanishes only where the mean gradient does. c → ∞ goes to the direction of
    :class:`~gradbalance.balancers.MGDA`, and for c ≥ 1 the update vanishes at any Pareto-stationary point. For c < 1
    the smallest progress may be negative.

    The paper leaves two cases open. Where g_w vanishes, the best smallest progress is 0 and several d reach it; we
    take the one nearest to g_0, its projection as in :class:`~gradbalance.balancers.DualProj`, which is also the limit.
    Where g_0 vanishes, so does d. The update is that of the paper's algorithm; the published code divides it by
    1 + c² or 1 + c (``rescale``), which is a change of the learning rate.

    Args:
        c: radius of the ball, relative to ‖g_0‖, ≥ 0.

    References:
        B. Liu et al. Conflict-averse gradient descent for multi-task learning. NeurIPS 2021, arXiv 2110.14048.
    """

    def __init__(self, c: float = 0.5) -> None:
        self.c = number("c", c, "[0, ∞)")

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient. The mean is over the others."""

        def solve(unit: Array, norms: Array, rows: Rows) -> Array:
            return norms * (1.0 / len(rows) + _addition(unit, norms / norms.max(), self.c))

        return over_unit(gramian, solve)


def _addition(unit: Array, norms: Array, c: float) -> Array:
    """Return x ≥ 0 with d = g_0 + Σ_k x_k g_k."""
    size = len(norms)
    m = unit * norms[:, None] * norms
    with_mean = m.sum(1) / size  # ⟨g_k, g_0⟩
    radius = c * math.sqrt(max(with_mean.sum() / size, 0.0))
    if radius <= VANISHING * c * norms.sum() / size:
        return np.zeros(size)
    x = _within_ball(m, with_mean, radius, c)
    if x is None:
        mean = norms / size  # g_0 as a combination of the unit gradients
        x = (project(unit, mean[None])[0] - mean) / norms
    return x


def _within_ball(m: Array, with_mean: Array, radius: float, c: float) -> Array | None:
    """Find t with ‖g_w(t)‖ = radius t, w(t) giving the min-norm point of the g_k + t g_0.

    Returns:
        w / t, or None if g_w vanishes, and with it t.
    """
    norms, square = np.sqrt(m.diagonal()), (radius / c) ** 2
    low, high = 0.0, norms.max() / radius * (1.0 + ACCURACY)
    t = min(1.0 / c, high)  # right if w is uniform
    for _ in range(SOLVES):
        w = _min_norm(m + t * (with_mean[:, None] + with_mean) + t**2 * square)
        length = math.sqrt(max(float(w @ m @ w), 0.0))
        if length <= VANISHING * (w @ norms):
            return None
        if abs(length**2 - (radius * t) ** 2) <= ACCURACY * length**2 + ROUNDING * (w @ norms) ** 2:
            parts = w @ norms
            vanishes = length <= SMALL * parts and _distance(m, with_mean, t, w)[0] <= (VANISHING * parts) ** 2
            return None if vanishes else w / t
        low, high = (t, high) if length > radius * t else (low, t)
        t = _next_t(m, with_mean, radius, t, w)
        if not low < t < high:
            t = math.sqrt(low * high) if low > 0.0 else high / 10.0
    return np.asarray(w / t)


def _next_t(m: Array, with_mean: Array, radius: float, t: float, w: Array) -> float:
    """Solve for t while the set {k: w_k > 0} lasts; infinity where there is no solution."""
    a, b = _distance(m, with_mean, t, w)
    a = max(a, (VANISHING / 100 * float(w @ np.sqrt(m.diagonal()))) ** 2)  # 0 only up to rounding
    return math.sqrt(a / (radius**2 - b)) if b < radius**2 else math.inf


def _distance(m: Array, with_mean: Array, t: float, w: Array) -> tuple[float, float]:
    """Return a and b of ‖g_w(t)‖² = a + b t² on the set of objectives with a weight.

    There w(t) = w(0) + t v, and w(0), the min-norm point of the affine hull, is orthogonal to v.
    """
    rows = (w > HELD).nonzero()[0]
    part = m[rows[:, None], rows]
    norms = np.sqrt(part.diagonal())
    system = np.zeros((len(rows) + 1, len(rows) + 1))
    system[:-1, :-1] = part / (norms[:, None] * norms)
    system[-1, :-1] = system[:-1, -1] = norms.min() / norms
    right = np.append(-with_mean[rows] / norms, 0.0)
    system.ravel()[: -1 : len(rows) + 2] *= 1.0 + RIDGE
    v = np.linalg.solve(system, right)[:-1] / norms
    b = float(v @ part @ v)
    return float(w @ m @ w) - b * t**2, b


def _min_norm(m: Array) -> Array:
    """Return w on the simplex with the least wᵀMw. A row may vanish: any positive number then serves as its norm."""
    norms = np.sqrt(np.maximum(m.diagonal(), np.finfo(np.float64).eps * m.diagonal().max()))
    c = norms.min() / norms
    w: Array = c * exact.solve(m / (norms[:, None] * norms), c)
    return w
