"""Noise-aware balancing against cvxpy: signals and noise drawn apart, so that N − U is the Gramian of the noise.

As elsewhere, each function of ``PAIRS`` returns the largest difference of λ, relative to the largest |λ|.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import cvxpy as cp
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import root

from gradbalance.balancers import NoiseAware

Array = NDArray[np.float64]

SIZES = (1, 2, 3, 5, 10, 16, 32)


def problems() -> Iterator[tuple[Array, Array]]:
    """Fixed draws of N and U: free, agreeing, conflicting and fewer signals than objectives, with shared noise.

    Norms differ by factors up to 30, and so do the noises; the signal's share of a norm is .03 to 1.
    """
    for size in SIZES:
        for seed in range(6):
            rng = np.random.default_rng([size, seed])
            signals = rng.standard_normal((size, 3 * size + 5))
            common = rng.standard_normal(3 * size + 5)
            noise = rng.standard_normal((size, 2 * size + 3)) + rng.standard_normal(2 * size + 3)
            noise *= 10.0 ** rng.uniform(-1, 1, (size, 1))
            few = signals[:, : max(1, size // 2)] @ signals[: max(1, size // 2)] + 2 * common
            for family in (signals, signals + common, signals - 0.8 * signals.mean(axis=0), few):
                units = 10.0 ** rng.uniform(-0.75, 0.75, (size, 1))
                scaled, noise_of = family * units, noise * units
                yield scaled @ scaled.T + noise_of @ noise_of.T, scaled @ scaled.T


def largest_difference(fairness: float) -> float:
    """Compare with the convex problem at this fairness."""
    worst = 0.0
    for n, u in problems():
        own = NoiseAware(fairness).coefficients(torch.from_numpy(n), signal=torch.from_numpy(u)).numpy()
        norms, signals = np.sqrt(n.diagonal()), np.sqrt(u.diagonal())
        step, progress = n / np.outer(norms, norms), u / np.outer(signals, norms)
        beta = _max_min(step, progress) if fairness == math.inf else _fairest(step, progress, fairness)
        beta /= math.sqrt(beta @ step @ beta)
        expected = norms.mean() * _mean(progress @ beta, fairness) * beta / norms
        worst = max(worst, float(abs(own - expected).max() / abs(own).max()))
    return worst


def _max_min(step: Array, progress: Array) -> Array:
    """State the quadratic program, then solve the equations of the constraints that hold with equality."""
    size = len(step)
    root_of = np.linalg.cholesky(step).T
    scale = np.sqrt(progress.diagonal().min())
    beta = cp.Variable(size)
    tight, positive = progress @ beta / scale >= 1, beta >= 0
    _solve(cp.Problem(cp.Minimize(cp.sum_squares(root_of @ beta)), [tight, positive]))
    held = tight.dual_value > 1e-6 * tight.dual_value.max()
    free = beta.value > 1e-6 * beta.value.max()
    a = progress[np.ix_(held, free)]
    system = np.block([[step[np.ix_(free, free)], -a.T], [a, np.zeros((len(a), len(a)))]])
    found = np.zeros(size)
    found[free] = np.linalg.solve(system, np.append(np.zeros(free.sum()), np.ones(len(a))))[: free.sum()]
    return found


def _fairest(step: Array, progress: Array, fairness: float) -> Array:
    """Maximise the utility; the last digits by scipy's root of the optimality condition."""
    beta = cp.Variable(len(step))
    gained = progress @ beta
    utility = cp.sum(cp.log(gained)) if fairness == 1 else cp.sum(cp.power(gained, 1 - fairness)) / (1 - fairness)
    _solve(cp.Problem(cp.Maximize(utility - cp.sum_squares(np.linalg.cholesky(step).T @ beta) / 2)))

    def slope(x: Array) -> Array:
        return np.asarray(step @ x - progress.T @ (progress @ x) ** -fairness)

    return np.asarray(root(slope, beta.value, tol=1e-14).x)


def _mean(gained: Array, fairness: float) -> float:
    if fairness == math.inf:
        return float(gained.min())
    if fairness <= 1:
        return math.exp(float(np.log(gained).mean()))
    return float((gained ** (1 - fairness)).mean() ** (1 / (1 - fairness)))


def _solve(problem: cp.Problem) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")  # than the tolerances asked for
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12, max_iter=200)


PAIRS: dict[tuple[str, str], Callable[[], float]] = {
    ("noise_aware", "cvxpy"): lambda: largest_difference(math.inf),
    ("noise_aware, α = 1", "cvxpy"): lambda: largest_difference(1.0),
    ("noise_aware, α = 1/2", "cvxpy"): lambda: largest_difference(0.5),
    ("noise_aware, α = 3", "cvxpy"): lambda: largest_difference(3.0),
}
"""(method, oracle) -> largest difference."""
