"""The methods of the trial, each with what it changes in the config."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

RATES = (0.0005, 0.001, 0.002)
"""Learning rates that every method is tried with."""

TRAINER, PUBLISHED, DISTILLED = "trainer", "published", "distilled"
PLAIN_SUM, TUNED_SUM = "weighted_sum", "tuned_sum"

Settings = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """One line of the trial's table.

    Attributes:
        about: What it does.
        settings: (number of rewards, steps) -> what it changes in the config.
        sees_units: Whether a reward's units change it; the others keep the learning rate they got without units.
        build: What trains it: `TRAINER`, `PUBLISHED` or `DISTILLED`; see `job`.
    """

    about: str
    settings: Callable[[int, int], Settings] = field(default=lambda count, steps: {})
    sees_units: bool = False
    build: str = TRAINER


def _config(**settings: Any) -> Callable[[int, int], Settings]:
    return lambda count, steps: settings


def _uniform(count: int, steps: int) -> Settings:
    return {"method": "marble", "balance": {"options": {"floor": 1 / count, "ceiling": 1 / count}}}


def _stages(count: int, steps: int) -> Settings:
    """As many steps on one reward after the other; no gradients of the others are measured."""
    each = max(1, steps // count)
    stages = [[each, [float(i == k) for i in range(count)]] for k in range(count)]
    return {"method": "sequential", "balance": {"options": {"stages": stages}, "refresh_every": steps}}


def _noise_aware(fairness: float) -> Callable[[int, int], Settings]:
    options = {"fairness": fairness, "stationary": "hold"}
    return _config(method="noise_aware", balance={"gramian_estimator": "split", "options": options})


METHODS: dict[str, Method] = {
    PLAIN_SUM: Method("one objective: the plain sum of the rewards", _config(method="weighted_sum"), sees_units=True),
    TUNED_SUM: Method(
        "the same with weights from a random search around the inverse spreads of the rewards",
        _config(method="weighted_sum"),
        sees_units=True,
    ),
    "gdpo": Method("one objective: each reward's advantages normalised, then summed", _config(method="gdpo")),
    "uniform": Method("the sum of the unit gradients", _uniform),
    "stages": Method("one reward after the other", _stages),
    DISTILLED: Method("the specialists' best pictures, learnt by flow matching (expert iteration)", build=DISTILLED),
    "published_marble": Method("MARBLE as its published code does it", build=PUBLISHED),
    "pcgrad": Method("PCGrad on the rewards' gradients", _config(method="pcgrad")),
    "mgda": Method("MGDA: the min-norm point of the rewards' gradients", _config(method="mgda")),
    "marble": Method("MARBLE as this library does it", _config(method="marble")),
    "marble_split": Method(
        "MARBLE on de-noised gradients: signal norms and cosines from a split Gramian",
        _config(method="marble", balance={"gramian_estimator": "split", "ema_decay": 0}),
    ),
    "noise_max_min": Method("noise-aware, largest least progress", _noise_aware(math.inf)),
    "noise_nash": Method("noise-aware, Nash's bargain", _noise_aware(1.0)),
}
_SPECIALIST = "specialist-"


def specialist(reward: str) -> str:
    """The name of the method that trains on one reward alone."""
    return _SPECIALIST + reward


def reward_of(method: str) -> str | None:
    """The reward of a specialist, None for other methods."""
    return method.removeprefix(_SPECIALIST) if method.startswith(_SPECIALIST) else None


def method_settings(method: str, rewards: Sequence[str], steps: int) -> Settings:
    """What a method or specialist changes in the config."""
    if reward_of(method) is not None:
        return {"method": "marble"}  # one objective: its gradient as it is
    return METHODS[method].settings(len(rewards), steps)
