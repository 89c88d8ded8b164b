"""A reward's gain as a share of what its specialist gains: 0 is the untrained model, 1 the specialist's end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST = 0.02  # a specialist that gains less than this is counted as gaining this much


@dataclass(frozen=True)
class Scale:
    """Start and specialist's gain of each reward."""

    start: dict[str, float]
    gain: dict[str, float]

    @classmethod
    def of(cls, specialists: Mapping[str, Sequence[dict[str, Any]]]) -> Scale:
        """From the results of each reward's specialist, over seeds; rewards without one are left out."""
        start, gain = {}, {}
        for name, runs in specialists.items():
            if runs:
                start[name] = float(runs[0]["curve"][0]["rewards"][name])
                end = float(np.mean([run["curve"][-1]["rewards"][name] for run in runs]))
                gain[name] = max(end - start[name], LEAST)
        return cls(start, gain)

    def of_point(self, rewards: Mapping[str, float]) -> dict[str, float]:
        """The scaled gain of every reward at one point of a run."""
        return {name: (rewards[name] - self.start[name]) / gain for name, gain in self.gain.items()}

    def worst(self, rewards: Mapping[str, float]) -> float:
        """The smallest scaled gain; NaN without specialists."""
        return min(self.of_point(rewards).values(), default=float("nan"))

    def area(self, curve: Sequence[dict[str, Any]]) -> float:
        """Mean over the run of the worst scaled gain, by the trapezoid rule between measured points."""
        steps = np.array([point["step"] for point in curve], dtype=float)
        worst = np.array([self.worst(point["rewards"]) for point in curve])
        return float(np.sum((worst[1:] + worst[:-1]) / 2 * np.diff(steps)) / (steps[-1] - steps[0]))
