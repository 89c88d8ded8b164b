"""The regimes of the trial: what is asked of a method. They were fixed before any result was seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

REGIMES = {
    "benign": "the rewards as they are: all in [0, 1], half of the prompts with text, half with shapes",
    "units": "the same rewards in other units: reward k times 10^u_k, u from -2 to 2 in the config's order",
    "specialist": "one prompt in ten has text: ocr is defined on a tenth of the pictures, and framing is easy to drive",
}
SHARES = [9, 1]  # of the tiny prompts with shapes and with text


def settings(regime: str, rewards: Sequence[str], trained: Sequence[str]) -> dict[str, Any]:
    """What a regime changes in the config.

    Args:
        regime: One of `REGIMES`.
        rewards: All rewards of the trial: their order decides their units.
        trained: Those that this run trains on.
    """
    if regime == "units":
        factors = dict(zip(rewards, (10.0 ** np.linspace(-2, 2, len(rewards))).tolist(), strict=True))
        return {"reward_scale": {name: factors[name] for name in trained}}
    return {"prompts": {"shares": SHARES}} if regime == "specialist" else {}
