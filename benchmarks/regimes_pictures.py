"""Heat maps of the regimes: what balancing gains over the plain sum, and how far each method comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from benchmarks.drawing import FAINT, save
from benchmarks.regions import PLAIN, REGIONS

Maps = dict[str, dict[str, Any]]


def draw_gains(maps: Maps, settings: dict[str, Any], path: Path) -> None:
    """One panel a K and ratio: gain of the best balancer over the plain sum, hatched where nothing helps."""
    ratios = settings["ratios"]
    size = (3.5 * len(ratios) + 1.4, 2.7 * len(maps) + 1.6)
    figure, panels = plt.subplots(len(maps), len(ratios), figsize=size, squeeze=False, layout="constrained")
    for row, (k, of_k) in zip(panels, maps.items(), strict=True):
        best = of_k["best"]
        for axes, ratio, gains, regions in zip(row, ratios, best["gain"][PLAIN], best["region"], strict=True):
            image = _heat(axes, gains, "PuOr", -1.0)
            for (y, x), gain in np.ndenumerate(gains):
                if regions[y][x] == REGIONS[3]:
                    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fc="#e9e9e9", ec="#c4c4c4", hatch="////", lw=0))
                else:
                    colour = "white" if abs(gain) > 0.6 else "black"
                    axes.text(x, y, _signed(gain), ha="center", va="center", fontsize=9, color=colour)
            scales = "all of one scale" if ratio == 1 else f"scales up to {ratio:g} : 1"
            axes.set_title(f"K = {k}, {scales}", fontsize=11)
            _ticks(axes, settings, 9)
    bar = figure.colorbar(image, ax=panels, shrink=0.8, aspect=30)
    bar.set_label("← plain sum ahead      balancing ahead →", fontsize=10)
    figure.supxlabel("cosine between gradients at the start   (left: conflict, right: agreement)", fontsize=11)
    figure.supylabel("signal-to-noise of a step   (top: exact, bottom: noise)", fontsize=11)
    figure.suptitle(
        "Where balancing pays: progress of the worst-off objective, best balancer minus plain sum\n"
        "(1 = all that is reachable).  White: the plain sum is as good.  Hatched: nothing helps.",
        fontsize=12,
    )
    save(figure, path)


def draw_methods(maps: Maps, settings: dict[str, Any], path: Path) -> None:
    """One small panel a method, K and ratio: its worst progress."""
    methods, ratios = list(next(iter(maps.values()))["methods"]), settings["ratios"]
    columns = [(k, place) for k in maps for place in range(len(ratios))]
    size = (1.55 * len(columns) + 2.4, 0.86 * len(methods) + 1.5)
    figure, panels = plt.subplots(len(methods), len(columns), figsize=size, squeeze=False, layout="constrained")
    for row, name in zip(panels, methods, strict=True):
        for axes, (k, place) in zip(row, columns, strict=True):
            image = _heat(axes, maps[k]["methods"][name]["worst"][place], "cividis", 0.0)
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=10)
    for axes, (k, place) in zip(panels[0], columns, strict=True):
        axes.set_title(f"K = {k}\nscales {ratios[place]:g} : 1", fontsize=9)
    _ticks(panels[-1, -1], settings, 6)
    panels[-1, -1].yaxis.tick_right()
    panels[-1, -1].tick_params(length=0, axis="x", rotation=90)
    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.5, aspect=40, pad=0.01)
    bar.set_label("worst progress: 0 = no better than not to train, 1 = all that is reachable", fontsize=10)
    figure.suptitle(
        "Progress of the worst-off objective, each method at its best learning rate\n"
        "Each panel: conflict on the left, agreement on the right, exact gradients on top, mostly noise below",
        fontsize=11,
    )
    save(figure, path)


def _heat(axes: Axes, values: list[list[float]], colours: str, least: float) -> AxesImage:
    axes.spines[:].set_color(FAINT)
    return axes.imshow(values, cmap=colours, vmin=least, vmax=1.0, aspect="auto")


def _signed(value: float) -> str:
    text = f"{value:+.2f}".replace("0.", ".").replace("-", "−")
    return "0" if text[1:] == ".00" else text


def _ticks(axes: Axes, settings: dict[str, Any], size: float) -> None:
    cosines, ratios = settings["cosines"], settings["signal_to_noise"]
    axes.set_xticks(range(len(cosines)), [f"{cosine:g}".replace("-", "−") for cosine in cosines], fontsize=size)
    axes.set_yticks(range(len(ratios)), [ratio.replace("inf", "∞") for ratio in ratios], fontsize=size)
    axes.tick_params(length=0)
