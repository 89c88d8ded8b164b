"""Framing: a subject that is clear of the frame and sits in the middle, a photographer's rule of thumb."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.rewards.objects import detect

_MARGIN = 1 / 6  # clear space that an object wants on each side, as a share of the side
_OFFSET = 1 / 4  # of the subject from the middle: as far as counts


class FramingReward:
    """Whether the subject is clear of the frame (three quarters of the score) and in the middle (one quarter).

    Clear: each object by its nearest side, 1 from a sixth of the picture's side, then the mean over objects. In the
    middle: the offset of the centre of mass from the picture's centre, 0 from a quarter of the side. It needs no
    prompt, and an empty picture scores 0. It pulls against whatever wants large marks.
    """

    name = "framing"

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Scores uint8 pictures (N, H, W, 3): float64 (N,) in [0, 1]; the prompts do not matter."""
        return np.array([_framing(image) for image in images], dtype=np.float64)


def _framing(image: np.ndarray) -> float:
    found = detect(image)
    if not found:
        return 0.0
    height, width = image.shape[:2]
    boxes = np.array([item.box for item in found]) / (width, height, width, height)
    nearest = np.minimum(boxes[:, :2], 1 - boxes[:, 2:]).min(axis=1)
    clear = np.clip(nearest / _MARGIN, 0, 1).mean()
    centre = np.average((boxes[:, :2] + boxes[:, 2:]) / 2, axis=0, weights=[item.area for item in found])
    middle = max(0.0, 1 - float(np.hypot(*(centre - 0.5))) / _OFFSET)
    return float(0.75 * clear + 0.25 * middle)
