"""Time of each balancer: from a Gramian to the coefficients, in microseconds.

All methods take turns on the same Gramians, so that noise of the machine hits them alike; of a few calls in a row on
one Gramian the fastest counts, the median is over Gramians. Three families of gradients: independent ones, ones that
mostly agree, and ones in conflict (each pair has a negative inner product). Methods that tell signal from noise get
these as signals, and the Gramian of the same gradients under noise of twice to four times their size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.methods import make
from gradbalance import balancers
from gradbalance.balancers import Balancer

Array = NDArray[np.float64]

REPEATS = 5
METHODS = sorted([*balancers.available(), "marble, ceiling", "noise_aware, nash"])


def _independent(rng: np.random.Generator, k: int) -> Array:
    return rng.standard_normal((k, 200))


def _agreeing(rng: np.random.Generator, k: int) -> Array:
    return rng.standard_normal((k, 200)) + rng.standard_normal(200)


def _conflicting(rng: np.random.Generator, k: int) -> Array:
    """Gradients that nearly add up to zero: cosines around −0.8/(K−1)."""
    gradients = rng.standard_normal((k, 200))
    common: Array = gradients.mean(axis=0)
    return gradients - 0.9 * common


FAMILIES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "independent": _independent,
    "agreeing": _agreeing,
    "conflicting": _conflicting,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--objectives", type=int, nargs="+", default=[2, 5, 10, 16, 32], help="K to measure")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="balancers to measure")
    parser.add_argument("--draws", type=int, default=100, help="Gramians of each family")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure and print the table.

    Raises:
        ValueError: an option is out of range.
    """
    if min([*options.objectives, options.draws]) < 1:
        raise ValueError("--objectives and --draws must be at least 1")
    torch.set_num_threads(1)
    times = {k: measure(options.methods, k, draws=options.draws) for k in options.objectives}
    table = Table("method", *(f"K = {k}" for k in times), title="µs, the slowest family's median")
    for name in options.methods:
        table.add_row(name, *(f"{max(of[name].values()):.0f}" for of in times.values()))
    console.print(table)
    return {"torch": torch.__version__, "draws": options.draws, "microseconds": times}


def measure(methods: list[str], objectives: int, *, draws: int) -> dict[str, dict[str, float]]:
    """Median microseconds of ``coefficients``, by method and family of gradients."""
    rng = np.random.default_rng(0)
    balancer_of = {name: make(name, objectives) for name in methods}
    medians: dict[str, dict[str, float]] = {name: {} for name in methods}
    for family, draw in FAMILIES.items():
        times: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(draws):
            gradients = draw(rng, objectives)
            noise = rng.standard_normal(gradients.shape) * rng.uniform(2.0, 4.0, (objectives, 1))
            signal = torch.from_numpy(gradients @ gradients.T)
            noisy = signal + torch.from_numpy(noise @ noise.T)
            losses = torch.from_numpy(rng.uniform(0.5, 2.0, objectives))
            for name, balancer in balancer_of.items():
                seen = (noisy, losses, signal) if balancer.uses_signal else (signal, losses)
                times[name].append(min(_seconds(balancer, *seen) for _ in range(REPEATS)))
        for name in methods:
            medians[name][family] = 1e6 * statistics.median(times[name])
    return medians


def _seconds(balancer: Balancer, *seen: Tensor) -> float:
    start = time.perf_counter()
    balancer.coefficients(*seen)
    return time.perf_counter() - start
