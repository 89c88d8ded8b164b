"""Rewards: functions of pictures and prompts, by name.

A reward maps N pictures to N numbers; NaN says that it does not apply to that prompt (no quoted text, no metadata), and
the trainer then leaves the picture out of everything that belongs to this reward.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from integrations.diffusion_nft.prompts import Prompt


class Reward(Protocol):
    """A named score of pictures under their prompts."""

    name: str

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Scores uint8 pictures (N, H, W, 3) under N prompts: float64 (N,), NaN where the reward does not apply."""
        ...


def _factories() -> dict[str, Callable[[], Reward]]:
    from integrations.diffusion_nft.rewards.framing import FramingReward
    from integrations.diffusion_nft.rewards.objects import ColourReward, CountReward
    from integrations.diffusion_nft.rewards.ocr import OcrReward
    from integrations.diffusion_nft.rewards.tidiness import TidinessReward

    classes: tuple[type[Reward], ...] = (OcrReward, CountReward, ColourReward, TidinessReward, FramingReward)
    return {reward.name: reward for reward in classes}


def build_rewards(names: Sequence[str]) -> dict[str, Reward]:
    """Builds rewards by name, in the order given.

    Raises:
        ValueError: A name is unknown (the nearest known ones are suggested) or given twice.
    """
    factories = _factories()
    for name in names:
        if name not in factories:
            near = difflib.get_close_matches(name, factories, n=3, cutoff=0.4) or sorted(factories)
            raise ValueError(f"unknown reward {name!r}; did you mean {', '.join(near)}?")
    if len(set(names)) != len(names):
        raise ValueError(f"rewards must be distinct, got {list(names)}")
    return {name: factories[name]() for name in names}
