"""Count and colour by image analysis, after GenEval's rules, for pictures of plain shapes or letters on white.

GenEval (Ghosh et al., 2023) detects objects, then asks per entry of ``include`` whether there are as many of the class
as requested and whether they have the colour requested. A network detects there; here saturated pixels on a white
ground do, which is exact for such pictures. Scores are graded, as reinforcement learning wants them, not yes or no.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from integrations.diffusion_nft.prompts import Prompt

_MIN_AREA = 0.01  # of the picture: smaller specks are no objects
_MIN_SATURATION = 0.4  # about half ink, half white
_HUES = {"red": 0, "orange": 30, "yellow": 55, "green": 125, "cyan": 180, "blue": 230, "purple": 285, "pink": 325}


@dataclass(frozen=True)
class Detection:
    """One connected patch of ink.

    Attributes:
        kind: ``circle``, ``square``, ``triangle``, or ``text`` for anything that is not one solid shape.
        colour: Name of the nearest hue.
        area: Pixels.
        box: Left, top, right, bottom in pixels; right and bottom are outside.
    """

    kind: str
    colour: str
    area: int
    box: tuple[int, int, int, int]


def detect(image: np.ndarray) -> list[Detection]:
    """Finds the patches of saturated colour in a uint8 picture (H, W, 3)."""
    ink = (cv2.cvtColor(image, cv2.COLOR_RGB2HSV)[..., 1] >= 255 * _MIN_SATURATION).astype(np.uint8)
    count, labels, stats, _ = cv2.connectedComponentsWithStats(ink, connectivity=4)
    found = []
    for label in range(1, count):
        left, top, width, height, area = (int(value) for value in stats[label])
        if area < _MIN_AREA * ink.size:
            continue
        window = slice(top, top + height), slice(left, left + width)
        patch = labels[window] == label
        colour = _colour(image[window][patch].mean(0))
        found.append(Detection(_kind(patch, area), colour, area, (left, top, left + width, top + height)))
    return found


def _kind(patch: np.ndarray, area: int) -> str:
    """Names a patch (h, w) by its solidity, its balance about the middle of its box, and the share it fills."""
    height, width = patch.shape
    pixels = np.argwhere(patch)
    hull = cv2.convexHull(pixels[:, ::-1].astype(np.int32))
    in_hull = cv2.contourArea(hull) + cv2.arcLength(hull, True) / 2 + 1  # lattice points, by Pick's theorem
    if area < 0.85 * in_hull or not 0.7 <= width / height <= 1.4:
        return "text"
    offset = (pixels.mean(0) + 0.5) / patch.shape - 0.5
    if np.abs(offset).max() > 0.06:
        return "triangle"
    return "square" if area > 0.925 * patch.size else "circle"


def _colour(rgb: np.ndarray) -> str:
    hue = 2.0 * int(cv2.cvtColor(rgb.round().astype(np.uint8).reshape(1, 1, 3), cv2.COLOR_RGB2HSV)[0, 0, 0])
    return min(_HUES, key=lambda name: abs((hue - _HUES[name] + 180) % 360 - 180))


class _ObjectReward(ABC):
    """The mean of a graded score over the entries of a prompt's ``include``; NaN where no entry asks for the aspect."""

    name: str

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        scores = np.full(len(prompts), np.nan)
        for i, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
            entries = [entry for entry in prompt.metadata.get("include", ()) if self._asks(entry)]
            if entries:
                found = detect(image)
                scores[i] = np.mean([self._score(found, entry) for entry in entries])
        return scores

    @abstractmethod
    def _asks(self, entry: dict[str, Any]) -> bool:
        """Whether an entry says anything about this aspect."""

    @abstractmethod
    def _score(self, found: list[Detection], entry: dict[str, Any]) -> float:
        """How well what was found meets an entry, in [0, 1]."""


class CountReward(_ObjectReward):
    """1 − |found − asked|/asked, at least 0, for the number of objects of the class asked for; NaN for text."""

    name = "count"

    def _asks(self, entry: dict[str, Any]) -> bool:
        return "count" in entry and entry["class"] != "text"

    def _score(self, found: list[Detection], entry: dict[str, Any]) -> float:
        asked: int = entry["count"]
        count = len([item for item in found if item.kind == entry["class"]])
        return max(0.0, 1.0 - abs(count - asked) / asked)


class ColourReward(_ObjectReward):
    """The share, by area, of the objects of the class asked for that have the colour asked for; 0 if there is none."""

    name = "colour"

    def _asks(self, entry: dict[str, Any]) -> bool:
        return "color" in entry

    def _score(self, found: list[Detection], entry: dict[str, Any]) -> float:
        of_class = [item for item in found if item.kind == entry["class"]]
        right = sum(item.area for item in of_class if item.colour == entry["color"])
        return right / max(sum(item.area for item in of_class), 1)
