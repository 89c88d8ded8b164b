"""What each method makes of many quadratics at its best settings, which are chosen on other draws than it is judged on.

Every method takes steps x ← x − η_t d_t / r_t, where r_t² is a moving average of ‖d_t‖²: Adam's scale with one number
for all parameters, so that η has one meaning for all methods and the direction is the method's own. η_t falls linearly
to 0. η = 0, not to train at all, is among the settings. Losses are given to the methods without noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.methods import make
from benchmarks.quadratics import Cell, draw
from gradbalance.balancers import CRMOGM, Balancer, NoiseAware, WeightedSum
from gradbalance.estimators import SplitGramian

LEARNING_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
LENGTH_DECAY = 0.95

WEIGHTS = ((0.0, 1.0), (1.0, 1.0), (1.0, 2.0), (1.0, 4.0), (1.0, 8.0))

Factory = Callable[[list[float]], Balancer]
"""Makes a fresh balancer, given the lengths of the K gradients at the start."""


@dataclass(frozen=True)
class Entrant:
    """A method as it enters.

    Attributes:
        variants: ways to make it; the best in each cell is chosen along with the learning rate.
        split: whether the expected gradients' Gramian is estimated for it, from two halves of each step's samples.
    """

    variants: tuple[Factory, ...]
    split: bool = False

    def describe(self, objectives: int) -> list[str]:
        """The balancers and the estimator with all their options."""
        balancers = [repr(variant([1.0] * objectives)) for variant in self.variants]
        return [*balancers, repr(SplitGramian())] if self.split else balancers


def _named(name: str, split: bool = False) -> Entrant:
    return Entrant((lambda lengths: make(name, len(lengths)),), split)


def _weighted(power: float, odd: float) -> Factory:
    """Fixed weights: each objective over a power of its length at the start, the first one times a factor."""
    return lambda lengths: WeightedSum([(odd if k == 0 else 1.0) * length**-power for k, length in enumerate(lengths)])


METHODS = (
    "db_mtl",
    "marble",
    "mgda",
    "pcgrad",
    "ca_grad",
    "nash_mtl",
    "fair_grad",
    "upgrad",
    "config",
    "imtl_g",
    "aligned_mtl",
    "famo",
)
ENTRANTS: dict[str, Entrant] = {
    "weighted_sum": _named("weighted_sum"),
    "tuned_sum": Entrant(tuple(_weighted(power, odd) for power, odd in WEIGHTS)),
    **{name: _named(name) for name in METHODS},
    "marble_averaged": Entrant((lambda lengths: CRMOGM(make("marble", len(lengths))),)),
    "marble_split": _named("marble", split=True),
    "noise_aware": _named("noise_aware", split=True),
    "noise_aware_nash": Entrant((lambda lengths: NoiseAware(fairness=1.0),), split=True),
}
"""Averaged: the coefficients, over steps. Split: the Gramian without the noise takes the place of the step's own."""


@dataclass(frozen=True)
class Outcome:
    """What a method reached.

    Attributes:
        tuned: mean worst progress on the tuning seeds, one a cell.
        worst: worst progress at the end, shape (cells, seeds).
        learning_rates: those chosen, one a cell; 0 where none helped the worst objective.
    """

    tuned: Tensor
    worst: Tensor
    learning_rates: list[float]


def enter(
    entrant: Entrant, cells: Sequence[Cell], objectives: int, *, tuning: Sequence[int], seeds: Sequence[int], steps: int
) -> Outcome:
    """Choose variant and learning rate in each cell by the mean over the tuning seeds, then judge on the others."""
    settings = [(variant, lr) for variant in range(len(entrant.variants)) for lr in LEARNING_RATES]
    best, places = descend(entrant, cells, [settings] * len(cells), objectives, tuning, steps).mean(1).max(-1)
    chosen = [settings[place] if gain > 0 else (0, 0.0) for gain, place in zip(best.tolist(), places, strict=True)]
    judged = descend(entrant, cells, [[one] for one in chosen], objectives, seeds, steps)
    return Outcome(best.clamp(min=0.0), judged[..., 0], [lr for _, lr in chosen])


def descend(
    entrant: Entrant,
    cells: Sequence[Cell],
    settings: Sequence[Sequence[tuple[int, float]]],
    objectives: int,
    seeds: Sequence[int],
    steps: int,
) -> Tensor:
    """Follow a method from x = 0.

    Args:
        entrant: the method.
        cells: kinds of problems, each drawn once a seed.
        settings: for each cell the runs, all of the same number: variant and learning rate.
        objectives: K.
        seeds: of the problems and their noise.
        steps: of each run.

    Returns:
        Worst progress at the end, shape (cells, seeds, runs).
    """
    problems = draw(cells, seeds, objectives)
    rows = list(zip(problems.lengths.tolist(), (of_cell for of_cell in settings for _ in seeds), strict=True))
    runs = [[_Run(entrant, entrant.variants[variant](lengths)) for variant, _ in row] for lengths, row in rows]
    lr = torch.tensor([[lr for _, lr in row] for _, row in rows], dtype=torch.float64)
    x = torch.zeros(*lr.shape, problems.minima.shape[-1], dtype=torch.float64)
    square = torch.zeros_like(lr)
    for step in range(steps):
        noise, difference = problems.draw_noise()
        gradients = problems.gradients(x, noise)
        parts = gradients
        if entrant.split:
            parts = torch.cat([gradients + difference[:, None], gradients - difference[:, None]], -2) / 2
        coefficients = [
            torch.stack([run.coefficients(*measured) for run, *measured in zip(*row, strict=True)])
            for row in zip(runs, parts @ parts.mT, problems.losses(x), strict=True)
        ]
        update = (torch.stack(coefficients)[..., None, :] @ gradients).squeeze(-2)
        square = LENGTH_DECAY * square + (1 - LENGTH_DECAY) * update.square().sum(-1)
        length = (square / (1 - LENGTH_DECAY ** (step + 1))).sqrt()
        x -= (lr * (1 - step / steps) / torch.where(length > 0, length, 1.0))[..., None] * update
    return problems.worst_progress(x).reshape(len(cells), len(seeds), -1)


class _Run:
    """A balancer and its estimator, put together as ``BalancedOptimizer`` does."""

    def __init__(self, entrant: Entrant, balancer: Balancer) -> None:
        self.balancer = balancer
        self.estimator = SplitGramian() if entrant.split else None

    def coefficients(self, gramian: Tensor, losses: Tensor) -> Tensor:
        """Return λ, given the Gramian of the gradients, or of their two halves, and the losses."""
        if self.estimator is None:
            return self.balancer.coefficients(gramian, losses)
        estimate = self.estimator.estimate(gramian.numpy(), np.ones((2, len(losses))))
        n, u = torch.from_numpy(estimate.gramian), torch.from_numpy(estimate.signal)
        return self.balancer.coefficients(n if self.balancer.uses_signal else u, losses, u)
