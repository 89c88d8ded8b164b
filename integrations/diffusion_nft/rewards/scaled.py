"""A reward in other units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.rewards import Reward


class _Scaled:
    """A reward times a positive factor, under the same name."""

    def __init__(self, reward: Reward, factor: float) -> None:
        self.name = reward.name
        self._reward = reward
        self._factor = factor

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        return self._factor * np.asarray(self._reward(images, prompts), dtype=np.float64)


def scaled(reward: Reward, factor: float) -> Reward:
    """The reward multiplied by a factor; itself where that is 1."""
    return reward if factor == 1 else _Scaled(reward, factor)
