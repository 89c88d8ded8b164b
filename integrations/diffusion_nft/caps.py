"""Rewards that are good enough: beyond its cap a reward leaves the balance, and comes back if it falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MEMORY = 0.8  # decay of the moving mean over rollouts: about five of them
HYSTERESIS = 0.02  # of |cap|: a satisfied reward comes back when it has fallen so far below


@dataclass(frozen=True)
class Caps:
    """The caps and where the rewards stand. Nothing changes in place: `after` is the state one rollout later.

    Attributes:
        limits: The cap of each reward that has one.
        means: Moving mean of each over rollouts; one that has not been seen yet is missing.
        satisfied: The rewards that are beyond their cap.
    """

    limits: Mapping[str, float]
    means: Mapping[str, float] = field(default_factory=dict)
    satisfied: frozenset[str] = frozenset()

    def after(self, rollout: Mapping[str, float]) -> Caps:
        """The state after a rollout.

        Args:
            rollout: Its mean reward by name, NaN where the reward applied to no picture.
        """
        means, satisfied = dict(self.means), set()
        for name, cap in self.limits.items():
            if not math.isnan(rollout[name]):
                before = means.get(name, rollout[name])
                means[name] = MEMORY * before + (1 - MEMORY) * rollout[name]
            slack = HYSTERESIS * abs(cap) if name in self.satisfied else 0.0
            if means.get(name, -math.inf) >= cap - slack:
                satisfied.add(name)
        return replace(self, means=means, satisfied=frozenset(satisfied))

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs, for JSON."""
        return {"means": dict(self.means), "satisfied": sorted(self.satisfied)}

    def loaded(self, state: Mapping[str, Any]) -> Caps:
        """These caps with the state that `state_dict` returned."""
        return replace(self, means=dict(state["means"]), satisfied=frozenset(state["satisfied"]))
