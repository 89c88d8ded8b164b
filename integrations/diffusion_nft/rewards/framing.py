"""Composition of a picture of something on white: prominence and framing, two rules of thumb that pull apart.

A large subject is prominent but comes near the frame; a small one keeps clear of it but is lost in the picture. A
subject of moderate size in the middle has both. Neither needs a prompt, and an empty picture scores 0 in both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.rewards.objects import Detection, detect

_PROMINENT = 0.4  # share of the picture that a prominent subject takes
_OVERFULL = 0.7  # beyond this share the subject crowds the picture
_MARGIN = 0.125  # clear space on each side, as a share of it


class _CompositionReward:
    name: str

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Scores uint8 pictures (N, H, W, 3): float64 (N,) in [0, 1]; the prompts do not matter."""
        found = [detect(image) for image in images]
        return np.array([self._score(items, images.shape[1:3]) if items else 0.0 for items in found])

    def _score(self, found: list[Detection], shape: tuple[int, ...]) -> float:
        raise NotImplementedError


class ProminenceReward(_CompositionReward):
    """How much of the picture the boxes of its objects take: 1 from 40 to 70 %, falling to 0 on either side."""

    name = "prominence"

    def _score(self, found: list[Detection], shape: tuple[int, ...]) -> float:
        boxes = sum((right - left) * (bottom - top) for left, top, right, bottom in (item.box for item in found))
        share = boxes / (shape[0] * shape[1])
        return float(np.clip(min(share / _PROMINENT, (1 - share) / (1 - _OVERFULL)), 0, 1))


class FramingReward(_CompositionReward):
    """Whether the objects keep an eighth of the side clear of the frame: each by its nearest side, then the mean."""

    name = "framing"

    def _score(self, found: list[Detection], shape: tuple[int, ...]) -> float:
        height, width = shape
        boxes = np.array([item.box for item in found]) / (width, height, width, height)
        nearest = np.minimum(boxes[:, :2], 1 - boxes[:, 2:]).min(axis=1)
        return float(np.clip(nearest / _MARGIN, 0, 1).mean())
