"""Picture of the methods' paths on a two-objective landscape, and which starts reach the Pareto front."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.drawing import BAD, GOOD, add_picture, check_picture, panels, save
from benchmarks.landscape import FRONT, STARTS, descend, objectives
from benchmarks.methods import PICTURED, make
from gradbalance import balancers
from gradbalance.balancers import Balancer

OPTIONS = {"famo": {"gamma": 0.0}}
"""Its default decay outweighs the 1e-4 by which one step changes a log loss here: 3 of the 5 starts arrive with it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add_picture(parser, "choosing_paths.png")
    parser.add_argument("--methods", nargs="+", default=PICTURED, help="balancers to draw")
    parser.add_argument("--steps", type=int, default=50_000, help="steps of Adam")
    parser.add_argument("--lr", type=float, default=1e-3, help="its learning rate")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Draw the picture and print who arrives.

    Raises:
        ValueError: an option is out of range.
    """
    if options.steps < 1 or not options.lr > 0:
        raise ValueError("--steps must be at least 1 and --lr positive")
    check_picture(options.picture)
    torch.set_num_threads(1)
    arrived = draw(options.methods, options.picture, steps=options.steps, lr=options.lr)
    table = Table("method", f"starts of {len(STARTS)} that end on the front")
    for name, starts in arrived.items():
        table.add_row(name, str(sum(starts)))
    console.print(table)
    return {"steps": options.steps, "lr": options.lr, "options": OPTIONS, "arrived": arrived}


def _maker(name: str) -> Callable[[], Balancer]:
    return partial(balancers.get, name, **OPTIONS[name]) if name in OPTIONS else partial(make, name, 2)


def draw(methods: list[str], path: Path, *, steps: int, lr: float) -> dict[str, list[bool]]:
    """One small picture a method: its paths over the contours of the mean loss. Returns who reached the front."""
    figure, axes_of = panels(len(methods), height=1.75)
    grid = torch.stack(torch.meshgrid(torch.linspace(-11, 11, 120), torch.linspace(-11, 11, 120), indexing="xy"), -1)
    mean = sum(objectives(grid.double()))
    paths = descend([_maker(name) for name in methods], steps=steps, lr=lr)
    arrivals: dict[str, list[bool]] = dict(zip(methods, paths.arrived.tolist(), strict=True))
    for method, (name, axes) in enumerate(zip(methods, axes_of, strict=True)):
        axes.contour(grid[..., 0], grid[..., 1], mean, levels=14, linewidths=0.4, colors="#bbbbbb")
        axes.plot([-7, 7], [FRONT, FRONT], color="black", linewidth=2.5, alpha=0.5)
        for start, arrived in enumerate(arrivals[name]):
            points, colour = paths.points[:, method, start], GOOD if arrived else BAD
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
    save(figure, path)
    return arrivals
