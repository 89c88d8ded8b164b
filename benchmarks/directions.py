"""Picture of the updates that the methods choose for three gradients in a plane."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.drawing import BAD, FAINT, GOOD, add_picture, check_picture, panels, save
from benchmarks.methods import PICTURED, make

GRADIENTS = ((0.0, 1.0), (25.0, 0.8), (145.0, 3.0))
"""Angle in degrees and length: two objectives that agree, and one that nearly opposes them and is longer."""

CALLS = 300
"""Calls with these gradients before the update is drawn, for methods that learn from call to call."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add_picture(parser, "choosing_directions.png")
    parser.add_argument("--methods", nargs="+", default=PICTURED, help="balancers to draw")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Draw the picture and print the smallest cosines.

    Raises:
        ValueError: the picture's folder does not exist.
    """
    check_picture(options.picture)
    cosines = draw(options.methods, options.picture)
    table = Table("method", "smallest cosine with a gradient")
    for name, cosine in cosines.items():
        table.add_row(name, f"{cosine:.2f}")
    console.print(table)
    return {"gradients": GRADIENTS, "calls": CALLS, "min_cosine": cosines}


def draw(methods: list[str], path: Path) -> dict[str, float]:
    """One small picture a method: gradients, the cone without conflict, the update. Returns the smallest cosines.

    Methods that look at losses alone are left out but for the weighted sum.
    """
    angles, lengths = np.array(GRADIENTS).T
    unit = np.stack([np.cos(np.radians(angles)), np.sin(np.radians(angles))], axis=1)
    drawn = [name for name in methods if make(name, len(unit)).uses_gradients or name == "weighted_sum"]
    figure, axes_of = panels(len(drawn), height=1.2)
    found = {}
    for name, axes in zip(drawn, axes_of, strict=True):
        update = _update(name, lengths[:, None] * unit)
        cosines = unit @ update / np.linalg.norm(update)
        found[name] = float(cosines.min())
        cone = np.radians(np.linspace(angles.max() - 90, angles.min() + 90, 50))
        axes.fill(np.append(np.cos(cone), 0.0), np.append(np.sin(cone), 0.0), color=GOOD, alpha=0.12, linewidth=0)
        for vector in lengths[:, None] * unit / lengths.max():
            _arrow(axes, vector, FAINT)
        _arrow(axes, update / np.linalg.norm(update), GOOD if found[name] > -1e-6 else BAD, width=2.0)
        axes.set_title(name, fontsize=8)
        axes.set(xlim=(-1.05, 1.15), ylim=(-0.12, 1.1), aspect="equal")
    figure.suptitle(
        "Direction of the update (coloured) for three gradients (grey). Shaded: in conflict with none of them.",
        fontsize=9,
    )
    save(figure, path)
    return found


def _update(name: str, gradients: NDArray[np.float64]) -> NDArray[np.float64]:
    balancer, gramian = make(name, len(gradients)), torch.from_numpy(gradients @ gradients.T)
    calls = CALLS if balancer.STATE else 1
    for _ in range(calls):
        coefficients = balancer.coefficients(gramian, torch.ones(len(gradients)))
    update: NDArray[np.float64] = coefficients.numpy() @ gradients
    return update


def _arrow(axes: Axes, vector: NDArray[np.float64], colour: str, width: float = 1.2) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=tuple(vector), xytext=(0, 0), arrowprops=style)
