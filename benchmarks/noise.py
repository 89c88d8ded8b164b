"""Expected progress per unit of step under noise: gradients whose signals are known, many ways to balance them.

Five objectives have fixed signals s_k, and a step sees g_k = s_k + ε_k as the mean of four independent parts. From
some steps N and U are estimated (the parts' cross products, averaged, floored, projected); further steps are balanced
and judged by the signals: the mean of ⟨s_k, d⟩ / ‖s_k‖ over the root mean square of ‖d‖. The signals' shares of their
gradients' norms have the pattern of five real rewards, one of them a specialist that is nearly drowned, times a level.

Only inner products matter, so they are drawn, not the gradients: those of independent normal vectors of mean square
length 1 in P dimensions are normal around 1 and 0 with variance 2/P and 1/P.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.drawing import add_picture, check_picture, save
from gradbalance.balancers import Balancer, Marble, NoiseAware
from gradbalance.solvers.semidefinite import correlations

Array = NDArray[np.float64]

PATTERN = np.array([0.2, 0.6, 0.5, 1.0, 0.8])
"""Signal's share of the gradient's norm, relative to the largest."""

LEVELS = (0.2, 0.3, 0.4, 0.6, 0.8, 0.95)
"""The largest share."""

DIMENSIONS = (2_000, 50_000)
"""P. Noise that lives in few directions is hard to tell from signal: cross products err by 1/√P of its square."""

PARTS, SHARED = 4, 0.2
"""A, and the part of the noise's square that all objectives have in common, as they look at the same samples."""

STEPS, JUDGED = 20, 200
"""How many steps the estimates are made of, and how many are balanced."""

FLOOR, FLOORS, AT = 0.01, (0.05, 0.01, 0.002), 0.4
"""Least U_kk, as a share of N_kk, in the estimate; others to compare it with, and at which level."""

GEOMETRIES: dict[str, Callable[[Array], Array]] = {
    "agreeing": lambda directions: directions + 0.5 * directions.mean(axis=0),
    "conflicting": lambda directions: directions - 0.4 * directions.mean(axis=0),
}


def _balanced(balancer: Balancer, gramian: Array, signal: Array | None = None) -> Array:
    found = balancer.coefficients(
        torch.from_numpy(gramian), signal=None if signal is None else torch.from_numpy(signal)
    )
    return np.asarray(found.numpy())


ON_THE_BATCH: dict[str, Callable[[Array], Array]] = {
    "sum of unit gradients": lambda batch: 1 / np.sqrt(batch.diagonal()),
    "Marble, batch": lambda batch: _balanced(Marble(), batch),
}
"""Coefficients from the Gramian of the gradients that they are for."""

FROM_ESTIMATES: dict[str, Callable[[Array, Array], Array]] = {
    "Marble, N": lambda noisy, signal: _balanced(Marble(), noisy),
    "Marble, U": lambda noisy, signal: _balanced(Marble(), signal),
    "noise-aware max–min": lambda noisy, signal: _balanced(NoiseAware(), noisy, signal),
    "noise-aware Nash": lambda noisy, signal: _balanced(NoiseAware(1.0), noisy, signal),
}
"""Coefficients from N and U, the same for all steps."""

EXACT = ("Marble, U", "noise-aware max–min", "noise-aware Nash")
"""Those of them that are also given the exact N and U."""

METHODS = (*ON_THE_BATCH, *FROM_ESTIMATES, *(f"{name}, exact" for name in EXACT))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add_picture(parser, "noise.png")
    parser.add_argument("--draws", type=int, default=40, help="sets of signals at each level")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure, draw and print the table of one level.

    Raises:
        ValueError: an option is out of range.
    """
    if options.draws < 2:
        raise ValueError("--draws must be at least 2")
    check_picture(options.picture)
    found = {
        geometry: {
            str(dimension): {str(level): measure(geometry, dimension, level, options.draws) for level in LEVELS}
            for dimension in DIMENSIONS
        }
        for geometry in GEOMETRIES
    }
    for geometry, dimension, levels in _panels(found):
        title = f"signals {geometry}, {dimension} dimensions: worst / geometric mean, by the largest share"
        table = Table("method", *levels, title=title)
        for method in METHODS:
            cells = (f"{of[method]['worst'][0]:.3f} / {of[method]['geometric mean'][0]:.3f}" for of in levels.values())
            table.add_row(method, *cells)
        console.print(table)
    floors = {
        geometry: {
            str(dimension): {str(floor): measure(geometry, dimension, AT, options.draws, floor) for floor in FLOORS}
            for dimension in DIMENSIONS
        }
        for geometry in GEOMETRIES
    }
    draw(found, options.picture)
    return {
        "draws": options.draws,
        "pattern": PATTERN.tolist(),
        "parts": PARTS,
        "steps": STEPS,
        "judged": JUDGED,
        "shared": SHARED,
        "floor": FLOOR,
        "progress": found,
        "floors": {"level": AT, "progress": floors},
    }


def measure(geometry: str, dimension: int, level: float, draws: int, floor: float = FLOOR) -> dict[str, dict[str, Any]]:
    """Mean and standard error over draws: worst and geometric mean of the objectives' progress; the mean of each."""
    progress = np.array(
        [_progress(geometry, dimension, level, draw, floor) for draw in range(draws)]
    )  # (draws, methods, K)
    measures = {
        "worst": progress.min(axis=2),
        "geometric mean": np.prod(np.maximum(progress, 0.0), axis=2) ** (1 / len(PATTERN)),
    }
    errors = {name: values.std(axis=0, ddof=1) / math.sqrt(draws) for name, values in measures.items()}
    return {
        method: {
            **{name: [float(values[:, i].mean()), float(errors[name][i])] for name, values in measures.items()},
            "each": progress[:, i].mean(axis=0).tolist(),
        }
        for i, method in enumerate(METHODS)
    }


