"""The methods that the benchmarks compare, each at its defaults where it has any."""

from __future__ import annotations

from collections.abc import Callable

from gradbalance import balancers
from gradbalance.balancers import Balancer

NEEDS_OPTIONS: dict[str, Callable[[int], Balancer]] = {
    "sequential": lambda k: balancers.get(
        "sequential", stages=[(1000, [float(i == j) for i in range(k)]) for j in range(k)]
    ),
    "grouped": lambda k: balancers.get(
        "grouped", balancer="marble", groups=[list(range(k))[i::2] for i in range(min(k, 2))]
    ),
}
"""K -> a balancer, for those that have no defaults."""


def make(name: str, objectives: int) -> Balancer:
    """Make the balancer of a name for K objectives."""
    return NEEDS_OPTIONS[name](objectives) if name in NEEDS_OPTIONS else balancers.get(name)
