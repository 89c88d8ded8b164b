"""Map of where balancing pays: worst-objective progress on quadratics over conflict, noise and scales.

Measured in pieces, one a method and K, each kept in a file: what was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import contest, quadratics
from benchmarks.contest import ENTRANTS, enter
from benchmarks.drawing import add_picture, check_picture
from benchmarks.output import write_json
from benchmarks.quadratics import Cell
from benchmarks.regimes_pictures import draw_gains, draw_methods
from benchmarks.regions import PLAIN, compare, count, record

FIRST_TUNING_SEED = 1000
INFINITY = float("inf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add_picture(parser, "regimes.png")
    parser.add_argument("--methods", nargs="+", default=list(ENTRANTS), choices=list(ENTRANTS), metavar="METHOD")
    parser.add_argument("--objectives", type=int, nargs="+", default=[2, 5], help="K")
    parser.add_argument("--ratios", type=float, nargs="+", default=[1, 10, 1000], help="largest scale over smallest")
    parser.add_argument(
        "--signal-to-noise", type=float, nargs="+", default=[INFINITY, 3, 1, 0.3, 0.1], help="of a step"
    )
    parser.add_argument(
        "--cosines", type=float, nargs="+", default=[-0.95, -0.7, -0.3, 0, 0.3, 0.7, 0.95], help="between gradients"
    )
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--seeds", type=int, default=5, help="draws that methods are judged on")
    parser.add_argument("--tuning-seeds", type=int, default=2, help="other draws, that settings are chosen on")
    parser.add_argument("--pieces", type=Path, default=Path("runs/regimes"), help="folder of what is measured already")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure what is missing, draw the pictures and print the table.

    Raises:
        ValueError: an option is out of range.
    """
    if min(options.steps, options.tuning_seeds, options.seeds - 1, min(options.objectives) - 1) < 1:
        raise ValueError("--steps and --tuning-seeds must be at least 1, --seeds and --objectives at least 2")
    if min(options.ratios) < 1 or not min(options.signal_to_noise) > 0 or not max(map(abs, options.cosines)) < 1:
        raise ValueError("--ratios must be at least 1, --signal-to-noise positive and --cosines between -1 and 1")
    if PLAIN not in options.methods:
        raise ValueError(f"--methods must have {PLAIN}, which the others are compared with")
    check_picture(options.picture)
    torch.set_num_threads(1)
    options.pieces.mkdir(parents=True, exist_ok=True)
    settings = {
        "parameters": quadratics.PARAMETERS,
        "condition": quadratics.CONDITION,
        "learning_rates": list(contest.LEARNING_RATES),
        "steps": options.steps,
        "seeds": options.seeds,
        "tuning_seeds": options.tuning_seeds,
        "ratios": options.ratios,
        "signal_to_noise": [f"{value:g}" for value in options.signal_to_noise],
        "cosines": options.cosines,
    }
    pieces = {
        str(k): {method: _piece(method, k, settings, options.pieces, console) for method in options.methods}
        for k in options.objectives
    }
    maps = {k: compare(of_k) for k, of_k in pieces.items()}
    methods = record(maps, options.methods)
    draw_gains(maps, settings, options.picture)
    draw_methods(maps, settings, options.picture.with_stem(options.picture.stem + "_methods"))
    table = Table("method", "mean worst progress", "cells better than the plain sum", "worse", title="all cells")
    for name, of in methods.items():
        table.add_row(name, f"{of['mean']:.2f}", str(of["better"]), str(of["worse"]))
    console.print(table)
    seconds = sum(piece["seconds"] for of_k in pieces.values() for piece in of_k.values())
    return {
        "torch": torch.__version__,
        **settings,
        "seconds": round(seconds),
        "regions": count(maps, settings),
        "methods": methods,
        "maps": maps,
    }


def _piece(method: str, objectives: int, settings: dict[str, Any], folder: Path, console: Console) -> dict[str, Any]:
    """Measure a method on all cells, or read what was measured before with the same settings and defaults.

    Each entry is of shape (ratios, signal-to-noise, cosines), "worst" has the seeds as a fourth dimension.
    """
    path = folder / f"{method}_{objectives}.json"
    entrant = ENTRANTS[method]
    settings = {**settings, "entrant": entrant.describe(objectives)}
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text())
        if kept["settings"] == settings:
            return kept
    axes = [settings["ratios"], [float(value) for value in settings["signal_to_noise"]], settings["cosines"]]
    start = time.process_time()
    outcome = enter(
        entrant,
        [Cell(*values) for values in itertools.product(*axes)],
        objectives,
        tuning=range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + settings["tuning_seeds"]),
        seeds=range(settings["seeds"]),
        steps=settings["steps"],
    )
    shape = [len(axis) for axis in axes]
    found = {
        "settings": settings,
        "seconds": time.process_time() - start,
        "tuned": outcome.tuned.reshape(shape).tolist(),
        "worst": outcome.worst.reshape(*shape, -1).tolist(),
        "learning_rate": np.reshape(outcome.learning_rates, shape).tolist(),
    }
    write_json(path, found)
    console.print(f"{method}, K = {objectives}: {found['seconds']:.0f} s", highlight=False)
    return found
