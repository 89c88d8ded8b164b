"""Averages over steps: the part that estimators from cross products have in common.

One step's cross products are unbiased and very noisy; their average over T steps has 1/√T of that noise, as long as the
parameters move slowly. Each pair of objectives has an average of its own, since not all are in every step.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gradbalance.balancers.checks import Array, number, sized
from gradbalance.estimators.base import Estimate, GramianEstimator
from gradbalance.estimators.correlation import floored, with_norms
from gradbalance.solvers.checks import active_rows


def moved(average: Array, value: Array, part: Array) -> Array:
    """Return averages in which the newest values have the given part; exact where it is 0 or 1, or nothing changed."""
    step = value - average
    return np.where(part < 0.5, average + part * step, value - (1.0 - part) * step)


def gained(mass: Array, amount: Array, decay: float) -> tuple[Array, Array]:
    """Weigh new values against a moving average with no bias to where it began.

    With x̄ = Σ_i ρ^i w_i x_i / Σ_i ρ^i w_i over the values so far, i counting from the newest, the mass is the
    denominator.

    Args:
        mass: of the average so far; 0 if there is none.
        amount: w ≥ 0 of the new value; with 0 nothing decays either.
        decay: ρ.

    Returns:
        The mass with the new values, and the part that these have in the average.
    """
    heavier = np.where(amount > 0, decay * mass + amount, mass)
    return heavier, amount / np.where(heavier > 0, heavier, 1.0)


class Averaged(GramianEstimator):
    """Averages of the step's Gramian and of its cross products, for N and U.

    Both are averaged with the same weights, so that U_kk / N_kk compares like with like: a step counts for a pair as
    much as it tells about the pair's signal. An average has no bias to its beginning (Adam's correction, for unequal
    weights). Where a step tells nothing about a pair, the pair's averages stay. Where no step has done so yet, this
    step's own inner product stands for both.

    Steps may have measured different shares of their micro-batches, and so seen noise 1 / share times that of a whole
    step. What N is above U is noise: it is divided by the average of 1 / share.

    Then U_kk is kept between ``min_signal`` · N_kk and N_kk, and correlations that cannot exist are replaced by close
    ones that can, see :func:`~gradbalance.solvers.semidefinite.correlations`; the same is done for N, whose
    pairs may have seen different steps. Only these two steps bias U.

    Args:
        ema_decay: ρ in [0, 1) of the averages; 0 keeps nothing, and the newest step is all there is.
        min_signal: least U_kk / N_kk, in (0, 1].
    """

    STATE: ClassVar[tuple[str, ...]] = ("noisy", "signal", "excess", "mass")

    def __init__(self, ema_decay: float, min_signal: float) -> None:
        self.ema_decay = number("ema_decay", ema_decay, "[0, 1)")
        self.min_signal = number("min_signal", min_signal, "(0, 1]")
        self.noisy: list[float] = []
        """Averages of the step's inner products, row after row."""
        self.signal: list[float] = []
        """Averages of the unbiased cross products."""
        self.excess: list[float] = []
        """Averages of 1 / share: how often the noise of a whole step is in ``noisy``."""
        self.mass: list[float] = []
        """Weights behind the averages; 0 where there is none."""

    def _averaged(self, measured: Array, cross: Array, amount: Array, share: float = 1.0) -> Estimate:
        """Take one step's products in.

        Args:
            measured: the Gramian of the step's gradients, shape (K, K).
            cross: cross products, whose expectation is amount · U.
            amount: how much of U they hold, in [0, 1] for each pair, symmetric; 0 where they tell nothing.
            share: 1 / share times the noise of a whole step is in them.
        """
        size = len(measured)
        active = active_rows(np.sqrt(measured.diagonal().clip(min=0.0)))
        amount = np.where(active[:, None] & active, amount, 0.0)
        mass, part = gained(_matrix("mass", self.mass, size), amount, self.ema_decay)
        fresh = cross / np.where(amount > 0, amount, 1.0)
        noisy = moved(_matrix("noisy", self.noisy, size), measured, part)
        signal = moved(_matrix("signal", self.signal, size), (fresh + fresh.T) / 2, part)
        excess = moved(_matrix("excess", self.excess, size), np.full((size, size), 1.0 / share), part)
        averages = (noisy, signal, excess, mass)
        self.noisy, self.signal, self.excess, self.mass = (list(map(float, m.ravel())) for m in averages)
        known = mass > 0
        n, u = np.where(known, noisy, measured), np.where(known, signal, measured)
        noise = n - u
        np.fill_diagonal(noise, noise.diagonal().clip(min=0.0, max=n.diagonal()))
        n = n + (1.0 / np.where(known, excess, 1.0) - 1.0) * noise
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = np.where(known.diagonal(), np.sqrt(u.diagonal().clip(min=0.0) / n.diagonal()), np.nan)
        valid_n, valid_u = np.zeros((2, size, size))
        if active.any():
            rows = active.nonzero()[0]
            pairs = rows[:, None], rows
            squares = n[pairs].diagonal()
            valid_n[pairs] = with_norms(n[pairs], squares)
            valid_u[pairs] = with_norms(u[pairs], floored(u[pairs].diagonal(), squares, self.min_signal))
        return Estimate(valid_n, valid_u, ratios)


def _matrix(name: str, values: list[float], size: int) -> NDArray[np.float64]:
    return sized(name, values, size * size).reshape(size, size) if values else np.zeros((size, size))
