"""Pictures of how the methods differ: the update for three gradients, and paths on a two-objective landscape."""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.landscape import FRONT, STARTS, descend, objectives
from benchmarks.methods import make
from gradbalance import balancers

matplotlib.use("Agg")

COLUMNS = 6
GRADIENTS = ((0.0, 1.0), (25.0, 0.8), (145.0, 3.0))
"""Angle in degrees and length: two objectives that agree, and one that nearly opposes them and is longer."""

UPDATE, CONFLICT, FAINT = "#1b7837", "#c51b1b", "#999999"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--folder", type=Path, default=Path("docs/images"), help="where the pictures go")
    parser.add_argument("--methods", nargs="+", default=balancers.available(), help="balancers to draw")
    parser.add_argument("--steps", type=int, default=50_000, help="steps of Adam on the landscape")
    parser.add_argument("--lr", type=float, default=1e-3, help="its learning rate")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Draw both pictures and print what they show.

    Raises:
        ValueError: an option is out of range.
    """
    if options.steps < 1 or not options.lr > 0:
        raise ValueError("--steps must be at least 1 and --lr positive")
    if not options.folder.is_dir():
        raise ValueError(f"--folder: {options.folder} does not exist")
    torch.set_num_threads(1)
    cosines = draw_directions(options.methods, options.folder / "choosing_directions.png")
    arrivals = draw_paths(options.methods, options.folder / "choosing_paths.png", steps=options.steps, lr=options.lr)
    table = Table("method", "smallest cosine with a gradient", f"starts of {len(STARTS)} that end on the front")
    for name in options.methods:
        table.add_row(name, f"{cosines[name]:.2f}" if name in cosines else "", str(sum(arrivals[name])))
    console.print(table)
    return {"steps": options.steps, "lr": options.lr, "min_cosine": cosines, "arrived": arrivals}


def draw_directions(methods: list[str], path: Path) -> dict[str, float]:
    """One small picture a method: gradients, the cone without conflict, the update. Returns the smallest cosines."""
    angles, lengths = np.array(GRADIENTS).T
    unit = np.stack([np.cos(np.radians(angles)), np.sin(np.radians(angles))], axis=1)
    gradients = lengths[:, None] * unit
    drawn = [name for name in methods if make(name, len(unit)).uses_gradients or name == "weighted_sum"]
    figure, panels = _grid(len(drawn), height=1.45)
    found = {}
    for name, axes in zip(drawn, panels, strict=True):
        update = _update(name, gradients)
        cosines = unit @ update / np.linalg.norm(update)
        found[name] = float(cosines.min())
        cone = np.radians(np.linspace(angles.max() - 90, angles.min() + 90, 50))
        axes.fill(np.append(np.cos(cone), 0.0), np.append(np.sin(cone), 0.0), color=UPDATE, alpha=0.12, linewidth=0)
        for vector in gradients / lengths.max():
            _arrow(axes, vector, FAINT)
        _arrow(axes, update / np.linalg.norm(update), UPDATE if found[name] > -1e-6 else CONFLICT, width=2.0)
        axes.set_title(name, fontsize=8)
        axes.set(xlim=(-1.05, 1.15), ylim=(-0.12, 1.1), aspect="equal")
    figure.suptitle(
        "The update (coloured) for three gradients (grey). Shaded: the directions in conflict with none of them.",
        fontsize=9,
    )
    _save(figure, path)
    return found


def draw_paths(methods: list[str], path: Path, *, steps: int, lr: float) -> dict[str, list[bool]]:
    """One small picture a method: its paths over the contours of the mean loss. Returns who reached the front."""
    figure, panels = _grid(len(methods), height=1.75)
    grid = torch.stack(torch.meshgrid(torch.linspace(-11, 11, 120), torch.linspace(-11, 11, 120), indexing="xy"), -1)
    mean = sum(objectives(grid.double()))
    paths = descend([partial(make, name, 2) for name in methods], steps=steps, lr=lr)
    arrivals: dict[str, list[bool]] = dict(zip(methods, paths.arrived.tolist(), strict=True))
    for method, (name, axes) in enumerate(zip(methods, panels, strict=True)):
        axes.contour(grid[..., 0], grid[..., 1], mean, levels=14, linewidths=0.4, colors="#bbbbbb")
        axes.plot([-7, 7], [FRONT, FRONT], color="black", linewidth=2.5, alpha=0.5)
        for start, arrived in enumerate(arrivals[name]):
            points, colour = paths.points[:, method, start], UPDATE if arrived else CONFLICT
            axes.plot(*points.T, color=colour, linewidth=1.1)
            axes.plot(*points[0], "o", color="black", markersize=2)
            axes.plot(*points[-1], "*", color=colour, markersize=5)
        axes.set_title(f"{name}  {sum(arrivals[name])}/{len(STARTS)}", fontsize=8)
        axes.set(xlim=(-11, 11), ylim=(-11, 11))
    figure.suptitle(
        "Paths of Adam from five starts; the first objective is ten times smaller. Black: the Pareto front. "
        "Red: not there yet after all steps.",
        fontsize=9,
    )
    _save(figure, path)
    return arrivals


def _update(name: str, gradients: NDArray[np.float64]) -> NDArray[np.float64]:
    balancer = make(name, len(gradients))
    coefficients = balancer.coefficients(torch.from_numpy(gradients @ gradients.T), torch.ones(len(gradients)))
    update: NDArray[np.float64] = coefficients.numpy() @ gradients
    return update


def _grid(count: int, *, height: float) -> tuple[Figure, list[Axes]]:
    rows = math.ceil(count / COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(10, height * rows + 0.4), squeeze=False, layout="constrained")
    panels = list(axes.flat)
    for panel in panels:
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_color("#cccccc")
    for panel in panels[count:]:
        panel.set_axis_off()
    return figure, panels[:count]


def _arrow(axes: Axes, vector: NDArray[np.float64], colour: str, width: float = 1.2) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=tuple(vector), xytext=(0, 0), arrowprops=style)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)
