"""Which runs a trial takes, in stages: each stage's runs depend on what earlier stages found.

1. Learning rates of the specialists, each tuned on its own reward.
2. Learning rates of the methods, each tuned by what the table judges it by: the worst scaled improvement.
3. Weights of the tuned sum: a random search, at the plain sum's learning rate.
4. The specialists on every seed: they say what each reward can gain.
5. The methods on every seed.

Stages 1 to 3 use a seed of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.trial.methods import METHODS, PLAIN_SUM, RATES, TUNED_SUM, reward_of, specialist
from benchmarks.trial.scaling import Scale
from benchmarks.trial.store import Job, Result, Store

TUNING_SEED = 1000
DRAWS = 8  # of weights for the tuned sum
_DECADES = 0.5  # each weight is drawn within a factor 10^±0.5 of the inverse spread


@dataclass(frozen=True)
class Plan:
    """What was asked for.

    Attributes:
        store: Holds what has been found so far.
        rewards: Names of all rewards, in the config's order.
        regimes: Regimes to run.
        methods: Methods to run.
        seeds: How many seeds, from 0.
    """

    store: Store
    rewards: Sequence[str]
    regimes: Sequence[str]
    methods: Sequence[str]
    seeds: int

    def stages(self) -> Iterator[tuple[str, list[Job]]]:
        """Title and runs of each stage, by what the store has when the stage is asked for."""
        grounds = list(dict.fromkeys(self.ground(regime) for regime in self.regimes))
        experts = [specialist(reward) for reward in self.rewards]
        yield "learning rates of the specialists", [j for g in grounds for m in experts for j in self._rates(g, m)]
        tuned = dict.fromkeys(self._tuned_in(regime, m) for regime in self.regimes for m in self.methods)
        yield "learning rates of the methods", [job for regime, m in tuned for job in self._rates(regime, m)]
        searched = self.regimes if TUNED_SUM in self.methods else []
        yield "weights of the tuned sum", [job for regime in searched for job in self._draws(regime)]
        seeds = range(self.seeds)
        yield "specialists", [self.job(g, m, seed) for seed in seeds for g in grounds for m in experts]
        yield "methods", [self.job(r, m, seed) for seed in seeds for r in self.regimes for m in self.methods]

    @staticmethod
    def ground(regime: str) -> str:
        """The regime whose specialists serve a regime: the units of a single reward change nothing."""
        return "benign" if regime == "units" else regime

    def job(self, regime: str, method: str, seed: int) -> Job:
        """A run with what tuning has chosen so far."""
        draw = self._best(self._draws(regime)).draw if method == TUNED_SUM else None
        return Job(regime, method, seed, self.rate(regime, method), draw)

    def rate(self, regime: str, method: str) -> float:
        """The learning rate that tuning has chosen: the middle one while there is no result."""
        return self._best(self._rates(*self._tuned_in(regime, method))).lr

    def experts(self, job: Job) -> dict[str, Path]:
        """The files of the specialists of a run's regime and seed, by reward."""
        ground = self.ground(job.regime)
        return {name: self.store.adapters(self.job(ground, specialist(name), job.seed)) for name in self.rewards}

    def weights(self, job: Job) -> list[float] | None:
        """The weights of a draw: inverse spreads of the rewards, from the second draw on each times 10^u, u uniform.

        The spread is that of a rollout of the untrained model.
        """
        if job.draw is None:
            return None
        spreads = next(
            (found["spreads"] for j in self._rates(job.regime, PLAIN_SUM) if (found := self.store.done(j))), None
        )
        inverse = np.array([1 / s if s else 1.0 for s in spreads]) if spreads else np.ones(len(self.rewards))
        powers = np.random.default_rng([TUNING_SEED, job.draw]).uniform(-_DECADES, _DECADES, len(self.rewards))
        return [float(weight) for weight in inverse * 10.0 ** (powers if job.draw else 0 * powers)]

    def _tuned_in(self, regime: str, method: str) -> tuple[str, str]:
        """The regime and method whose learning rate is taken."""
        method = PLAIN_SUM if method == TUNED_SUM else method
        sees_units = reward_of(method) is None and METHODS[method].sees_units
        return (regime if sees_units else self.ground(regime)), method

    def _rates(self, regime: str, method: str) -> list[Job]:
        return [Job(regime, method, TUNING_SEED, lr) for lr in RATES]

    def _draws(self, regime: str) -> list[Job]:
        lr = self.rate(regime, PLAIN_SUM)
        return [Job(regime, TUNED_SUM, TUNING_SEED, lr, draw) for draw in range(DRAWS)]

    def _best(self, jobs: list[Job]) -> Job:
        """The tuning run with the best score; without any result the one in the middle."""
        scores = {job: self._score(job, result) for job in jobs if (result := self.store.done(job))}
        return max(scores, key=scores.__getitem__) if scores else jobs[len(jobs) // 2]

    def _score(self, job: Job, result: Result) -> float:
        reward = reward_of(job.method)
        if reward is not None:
            return float(result["curve"][-1]["rewards"][reward])
        return self._tuning_scale(self.ground(job.regime)).worst(result["curve"][-1]["rewards"])

    def _tuning_scale(self, ground: str) -> Scale:
        chosen = [self.store.done(self._best(self._rates(ground, specialist(reward)))) for reward in self.rewards]
        return Scale.of({name: [run] for name, run in zip(self.rewards, chosen, strict=True) if run})
