"""summary.json: what a run changed on the held-out prompts, and how its updates agreed with every objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from integrations.diffusion_nft.config import Config
from integrations.diffusion_nft.evaluation import STANDARD_ERROR, compare


def summarise(
    config: Config,
    metrics: Sequence[dict[str, Any]],
    evaluations: dict[int, dict[str, list[float]]],
    groups: np.ndarray,
    seconds: float,
) -> dict[str, Any]:
    """The run's summary.

    Args:
        config: The run's settings.
        metrics: All lines of metrics.jsonl.
        evaluations: Held-out rewards by step: at least the first and the last.
        groups: The prompt of each held-out picture.
        seconds: Wall-clock of the whole run, evaluations included.
    """
    before, after = evaluations[min(evaluations)], evaluations[max(evaluations)]
    changes = {name: compare(before[name], after[name], groups) for name in after}
    measured = [record for record in metrics if record["refreshed"]]
    smallest = [record["min_cosine"] for record in measured]
    phases = metrics[0]["seconds"]
    return {
        "rewards": {name: changes[name] for name in config.rewards},
        "held_out": {name: changes[name] for name in config.held_out_rewards},
        "steps": len(metrics),
        "method": config.method,
        "seconds": seconds,
        "min_cosine": min(smallest, default=None),
        "mean_min_cosine": _mean(smallest),
        "conflict_rate": _mean([record["conflicts"] > 0 for record in measured]),
        "measured_steps": len(measured),
        "seconds_per_step": {phase: float(np.mean([r["seconds"][phase] for r in metrics])) for phase in phases},
        "train_seconds_measured_step": _mean([record["seconds"]["train"] for record in measured]),
        "train_seconds_other_step": _mean([r["seconds"]["train"] for r in metrics if not r["refreshed"]]),
        "evaluation": {
            "prompts": len(np.unique(groups)),
            "pictures": len(groups),
            "seed": config.evaluation.seed,
            "steps": config.evaluation.steps,
            "standard_error": STANDARD_ERROR,
        },
    }


def table(summary: dict[str, Any]) -> list[str]:
    """The summary's rewards as plain lines, one per reward."""
    lines = [f"{'reward':16} {'before':>8} {'after':>8} {'change':>8} {'± se':>7}"]
    for kind in ("rewards", "held_out"):
        lines += [
            f"{name:16} {row['before']:8.3f} {row['after']:8.3f} {row['change']:+8.3f} {row['se']:7.3f}"
            for name, row in summary[kind].items()
        ]
    return lines


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
