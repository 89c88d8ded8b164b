"""The pictures of the tiny task and their captions: a few coloured shapes, or two coloured letters, on white.

A ``Scene`` says what a picture shows; it has one caption and many pictures (size and place are drawn). Captions follow
two forms, ``two red circles`` and ``red text "KA"``, so that every word is one token and every scene one prompt.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from integrations.diffusion_nft.prompts import Prompt

SIZE = 24
COLOURS = {"red": (220, 30, 30), "green": (20, 150, 50), "blue": (30, 60, 220), "purple": (165, 30, 200)}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("one", "two", "three")
LETTERS = "ACEHKPTX"  # capitals that stay apart at 12 pixels of height
_UNIT = 6  # pixels of a transformer token: cells lie on this grid, which makes crisp drawing quick to learn
_CELL = 12  # pixels of the square cell that holds a shape or letter
_SHAPE_SIDES, _LETTER_SIDES = (6, 8, 10), (8, 10)  # pixels of what is drawn in the middle of a cell
_SCALE = 4  # drawn this many times larger, then averaged: anti-aliased edges
_FONT = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans-Bold.ttf"


@dataclass(frozen=True)
class Scene:
    """What a picture shows: ``count`` shapes of a kind, or ``text`` (then ``shape`` is ``"text"``, ``count`` 1)."""

    colour: str
    shape: str
    count: int = 1
    text: str = ""

    @property
    def prompt(self) -> Prompt:
        """The caption with its metadata in GenEval's layout."""
        if self.text:
            words, tag = f'{self.colour} text "{self.text}"', "colors"
        else:
            words, tag = f"{NUMBERS[self.count - 1]} {self.colour} {self.shape}{'s' * (self.count > 1)}", "counting"
        return Prompt(
            words, {"tag": tag, "include": [{"class": self.shape, "count": self.count, "color": self.colour}]}
        )


def shape_scenes() -> list[Scene]:
    """All scenes with shapes."""
    return [Scene(c, s, n) for n, c, s in itertools.product(range(1, len(NUMBERS) + 1), COLOURS, SHAPES)]


def text_scenes() -> list[Scene]:
    """All scenes with two letters."""
    return [Scene(c, "text", 1, a + b) for a, b, c in itertools.product(LETTERS, LETTERS, COLOURS)]


def is_held_out(scene: Scene) -> bool:
    """A quarter of the scenes, in which every word and letter occurs equally often: kept for evaluation."""
    if scene.text:
        first, second = (LETTERS.index(letter) for letter in scene.text)
        return (first + second) % 4 == 0
    return (scene.count + list(COLOURS).index(scene.colour) + SHAPES.index(scene.shape)) % 4 == 0


def random_scene(rng: np.random.Generator) -> Scene:
    """A scene with shapes or with letters, evenly."""
    colour = str(rng.choice(list(COLOURS)))
    if rng.random() < 0.5:
        return Scene(colour, "text", 1, "".join(rng.choice(list(LETTERS), size=2)))
    return Scene(colour, str(rng.choice(SHAPES)), int(rng.integers(1, len(NUMBERS) + 1)))


def mistaken(scene: Scene, rng: np.random.Generator, whole: float, part: float) -> Scene:
    """A scene that a careless captioner would report.

    Args:
        scene: What the picture shows.
        rng: Where chance comes from.
        whole: Probability of the caption of some other picture.
        part: Otherwise, the probability with which each of colour, shape and count, or each letter, is drawn anew.
    """
    if rng.random() < whole:
        return random_scene(rng)
    if rng.random() < part:
        scene = replace(scene, colour=str(rng.choice(list(COLOURS))))
    if scene.text:
        return replace(
            scene, text="".join(str(rng.choice(list(LETTERS))) if rng.random() < part else c for c in scene.text)
        )
    if rng.random() < part:
        scene = replace(scene, shape=str(rng.choice(SHAPES)))
    if rng.random() < part:
        scene = replace(scene, count=int(rng.integers(1, len(NUMBERS) + 1)))
    return scene


def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Draws a picture of a scene at a random size and place: uint8 (24, 24, 3)."""
    if scene.text:
        side = int(rng.choice(_LETTER_SIDES))
        top = _UNIT * int(rng.integers((SIZE - _CELL) // _UNIT + 1))
        marks = [(letter, place * _CELL, top) for place, letter in enumerate(scene.text)]
    else:
        side = int(rng.choice(_SHAPE_SIDES))
        marks = [(scene.shape, left, top) for left, top in _apart(scene.count, rng)]
    coverage, inset = np.zeros((SIZE, SIZE, 1)), (_CELL - side) // 2
    for kind, left, top in marks:
        x, y = left + inset, top + inset
        coverage[y : y + side, x : x + side] = _stencil(kind, side)
    picture = 255 - coverage * (255 - np.array(COLOURS[scene.colour]))
    return np.asarray(picture.round(), dtype=np.uint8)


def _apart(count: int, rng: np.random.Generator) -> list[list[int]]:
    """Left and top of cells that do not overlap."""
    while True:
        corners = _UNIT * rng.integers((SIZE - _CELL) // _UNIT + 1, size=(count, 2))
        distance = np.abs(corners[:, None] - corners[None]).max(-1)[~np.eye(count, dtype=bool)]
        if (distance >= _CELL).all():
            found: list[list[int]] = corners.tolist()
            return found


@cache
def _stencil(kind: str, side: int) -> np.ndarray:
    """Coverage in [0, 1] of a shape or letter that fills a square: (side, side, 1)."""
    full = side * _SCALE
    canvas = Image.new("L", (full, full), 0)
    pen = ImageDraw.Draw(canvas)
    if kind == "circle":
        pen.ellipse((0, 0, full - 1, full - 1), fill=255)
    elif kind == "square":
        pen.rectangle((0, 0, full - 1, full - 1), fill=255)
    elif kind == "triangle":
        pen.polygon([(0, full - 1), (full - 1, full - 1), ((full - 1) / 2, 0)], fill=255)
    else:
        font = ImageFont.truetype(str(_FONT), full)
        glyph = Image.new("L", font.getmask(kind).size, 0)
        ImageDraw.Draw(glyph).text((0, 0), kind, font=font, fill=255, anchor="lt")
        canvas = glyph.resize((full, full))
    return np.asarray(canvas.resize((side, side), Image.Resampling.BOX))[..., None] / 255
