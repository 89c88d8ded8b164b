"""Regions of the map: where balancing pays, where the plain sum is as good, where nothing helps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PLAIN = "weighted_sum"
SUMS = (PLAIN, "tuned_sum")
"""No balancers: fixed weights, plain and tuned."""

PAYS = 0.05
"""Smallest difference of worst progress that counts, if it is two standard errors or more as well."""

HELPS = 0.1
"""Where neither the best balancer nor the plain sum has this much worst progress, nothing helps."""

REGIONS = ("balancing pays", "plain sum as good", "plain sum better", "nothing helps")


def compare(pieces: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare methods with the plain sum in each cell, on the same draws.

    Args:
        pieces: for each method "tuned" and "learning_rate", shape (ratios, signal-to-noise, cosines), and "worst", with
            the seeds as a fourth dimension.

    Returns:
        Nested lists of the cells' shape: for each method the mean worst progress, its standard error, the learning rate
        and what it gains over the plain sum, with error; and the balancer that was best on the tuning draws, its gain
        over each sum on the others, with error, and the region.
    """
    worst = {name: np.array(piece["worst"]) for name, piece in pieces.items()}
    balancers = [name for name in pieces if name not in SUMS]
    place = np.argmax([pieces[name]["tuned"] for name in balancers], axis=0)
    best = np.take_along_axis(np.stack([worst[name] for name in balancers]), place[None, ..., None], axis=0)[0]
    gains = {name: _mean(best - worst[name]) for name in SUMS if name in worst}
    gain, error = gains[PLAIN]
    highest = np.maximum(best, worst[PLAIN]).mean(-1)
    region = np.full(gain.shape, REGIONS[1], dtype=object)
    region[_above(gain, error)] = REGIONS[0]
    region[_above(-gain, error)] = REGIONS[2]
    region[highest < HELPS] = REGIONS[3]
    return {
        "best": {
            "method": np.array(balancers, dtype=object)[place].tolist(),
            "gain": {name: _rounded(of) for name, (of, _) in gains.items()},
            "error": {name: _rounded(of) for name, (_, of) in gains.items()},
            "region": region.tolist(),
        },
        "methods": {
            name: {
                **dict(zip(("worst", "error"), map(_rounded, _mean(of)), strict=True)),
                **dict(zip(("gain", "gain_error"), map(_rounded, _mean(of - worst[PLAIN])), strict=True)),
                "learning_rate": pieces[name]["learning_rate"],
            }
            for name, of in worst.items()
        },
    }


def record(maps: dict[str, dict[str, Any]], methods: list[str]) -> dict[str, dict[str, Any]]:
    """For each method the mean over all cells, over those of each K and ratio, and how often it beats the plain sum."""
    found = {}
    for name in methods:
        of = {k: {key: np.array(values) for key, values in of_k["methods"][name].items()} for k, of_k in maps.items()}
        found[name] = {
            "mean": round(float(np.mean([cells["worst"] for cells in of.values()])), 4),
            "by_ratio": {k: _rounded(cells["worst"].mean((1, 2))) for k, cells in of.items()},
            "by_signal_to_noise": {k: _rounded(cells["worst"].mean((0, 2))) for k, cells in of.items()},
            "better": sum(int(_above(cells["gain"], cells["gain_error"]).sum()) for cells in of.values()),
            "worse": sum(int(_above(-cells["gain"], cells["gain_error"]).sum()) for cells in of.values()),
        }
    return found


def count(maps: dict[str, dict[str, Any]], settings: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """How many cells of each region there are, by K and ratio, and in how many a sum is beaten or better."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for k, of_k in maps.items():
        best, found[k] = of_k["best"], {}
        for place, ratio in enumerate(settings["ratios"]):
            regions = Counter(np.ravel(best["region"][place]).tolist())
            against = {}
            for name, gain in best["gain"].items():
                difference, error = np.array(gain[place]), np.array(best["error"][name][place])
                against[f"better than {name}"] = int(_above(difference, error).sum())
                against[f"worse than {name}"] = int(_above(-difference, error).sum())
            found[k][f"{ratio:g}"] = {region: regions[region] for region in REGIONS} | against
    return found


def _mean(values: Array) -> tuple[Array, Array]:
    """Mean over the seeds and its standard error."""
    return values.mean(-1), values.std(-1, ddof=1) / np.sqrt(values.shape[-1])


def _above(difference: Array, error: Array) -> NDArray[np.bool_]:
    return (difference >= PAYS) & (difference >= 2 * error)


def _rounded(values: Array) -> Any:
    return np.round(values, 4).tolist()
