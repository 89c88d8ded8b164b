"""What the pictures share: a grid of small panels, colours, and where a picture goes."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")

COLUMNS = 6
GOOD, BAD, FAINT = "#1b7837", "#c51b1b", "#999999"


def add_picture(parser: argparse.ArgumentParser, name: str) -> None:
    """Declare the option that says where the picture goes."""
    parser.add_argument("--picture", type=Path, default=Path("docs/images") / name, help="where the picture goes")


def check_picture(path: Path) -> None:
    """Raise ValueError if the folder does not exist."""
    if not path.parent.is_dir():
        raise ValueError(f"--picture: the folder {path.parent} does not exist")


def panels(count: int, *, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with so many small panels."""
    rows = math.ceil(count / COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(10, height * rows + 0.4), squeeze=False, layout="constrained")
    every = list(axes.flat)
    for panel in every:
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_color("#cccccc")
    for panel in every[count:]:
        panel.set_axis_off()
    return figure, every[:count]


def save(figure: Figure, path: Path) -> None:
    """Write the picture."""
    figure.savefig(path, dpi=130)
    plt.close(figure)
