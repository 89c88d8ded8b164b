"""Fair directions: the update that maximises an α-fair utility of the objectives' progress, by Newton's method.

The weights β of K unit gradients ĝ_k, with Gramian M̂, solve (M̂β)_k = w_k β_k^−p. With d = Σ_k β_k ĝ_k this says
⟨ĝ_k, d⟩ = w_k β_k^−p: the less progress an objective makes, the larger its weight. It is the optimality condition of
two convex problems. With ψ_q the antiderivative of x^−q,

    min over β > 0 of  ½ βᵀM̂β − Σ_k w_k ψ_p(β_k),       and of  ½ βᵀM̂β − Σ_k v_k ψ_q((M̂β)_k),  q = 1/p, v = w^q,

whose solutions have the same z = M̂β. Newton's method likes barriers that are steep, so the first serves for p ≥ 1. For
p < 1 the second does, and the first has the last word, since it determines β also where M̂ is singular. ``maximise``
solves both forms. It bridges orders of magnitude near a stationary point by moving, before each step, to the best
point of the ray through the current one, known in closed form.
"""

import math

import numpy as np

from gradbalance.solvers import exact
from gradbalance.solvers.exact import Array

STATIONARY = 1e-7
"""Convex combinations of unit vectors no longer than this vanish: the root of float64's rounding, with room."""

CONVERGED = 1e-7
"""After a relative step of this size the next would be of about its square."""

FAR, NEAR = 1.0, 0.3
"""After a relative step longer than the first the ray is looked at; one no longer than the second, over q, is right."""

STEPS = 100
"""Most Newton steps; about 5 are needed, a few more near a stationary point."""

ROUNDING = 1e-16
"""A square that is not at least this share of its parts, or an entry of Ax that is not positive, is set to it."""

RIDGE = 1e-14
"""Share of a diagonal added to a matrix that may be singular, where any solution will do."""


def fair_weights(unit: Array, w: Array, p: float) -> Array:
    """Solve M̂β = w β^−p.

    Args:
        unit: M̂, Gramian of unit vectors, shape (K, K).
        w: > 0, shape (K,).
        p: > 0.

    Returns:
        β > 0, shape (K,). Where a convex combination of the vectors vanishes and there is no solution, the weights of
        that combination, times (Σ_k w_k)^{1/(1+p)}, so that they go with w as a solution would. The same where the
        solution has numbers too large for float64, which takes a combination that nearly vanishes.
    """
    shortest = exact.solve(unit, np.ones(len(w)))
    if shortest @ unit @ shortest > STATIONARY**2:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            beta = solution(unit, w, p, shortest)
        if np.isfinite(beta).all():
            return beta
    return np.asarray(shortest * w.sum() ** (1.0 / (1.0 + p)))


def solution(unit: Array, w: Array, p: float, feasible: Array) -> Array:
    """Solve M̂β = w β^−p as ``fair_weights`` does, given some β with M̂β > 0, near which p < 1 starts to look."""
    start = w ** (1.0 / (1.0 + p))  # the answer for orthogonal vectors
    if p < 1.0:
        q = 1.0 / p
        _, z = maximise(unit, unit, w**q, q, feasible)
        start = (w / z) ** q
    return maximise(unit, np.eye(len(w)), w, p, start)[0]


def maximise(n: Array, a: Array, v: Array, q: float, start: Array) -> tuple[Array, Array]:
    """Maximise the utility Σ_k v_k ψ_q((Ax)_k) − ½ xᵀNx over {x: Ax > 0}.

    Args:
        n: N, positive semidefinite, shape (K, K).
        a: A, shape (K, K).
        v: > 0, shape (K,).
        q: > 0; steps are few for q ≥ 1, or near the solution.
        start: x with Ax > 0, shape (K,).

    Returns:
        x and z = Ax > 0, shape (K,) each. Where rounding leaves no better point, the last one.
    """
    x, z, last = start, a @ start, math.inf
    if z.min() <= 0:
        z = np.where(z > 0, z, ROUNDING * z.max())
    for _ in range(STEPS):
        nx = n @ x
        if last > FAR:
            square = max(float(x @ nx), ROUNDING * len(x) * float(x @ x))
            ray = ((v @ z ** (1.0 - q)) / square) ** (1.0 / (1.0 + q))
            x, z, nx = ray * x, ray * z, ray * nx
        pull = v * z**-q
        dx = _newton_step(n + (a.T * (q * pull / z)) @ a, pull @ a - nx)
        dz = a @ dx
        relative = dz / z
        size = abs(relative).max()
        if CONVERGED < size < 1e-2 and size > last / 2:
            break  # so near a stationary point that rounding is all that is left
        if q * size > NEAR:
            step = _step_length(float(dx @ nx), float(dx @ n @ dx), relative, dz, pull, q)
            dx, dz = step * dx, step * dz
        x, z = x + dx, z + dz
        if size <= CONVERGED:
            break
        last = size
    return x, z


def _newton_step(hessian: Array, slope: Array) -> Array:
    """Solve for the step; none if the matrix is singular in spite of the ridge."""
    hessian.ravel()[:: len(slope) + 1] *= 1.0 + RIDGE
    try:
        return np.asarray(np.linalg.solve(hessian, slope), dtype=np.float64)
    except np.linalg.LinAlgError:
        return np.zeros_like(slope)


def _step_length(start: float, curvature: float, relative: Array, dz: Array, pull: Array, q: float) -> float:
    """Shorten Newton's step until z stays positive and the utility does not fall steeply at its end.

    The slope down along the step is, at t, start + t curvature − Σ_k v_k (z + t dz)_k^−q dz_k; ``relative`` is dz / z.
    """
    step = min(1.0, 0.9 / max(-float(relative.min()), 1e-300))
    allowed = 0.1 * (pull @ dz - start)  # a tenth of the slope up at the beginning
    while start + step * curvature - (pull * (1.0 + step * relative) ** -q) @ dz > allowed and step > 1e-10:
        step /= 2
    return step
