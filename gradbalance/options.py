"""What a balanced optimizer is made with: each option checked, with an error that names it and the value."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any

from gradbalance import balancers, estimators
from gradbalance.balancers import Balancer
from gradbalance.estimators import GramianEstimator
from gradbalance.micro_batches import AUTO


def balancer(given: Balancer | str) -> Balancer:
    """The balancer itself, made if it is given by name."""
    found = balancers.get(given) if isinstance(given, str) else given
    if not isinstance(found, Balancer):
        raise TypeError(f"balancer must be a Balancer or the name of one, got {type(given).__name__}")
    return found


def gramian_estimator(given: GramianEstimator | str) -> GramianEstimator:
    """The estimator itself, made if it is given by name."""
    found = estimators.get(given) if isinstance(given, str) else given
    if not isinstance(found, GramianEstimator):
        raise TypeError(f"gramian_estimator must be a GramianEstimator or the name of one, got {type(given).__name__}")
    return found


def objective_names(given: Sequence[Any] | None) -> list[str] | None:
    """The names as strings; None if there are none."""
    if given is None:
        return None
    if not isinstance(given, Sequence) or not all(isinstance(name, Hashable) for name in given):
        raise TypeError(f'objective_names must be a list of names such as ["a", "b"], got {given!r}')
    if isinstance(given, str) or not given or len(set(given)) != len(given):
        raise ValueError(f'objective_names must be distinct names such as ["a", "b"], got {given!r}')
    return [str(name) for name in given]


def check_decay(ema_decay: Any) -> None:
    """Raise ValueError if it is no number in [0, 1)."""
    if isinstance(ema_decay, bool) or not isinstance(ema_decay, float | int) or not 0.0 <= ema_decay < 1.0:
        raise ValueError(f"ema_decay must be a number in [0, 1), got {ema_decay!r}")


def check_count(name: str, value: Any, *, least: int = 1, optional: bool = False) -> None:
    """Raise ValueError if it is no integer of at least ``least``, nor None where that is allowed."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}{' or None' * optional}, got {value!r}")


def check_micro_batches(given: Any, estimator: GramianEstimator) -> None:
    """Raise ValueError if it is no number of micro-batches and no way to choose one, or too few for the estimator."""
    least = estimator.least_micro_batches
    if given == AUTO and least < 2:
        raise ValueError(
            f'refresh_micro_batches="auto" chooses by comparing micro-batches, which {type(estimator).__name__} does '
            'not do; use gramian_estimator="split" or a SplitGramian, or give an integer'
        )
    if given is None or given == AUTO:
        return
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f'refresh_micro_batches must be an integer of at least 1, "auto" or None, got {given!r}')
    if given < least:
        raise ValueError(
            f"refresh_micro_batches must be at least {least} for {type(estimator).__name__}, which compares "
            f"micro-batches, got {given}"
        )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError if it is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(json.dumps, choices))}, got {value!r}")
