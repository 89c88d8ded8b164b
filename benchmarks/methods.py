"""The methods that the benchmarks compare, at their defaults where they have any."""

from __future__ import annotations

from collections.abc import Callable

from gradbalance import balancers
from gradbalance.balancers import Balancer

WITH_OPTIONS: dict[str, Callable[[int], Balancer]] = {
    "sequential": lambda k: balancers.get(
        "sequential", stages=[(1000, [float(i == j) for i in range(k)]) for j in range(k)]
    ),
    "grouped": lambda k: balancers.get(
        "grouped", balancer="marble", groups=[list(range(k))[i::2] for i in range(min(k, 2))]
    ),
    "marble, ceiling": lambda k: balancers.get("marble", ceiling=min(1.0, 1.5 / k)),
    "noise_aware, nash": lambda k: balancers.get("noise_aware", fairness=1.0),
}
"""K -> a balancer, for those that have no defaults, and for two that take another solver than their defaults do."""

PICTURED = [name for name in balancers.available() if name not in ("common_part", "noise_aware")]
"""The balancers whose update is worth drawing: not those that are another one where nothing is shared and no noise."""


def make(name: str, objectives: int) -> Balancer:
    """Make the balancer of a name for K objectives."""
    return WITH_OPTIONS[name](objectives) if name in WITH_OPTIONS else balancers.get(name)
