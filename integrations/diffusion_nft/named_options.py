"""Balancer options by reward name, `{preference: {ocr: 2}}`, as the balancers take them: one value per objective.

With groups the objectives of the balancer are the groups, and a group has the value of any of its members.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradbalance import balancers
from gradbalance.solvers import LinearConstraint
from integrations.diffusion_nft.config import UserError, check_rewards


def all_groups(groups: Sequence[Sequence[str]], rewards: Sequence[str]) -> list[list[str]]:
    """The groups of a config and, each a group of its own, the rewards that are in none.

    Raises:
        UserError: A name is unknown or in two groups.
    """
    named = [name for group in groups for name in group]
    check_rewards("reward_groups", named, rewards)
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise UserError(f"reward_groups names {twice[0]!r} more than once")
    return [*map(list, groups), *([name] for name in rewards if name not in named)]


def resolve(method: str, options: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Options with `preference`, `floor` and `ceiling` by name replaced; others stay as they are.

    A reward that is not named has a preference of 1, and no floor or ceiling of its own.

    Args:
        method: The balancer's name.
        options: Its options as the config has them.
        groups: The names of the rewards of each of its objectives.

    Raises:
        UserError: A name is unknown, two members of a group differ, or the method has no bounds for single weights.
    """
    named = {key: options[key] for key in ("preference", "floor", "ceiling") if isinstance(options.get(key), Mapping)}
    resolved = {key: value for key, value in options.items() if key not in named}
    values = {key: _by_group(f"balance.options.{key}", given, groups) for key, given in named.items()}
    if "preference" in values:
        resolved["preference"] = [1.0 if value is None else value for value in values.pop("preference")]
    if values:
        if "constraints" not in inspect.signature(type(balancers.get(method))).parameters:
            raise UserError(f"balance.options.{next(iter(values))} by name needs method=marble, not {method}")
        lower = [-np.inf if v is None else v for v in values.get("floor", [None] * len(groups))]
        upper = [np.inf if v is None else v for v in values.get("ceiling", [None] * len(groups))]
        resolved["constraints"] = LinearConstraint(np.eye(len(groups)), lower, upper)
    return resolved


def _by_group(key: str, given: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> list[Any]:
    """The value of each group, None where no member has one."""
    check_rewards(key, given, [name for group in groups for name in group])
    found = []
    for group in groups:
        values = [given[name] for name in group if name in given]
        if any(value != values[0] for value in values):
            raise UserError(f"{key}: {', '.join(group)} are one group and can have one value only, got {values}")
        found.append(values[0] if values else None)
    return found
