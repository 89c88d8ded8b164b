"""From a trial's files to numbers: mean ± standard error over seeds for every regime and method."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.trial.methods import METHODS, specialist
from benchmarks.trial.plan import TUNING_SEED, Plan
from benchmarks.trial.scaling import Scale
from benchmarks.trial.store import Job, Result

CONFLICT = -1e-6  # a cosine below this counts as a conflict; above it, it is rounding
SPECIALISTS = "specialists"


def summarise(plan: Plan) -> dict[str, Any]:
    """Everything the table and the figure show.

    Returns:
        `regimes`: for each its `start`, the specialists' `gain` and its `methods`; what the runs took; and those that
        failed. Every number of a method is a pair: mean over seeds, standard error (None with one seed).
    """
    every = plan.store.results()
    return {
        "rewards": list(plan.rewards),
        "regimes": {regime: found for regime in plan.regimes if (found := _regime(plan, regime, every))},
        "runs": len(every),
        "tuning_runs": sum(result["job"]["seed"] == TUNING_SEED for result in every),
        "hours": sum(result["seconds"] for result in every) / 3600,
        "cpu_hours": sum(result["cpu_seconds"] for result in every) / 3600,
        "failed": {str(Job(**r["job"])): r["error"] for r in every if r["status"] != "done"},
    }


def _regime(plan: Plan, regime: str, every: Sequence[Result]) -> dict[str, Any] | None:
    experts = {name: _runs(plan, plan.ground(regime), specialist(name), every) for name in plan.rewards}
    if not all(experts.values()):
        return None
    scale = Scale.of(experts)
    methods = {
        method: _method(plan, regime, method, runs, scale)
        for method in plan.methods
        if (runs := _runs(plan, regime, method, every))
    }
    gains = {n: [r["curve"][-1]["rewards"][n] - scale.start[n] for r in runs] for n, runs in experts.items()}
    return {
        "start": scale.start,
        SPECIALISTS: {"changes": {name: mean_and_error(values) for name, values in gains.items()}},
        "gain": scale.gain,
        "methods": methods,
    }


def _runs(plan: Plan, regime: str, method: str, every: Sequence[Result]) -> list[Result]:
    """The finished runs of a method at its chosen settings, whatever their seeds."""
    chosen = plan.job(regime, method, 0)
    return [
        result
        for result in every
        if result["status"] == "done"
        and result["job"]["seed"] != TUNING_SEED
        and Job(**{**result["job"], "seed": 0}) == chosen
    ]


def _method(plan: Plan, regime: str, method: str, runs: Sequence[Result], scale: Scale) -> dict[str, Any]:
    chosen = plan.job(regime, method, 0)
    ends = [run["curve"][-1]["rewards"] for run in runs]
    batches = [batch for run in runs for batch in conflicts(run)]
    return {
        "seeds": len(runs),
        "lr": chosen.lr,
        "weights": runs[0]["weights"],
        "changes": {name: mean_and_error([end[name] - scale.start[name] for end in ends]) for name in plan.rewards},
        "worst": mean_and_error([scale.worst(end) for end in ends]),
        "area": mean_and_error([scale.area(run["curve"]) for run in runs]),
        "conflicts": mean_and_error([float(np.mean(conflicts(run))) for run in runs if conflicts(run)]),
        "batches": len(batches),
        "cosines": _mean_cosines(plan, runs),
        "curve": [[point["step"], scale.worst(point["rewards"])] for point in _mean_curve(runs)],
        "seconds": float(np.mean([run["seconds"] for run in runs])),
    }


def conflicts(run: Result) -> list[bool]:
    """For every held-out batch of a run, whether the applied update goes against some reward there."""
    batches = [batch for point in run["curve"] for batch in point.get("cosines", [])]
    return [any(c is not None and c < CONFLICT for c in batch) for batch in batches]


def _mean_cosines(plan: Plan, runs: Sequence[Result]) -> dict[str, float | None]:
    """Mean over batches of each reward's cosine with the applied update."""
    batches = [batch for run in runs for point in run["curve"] for batch in point.get("cosines", [])]
    columns = ([c for c in column if c is not None] for column in zip(*batches, strict=True))
    return {name: float(np.mean(c)) if c else None for name, c in zip(plan.rewards, columns, strict=False)}


def _mean_curve(runs: Sequence[Result]) -> list[dict[str, Any]]:
    points = zip(*(run["curve"] for run in runs), strict=True)
    return [
        {"step": at[0]["step"], "rewards": {n: float(np.mean([p["rewards"][n] for p in at])) for n in at[0]["rewards"]}}
        for at in points
    ]


def mean_and_error(values: Iterable[float]) -> tuple[float, float | None]:
    """Mean and its standard error over seeds; the error is None for a single seed, both NaN and None for none."""
    array = np.array(list(values))
    if not len(array):
        return math.nan, None
    return float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None


def markdown(summary: dict[str, Any], command: str) -> str:
    """The tables as a page: one for each regime."""
    lines = [
        "# The trial, measured",
        "",
        f"By `{command}`: {summary['runs']} runs, {summary['tuning_runs']} of them for tuning, "
        f"{summary['hours']:.1f} hours of runs in all ({summary['cpu_hours']:.1f} of one core), and "
        f"`{command.split(' run ')[0]} report nft_tiny`. What is compared and how: [the trial](../trial.md).",
    ]
    for regime, found in summary["regimes"].items():
        names = summary["rewards"]
        lines += [
            "",
            f"## {regime}",
            "",
            "| method | seeds | lr | " + " | ".join(names) + " | worst | area | conflicts |",
        ]
        lines += ["|---" * (len(names) + 7) + "|"]
        start = " | ".join(f"{found['start'][name]:.3f}" for name in names)
        lines += [f"| *start* | | | {start} | 0 | 0 | | |"]
        experts = " | ".join(_cell(found[SPECIALISTS]["changes"][name], "+.3f") for name in names)
        lines += [f"| *each reward's specialist* | | | {experts} | 1 | | | |"]
        for method, row in sorted(found["methods"].items(), key=lambda item: -item[1]["worst"][0]):
            changes = " | ".join(_cell(row["changes"][name], "+.3f") for name in names)
            measures = " | ".join(
                _cell(row[key], form) for key, form in (("worst", "+.2f"), ("area", "+.2f"), ("conflicts", ".2f"))
            )
            known = [cosine for cosine in row["cosines"].values() if cosine is not None]
            smallest = f"{min(known):+.3f}" if known else ""
            lines += [f"| {method} | {row['seeds']} | {row['lr']:g} | {changes} | {measures} | {smallest} |"]
    if summary["failed"]:
        lines += ["", "## Runs that failed", "", *(f"- {job}: {error}" for job, error in summary["failed"].items())]
    lines += ["", "Methods:", "", *(f"- **{name}**: {method.about}." for name, method in METHODS.items())]
    return "\n".join(lines) + "\n"


def _cell(pair: Sequence[float | None], form: str) -> str:
    mean, error = pair
    if mean is None or math.isnan(mean):
        return ""
    return f"{mean:{form}}" + ("" if error is None else f" ± {error:{form.lstrip('+')}}")
