"""Noise-aware balancing: the fairest expected progress per unit of a step that is part signal and part noise."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, array, choice, normalised, number, signal_values, sized
from gradbalance.solvers import exact, max_min
from gradbalance.solvers.checks import active_rows
from gradbalance.solvers.semidefinite import correlations, positive_part
from gradbalance.solvers.utility import ROUNDING, STATIONARY, maximise, solution

UNSEEN = 1e-7
"""A signal of at most this share of its gradient's norm is none: U_kk ≤ 1e-14 N_kk is rounding."""

NOISELESS = 1e-14
"""N − U with entries up to this, relative to the norms √N_kk, is 0."""

OWN_SHARE = 0.1
"""If the sum of the unit gradients gives everyone this share of what its own gives, it will do to start from."""

MODERATE = 1e3
"""If no unit signal has a larger coefficient where all make progress 1, such a point is no matter of rounding."""


class NoiseAware(Balancer):
    """Share the expected progress fairly, and count noise as what a step costs.

    A gradient g_k = s_k + ε_k is a signal and noise of mean 0. N = E[⟨g_k, g_l⟩] is the ``gramian`` of the gradients as
    they are, U_kl = ⟨s_k, s_l⟩ is the ``signal``. The step d = Σ_k λ_k g_k is expected to gain objective k

        p_k(λ) = (Uλ)_k / √U_kk        in units of its own signal, and has mean square length λᵀNλ:

    noise costs length and gains nothing. λ̂ is the one of length λ̂ᵀNλ̂ = 1 with the fairest progresses,

    - ``fairness=∞``: the largest min_k p_k(λ), over λ ≥ 0 (a quadratic program);
    - ``fairness=1``: the largest Σ_k log p_k(λ), Nash's bargain;
    - ``fairness=a``: the largest Σ_k p_k(λ)^{1−a} / (1−a),

    and the step is as long as what it is expected to gain: λ = n̄ mean_a(p(λ̂)) λ̂, with n̄ the mean of the √N_kk of the
    objectives that have a gradient, and mean_a the least for ∞, the geometric mean for a ≤ 1, else the mean of order
    1−a. So it is never longer than n̄, and vanishes as the last direction that serves all signals does.

    A finite ``fairness`` does not bind the sign of λ: a negative coefficient takes away noise that objectives share.

    Without noise (U = N, also where ``signal`` is None) ``fairness=∞`` is :class:`~gradbalance.balancers.Marble`, to
    the same λ, and ``fairness=1`` has the direction of :class:`~gradbalance.balancers.NashMTL`. Multiplying a loss by a
    positive number does not change the direction, multiplying all by one does not change λ. Every objective's
    *expected* gain is positive; with the gradients of the batch, noise included, the step may be in conflict. The
    derivation is in ``docs/noise_aware.md``.

    No direction serves all signals where a convex combination of them vanishes (the shortest of the unit signals' is
    below 1e-7): ``stationary`` says what then. An objective without gradient, or of no positive signal U_kk, leaves the
    problem with λ_k = 0.

    Estimates may contradict themselves. Where the correlations U_kl / √(U_kk U_ll) are not those of any vectors (raw
    averages of cross products often are not), their negative eigenvalues are put to 0; where N − U, the Gramian of the
    noise, is not one, its negative part is, relative to the norms √N_kk, and N becomes U plus the rest: no step gains
    more than its length.

    Args:
        fairness: a in [0.5, 10], or ``math.inf``. The larger, the more the objective with the least progress counts;
            below ½ one without any would hardly count at all.
        preference: w_k > 0, the progress wanted for each objective relative to the others, shape (K,); only ratios
            matter (they are normalised to mean 1). p_k / w_k takes the place of p_k, and counts w_k times in sums and
            means (at ``fairness=1`` the division changes nothing: w_k are bargaining powers). None: all equal.
        stationary: "stop": λ = 0. "hold": the last weights, relative to the gradients' norms, stay.

    References:
        Derived for this library; without noise: MARBLE, arXiv 2605.06507; A. Navon et al., ICML 2022, arXiv 2202.01017.
        J. Mo, J. Walrand. Fair end-to-end window-based congestion control. IEEE/ACM Transactions on Networking 8, 2000
        (α-fair utilities).
    """

    uses_signal = True
    STATE: ClassVar[tuple[str, ...]] = ("last",)

    def __init__(
        self,
        fairness: float = math.inf,
        preference: Sequence[float] | Tensor | None = None,
        stationary: str = "stop",
    ) -> None:
        self.fairness = _fairness(fairness)
        self.preference = None if preference is None else normalised("preference", preference)
        self.stationary: str = choice("stationary", stationary, ("stop", "hold"))
        self.last: list[float] = []

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ_k √N_kk / n̄; 0 for objectives without gradient or signal.

        Raises:
            TypeError: ``signal`` is not a tensor of real numbers.
            ValueError: it has another shape than ``gramian``, or an entry that is not finite.
        """
        n = array(gramian)
        size = len(n)
        u = n if signal is None else signal_values(signal, size)
        wanted = np.ones(size) if self.preference is None else sized("preference", self.preference, size)
        norms, signals = np.sqrt(n.diagonal()), np.sqrt(np.maximum(u.diagonal(), 0.0))
        rows = (active_rows(norms) & (signals > UNSEEN * norms)).nonzero()[0]
        found = np.zeros(size)
        if len(rows) > 0:
            solved = self._solve(_problem(n, u, norms, signals, rows), wanted[rows])
            if self.stationary == "hold":
                solved = self._kept(solved, rows, size)
            if solved is not None:
                found[rows] = solved
        return torch.from_numpy(found)

    def scale(self, weights: Tensor, gramian: Tensor) -> Tensor:
        """Return λ_k = n̄ weight_k / √N_kk, 0 for objectives without gradient; n̄ is the mean over the others."""
        norms = np.sqrt(array(gramian).diagonal())
        active = active_rows(norms)
        mean = norms[active].sum() / max(np.count_nonzero(active), 1)
        return torch.from_numpy(mean * array(weights) / np.where(active, norms, np.inf))

    def __repr__(self) -> str:
        return super().__repr__().replace("fairness=inf", "fairness=float('inf')")  # an expression

    def _solve(self, problem: "_Problem", wanted: Array) -> Array | None:
        """Return the weights; None if no direction serves all signals."""
        step, progress, _, noisy = problem
        if self.fairness < math.inf:
            beta = self._fairest(problem, wanted)
        elif noisy:
            beta = max_min.pivot(step, progress, wanted)
            if beta is None:
                start = _shortest(problem, wanted)
                beta = None if start is None else max_min.descend(step, progress, wanted, start)
        else:
            return _shortest(problem, wanted)  # of the length that it should have
        if beta is None:
            return None
        square = max(float(beta @ step @ beta), ROUNDING * len(beta) * float(beta @ beta))
        return beta * (self._mean(progress @ beta / wanted, wanted) / square)

    def _fairest(self, problem: "_Problem", wanted: Array) -> Array | None:
        """Maximise Σ_k w_k ψ_a(p_k / w_k) − ½ βᵀN̂β, ψ_a the antiderivative of x^−a."""
        step, progress, _, noisy = problem
        start = _serving(problem)
        if start is None:
            return None
        if noisy:
            return maximise(step, progress, wanted**self.fairness, self.fairness, start)[0]
        return solution(step, wanted, 1.0 / self.fairness, start)

    def _mean(self, progress: Array, wanted: Array) -> float:
        """Return mean_a of the progress p / w, 0 if some objective has none."""
        least = float(progress.min())
        if least <= 0 or self.fairness == math.inf:
            return max(least, 0.0)
        weights, relative = wanted / wanted.sum(), progress / least
        if self.fairness <= 1:
            return least * math.exp(float(weights @ np.log(relative)))
        order = 1.0 - self.fairness
        return float(least * (weights @ relative**order) ** (1.0 / order))

    def _kept(self, solved: Array | None, rows: NDArray[np.intp], size: int) -> Array:
        """Remember the weights of these objectives, or recall them if there are none."""
        last = np.array(self.last) if len(self.last) == size else np.zeros(size)
        if solved is not None:
            last[rows] = solved
            self.last = last.tolist()
        return last[rows]


class _Problem(NamedTuple):
    """What is left once each gradient has norm 1: λ_k = β_k / √N_kk."""

    step: Array  # N̂: the step has mean square length βᵀN̂β
    progress: Array  # A = ÛR: its expected progress is Aβ
    share: Array  # R: the signals' norms, relative to the gradients'
    noisy: bool  # whether N̂ is more than U


def _problem(n: Array, u: Array, norms: Array, signals: Array, rows: NDArray[np.intp]) -> _Problem:
    """Take some objectives, scale to unit norms and make the two matrices what they stand for."""
    noiseless = u is n
    if len(rows) < len(n):
        part = rows[:, None], rows
        n, u, norms, signals = n[part], u[part], norms[rows], signals[rows]
    step = n / (norms[:, None] * norms)
    if noiseless:
        return _Problem(step, step, np.ones(len(n)), noisy=False)
    share = signals / norms
    progress = correlations(u / (signals[:, None] * signals)) * share
    expected = share[:, None] * progress
    noise = step - expected
    if abs(noise).max() <= NOISELESS:
        return _Problem(step, step, share, noisy=False)
    return _Problem(expected + positive_part(noise), progress, share, noisy=True)


def _serving(problem: _Problem) -> Array | None:
    """Return some β with Aβ > 0, of any sign; None if there is none."""
    _, progress, share, _ = problem
    every = np.ones(len(share))
    if (progress.sum(axis=1) >= OWN_SHARE * progress.diagonal()).all():
        return every
    try:
        equal = np.asarray(np.linalg.solve(progress, every), dtype=np.float64)
        if abs(equal * share).max() <= MODERATE:
            return np.asarray(equal, dtype=np.float64)
    except np.linalg.LinAlgError:
        pass
    return _shortest(problem, every)


def _shortest(problem: _Problem, wanted: Array) -> Array | None:
    """Return β of the shortest vector Σ_k α_k ŝ_k / w_k of the simplex, ŝ_k the unit signals; None if it vanishes.

    In units of signals that is μ = α / w with Ûμ ∝ w where μ > 0, and more elsewhere.
    """
    largest, unit = wanted.max(), problem.progress / problem.share
    mu = exact.solve(unit, wanted / largest)
    if mu @ unit @ mu <= (STATIONARY * mu.sum()) ** 2:
        return None
    return np.asarray(mu / (largest * problem.share))


def _fairness(value: Any) -> float:
    if isinstance(value, float) and value == math.inf:
        return value
    try:
        return number("fairness", value, "[0.5, 10]")
    except ValueError as error:
        raise ValueError(f"fairness must be a number in [0.5, 10] or math.inf, got {value!r}") from error