def _progress(geometry: str, dimension: int, level: float, draw: int, floor: float) -> Array:
    """Progress of each objective under each method, for one set of signals."""
    rng = np.random.default_rng([sorted(GEOMETRIES).index(geometry), dimension, LEVELS.index(level), draw])
    size = len(PATTERN)
    signals = GEOMETRIES[geometry](rng.standard_normal((size, 2 * size)))
    signals /= np.linalg.norm(signals, axis=1, keepdims=True)
    ratio = np.sqrt(1 / (level * PATTERN) ** 2 - 1)  # of the noise's norm to the signal's, in one step
    exact_signal = signals @ signals.T
    exact_noisy = exact_signal + np.outer(ratio, ratio) * ((1 - SHARED) * np.eye(size) + SHARED)
    noisy, signal = estimate([_step(rng, signals, ratio, dimension)[0] for _ in range(STEPS)], floor)
    fixed = [method(noisy, signal) for method in FROM_ESTIMATES.values()]
    fixed += [FROM_ESTIMATES[name](exact_noisy, exact_signal) for name in EXACT]
    gained, squares = np.zeros((len(METHODS), size)), np.zeros(len(METHODS))
    for _ in range(JUDGED):
        parts, along = _step(rng, signals, ratio, dimension)
        batch, along = parts.mean(axis=(0, 2)), along.mean(axis=0)
        coefficients = np.array([*(method(batch) for method in ON_THE_BATCH.values()), *fixed])
        gained += coefficients @ along
        squares += np.sum(coefficients @ batch * coefficients, axis=1)
    return gained / np.sqrt(np.maximum(JUDGED * squares, 1e-300))[:, None]


def _step(rng: np.random.Generator, signals: Array, ratio: Array, dimension: int) -> tuple[Array, Array]:
    """Inner products of a step's part gradients: with each other, (A, K, A, K), and with the signals, (A, K, K)."""
    size, spanned = signals.shape
    sources = PARTS * (size + 1)  # each part's own noises, then what they have in common
    within = rng.standard_normal((sources, sources)) / math.sqrt(2 * dimension)
    products = np.eye(sources) + within + within.T
    across = rng.standard_normal((sources, spanned)) / math.sqrt(dimension)
    mixing = np.zeros((PARTS, size, PARTS, size + 1))
    for part in range(PARTS):
        mixing[part, :, part, :size] = math.sqrt(PARTS * (1 - SHARED)) * np.diag(ratio)
        mixing[part, :, part, size] = math.sqrt(PARTS * SHARED) * ratio
    mixed = mixing.reshape(PARTS * size, sources)
    every = np.tile(signals, (PARTS, 1))
    crossed = mixed @ across @ every.T
    gramian = every @ every.T + crossed + crossed.T + mixed @ products @ mixed.T
    along = (every + mixed @ across) @ signals.T
    return gramian.reshape(PARTS, size, PARTS, size), along.reshape(PARTS, size, size)


def estimate(steps: list[Array], floor: float) -> tuple[Array, Array]:
    """N and U from the inner products of the part gradients of some steps, each (A, K, A, K)."""
    blocks = np.mean(steps, axis=0)
    noisy = blocks.mean(axis=(0, 2))
    same = np.einsum("akal->kl", blocks) / PARTS**2
    signal = (noisy - same) * PARTS / (PARTS - 1)
    norms = np.sqrt(np.maximum(signal.diagonal(), floor * noisy.diagonal()))
    unit = signal / np.outer(norms, norms)
    np.fill_diagonal(unit, 1.0)
    return noisy, correlations(unit) * np.outer(norms, norms)


def _panels(found: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for geometry, dimensions in found.items():
        for dimension, levels in dimensions.items():
            yield geometry, int(dimension), levels


def draw(found: dict[str, Any], path: Path) -> None:
    """Worst and geometric mean against the level, for each geometry and number of dimensions."""
    panels = list(_panels(found))
    figure, axes = plt.subplots(2, len(panels), figsize=(13, 6.5), sharex=True, sharey="row", layout="constrained")
    told = ("#8073ac", "#1b7837", "#2166ac")
    colours = ("#999999", "#c51b1b", "#e08214", *told, *told)
    for column, (geometry, dimension, levels) in enumerate(panels):
        for row, measured in enumerate(("worst", "geometric mean")):
            panel = axes[row, column]
            for method, colour in zip(METHODS, colours, strict=True):
                mean, error = np.array([of[method][measured] for of in levels.values()]).T
                style = "--" if method.endswith("exact") else "-"
                panel.errorbar(LEVELS, mean, error, color=colour, linestyle=style, label=method, linewidth=1.2)
            panel.axhline(0, color="#cccccc", linewidth=0.8, zorder=0)
            panel.set_title(f"{measured}, {geometry}, P = {dimension:,}", fontsize=8)
    for panel in axes[-1]:
        panel.set_xlabel("largest signal's share of its gradient's norm", fontsize=8)
    for panel in axes[:, 0]:
        panel.set_ylabel("expected progress per unit of step", fontsize=8)
    axes[1, -1].legend(fontsize=6)
    save(figure, path)
