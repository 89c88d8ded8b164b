"""Tidiness of a drawing on white: colour in whole marks, not in specks, ghosts or smudges."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from integrations.diffusion_nft.prompts import Prompt

_COLOURED = 0.06  # saturation from which a pixel is not white
_INK = 0.4  # saturation of about half ink, half white
_WHOLE = 0.03  # of the picture: a connected patch of ink from this size on is a mark, a smaller one a speck


class TidinessReward:
    """The share of the coloured pixels that belong to a whole mark or border on one; 0 if there is no mark.

    It needs no prompt. Specks, pale remains of another drawing and smudges away from the strokes cost; the half-tones
    of an anti-aliased edge do not.
    """

    name = "tidiness"

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Scores uint8 pictures (N, H, W, 3): float64 (N,) in [0, 1]; the prompts do not matter."""
        return np.array([_tidiness(image) for image in images], dtype=np.float64)


def _tidiness(image: np.ndarray) -> float:
    saturation = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)[..., 1] / 255
    ink = (saturation >= _INK).astype(np.uint8)
    _, labels, stats, _ = cv2.connectedComponentsWithStats(ink, connectivity=8)
    whole = stats[:, cv2.CC_STAT_AREA] >= _WHOLE * ink.size
    whole[0] = False  # the ground
    reach = cv2.dilate(whole[labels].astype(np.uint8), np.ones((3, 3), np.uint8)) > 0
    coloured = saturation >= _COLOURED
    return float((coloured & reach).sum() / max(coloured.sum(), 1))
