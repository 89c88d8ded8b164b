"""A run's pictures: reward curves, the balance of the gradients, and grids of samples with their rewards."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from integrations.diffusion_nft.evaluation import mean_and_error
from integrations.diffusion_nft.rollout import Rollout
from integrations.diffusion_nft.run_folder import RunFolder

DPI = 110
SMOOTHING = 7  # steps in the running mean of the bold curves


def save(folder: RunFolder, name: str, figure: Figure) -> None:
    """Write a figure as PNG, atomically."""
    with folder.writing(name) as path:
        figure.savefig(path, format="png", dpi=DPI)


def rewards_figure(
    metrics: Sequence[dict[str, Any]], evaluations: dict[int, dict[str, list[float]]], groups: np.ndarray
) -> Figure:
    """Mean rewards over steps, one panel per reward: the rollouts, and the held-out set with its standard error."""
    names = list(metrics[0]["rewards"])
    figure = Figure(figsize=(3.0 * len(names), 2.9), layout="constrained")
    for ax, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        steps, values = _series(metrics, lambda record, name=name: record["rewards"][name])
        ax.plot(steps, values, color="C0", alpha=0.3, lw=0.8)
        ax.plot(steps, _running_mean(values), color="C0", label="rollouts (old policy)")
        points = [(step, *mean_and_error(table[name], groups)) for step, table in sorted(evaluations.items())]
        x, mean, error = np.array(points, dtype=float).reshape(-1, 3).T
        ax.errorbar(
            x, mean, np.nan_to_num(error), color="C3", marker="o", ls=":", capsize=3, label="held out (EMA), ± se"
        )
        ax.set_title(name)
        ax.set_xlabel("optimizer step")
        ax.grid(alpha=0.25)
    figure.axes[0].set_ylabel("mean reward")
    figure.axes[0].legend(fontsize=7)
    return figure


def balance_figure(metrics: Sequence[dict[str, Any]], names: Sequence[str]) -> Figure:
    """Coefficients over steps, the mean cosine between every two objectives, and the update's cosine with each."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1.2))
    for name in metrics[0]["coefficients"]:
        left.plot(*_series(metrics, lambda record, name=name: record["coefficients"][name]), label=name)
    left.set_title("coefficients λ")
    left.legend(fontsize=8)
    measured = [record for record in metrics if record["refreshed"]]
    _heatmap(middle, measured, names)
    for name in names:
        right.plot(*_series(measured, lambda record, name=name: record["update_cosines"][name]), label=name, marker=".")
    right.axhline(0, color="black", lw=0.8)
    right.set_title("cosine of the update with each gradient")
    right.legend(fontsize=8)
    for ax in (left, right):
        ax.set_xlabel("optimizer step")
        ax.grid(alpha=0.25)
    return figure


def _heatmap(ax: Axes, measured: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    stack = np.array([record["cosines"] for record in measured], dtype=float).reshape(-1, len(names), len(names))
    known = ~np.isnan(stack)
    mean = np.where(known, stack, 0).sum(0) / np.maximum(known.sum(0), 1)
    ax.imshow(mean, vmin=-1, vmax=1, cmap="RdBu")
    for i, j in np.ndindex(mean.shape):
        ax.text(
            j,
            i,
            f"{mean[i, j]:.2f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if abs(mean[i, j]) > 0.6 else "black",
        )
    ax.set_xticks(range(len(names)), names, rotation=30)
    ax.set_yticks(range(len(names)), names)
    ax.set_title(f"cosines between gradients, mean of {len(measured)} steps")


def grid_figure(measured: Rollout, names: Sequence[str], count: int, title: str) -> Figure:
    """Pictures spread over the set, each with its prompt and its own rewards under it."""
    chosen = np.unique(np.linspace(0, len(measured.prompts) - 1, min(count, len(measured.prompts))).round().astype(int))
    columns = min(8, math.ceil(math.sqrt(2 * len(chosen))))
    rows = math.ceil(len(chosen) / columns)
    figure = Figure(figsize=(1.9 * columns, 2.7 * rows + 0.4), layout="constrained")
    figure.suptitle(title)
    axes = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for ax in axes[len(chosen) :]:
        ax.axis("off")
    for ax, index in zip(axes, chosen.tolist(), strict=False):
        ax.imshow(measured.images[index], interpolation="nearest")
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_xlabel(caption(measured, names, index), fontsize=6.5)
    return figure


def caption(measured: Rollout, names: Sequence[str], index: int) -> str:
    """The prompt and the rewards of one picture; a reward that does not apply to it is left out."""
    prompt = textwrap.fill(measured.prompts[index].text, 28)
    values = zip(names, measured.rewards[:, index].tolist(), strict=True)
    scores = ", ".join(f"{name} {value:.2f}" for name, value in values if not math.isnan(value))
    # Matplotlib reads $…$ as maths.
    return f"{prompt}\n{textwrap.fill(scores, 32)}".replace("$", r"\$")


def _series(metrics: Sequence[dict[str, Any]], value: Any) -> tuple[np.ndarray, np.ndarray]:
    steps = np.array([record["step"] for record in metrics])
    return steps, np.array([np.nan if value(record) is None else value(record) for record in metrics], dtype=float)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last `SMOOTHING` known values."""
    windows = [values[max(0, i + 1 - SMOOTHING) : i + 1] for i in range(len(values))]
    return np.array([w[~np.isnan(w)].mean() if (~np.isnan(w)).any() else np.nan for w in windows])
