"""The trial's figure: the worst scaled reward over each run, and where every method ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from benchmarks.drawing import FAINT, save


def draw(summary: dict[str, Any], path: Path) -> None:
    """One column for each regime; above the curves, below the ends with the standard error over seeds."""
    regimes = summary["regimes"]
    names = list(dict.fromkeys(name for found in regimes.values() for name in found["methods"]))
    colours = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    figure, axes = plt.subplots(
        2, len(regimes), figsize=(3.6 * len(regimes) + 1, 6.5), squeeze=False, layout="constrained"
    )
    for (regime, found), (above, below) in zip(regimes.items(), axes.T, strict=True):
        for name, row in found["methods"].items():
            above.plot(*zip(*row["curve"], strict=True), color=colours[name], label=name)
        above.axhline(0, color=FAINT, linewidth=0.8)
        above.set(title=regime, xlabel="optimizer step", ylabel="worst scaled improvement")
        ranked = sorted(found["methods"].items(), key=lambda item: item[1]["worst"][0])
        for height, (name, row) in enumerate(ranked):
            mean, error = row["worst"]
            below.errorbar(mean, height, xerr=error or 0.0, fmt="o", color=colours[name])
        below.axvline(0, color=FAINT, linewidth=0.8)
        below.set(yticks=range(len(ranked)), yticklabels=[name for name, _ in ranked], xlabel="at the end, ± se")
    save(figure, path)
