"""Compare the ways of docs/examples/grpo.py to use three rewards: python docs/examples/grpo_report.py.

Writes docs/results/grpo.json, draws docs/images/grpo.png and prints the table of docs/grpo.md, in half an hour.
"""

import json
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt
import torch
from grpo import RANGES, REWARDS, label, train

RESULTS, FIGURE = (Path(__file__).parents[1] / name for name in ("results/grpo.json", "images/grpo.png"))
COMPARED = [("marble", 0.2), ("marble", 0.0), ("sum_then_normalise", 0.0), ("normalise_then_sum", 0.0)]
RATES, SWEEP_SEED, SEEDS = (5e-4, 1e-3, 2e-3, 4e-3), 100, (0, 1, 2, 3, 4)


def report():
    """Train each method at each rate, and on all seeds at the rate that suits it best."""
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for method, floor in COMPARED:
        for rate in RATES:
            ensure(runs, method, floor, rate, SWEEP_SEED)
        for seed in SEEDS:
            ensure(runs, method, floor, best_rate(runs, label(method, floor)), seed)
    print(table(runs))
    draw(runs)


def ensure(runs, method, floor, rate, seed):
    """Train, unless the file has it."""
    if any((r["method"], r["lr"], r["seed"]) == (label(method, floor), rate, seed) for r in runs):
        return
    result = train(method, seed=seed, lr=rate, floor=floor)
    del result["passes"]
    runs.append(result)
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
    print(result["method"], rate, seed, result["after"], f"{result['seconds']} s", flush=True)


def best_rate(runs, name):
    """The learning rate with the best mean of the three rewards, on a seed that is not shown."""
    tried = [r for r in runs if (r["method"], r["seed"]) == (name, SWEEP_SEED)]
    return max(tried, key=lambda r: r["after"]["overall"])["lr"]


def reported(runs):
    """The runs to show: those of SEEDS at the best rate, by method."""
    names = [label(*pair) for pair in COMPARED]
    return {
        n: [r for r in runs if r["method"] == n and r["lr"] == best_rate(runs, n) and r["seed"] in SEEDS] for n in names
    }


def table(runs):
    """Held-out rewards before and after: mean ± standard deviation over the seeds."""
    columns = (*REWARDS, "overall", "perfect")
    lines = ["| | " + " | ".join(columns) + " | lr | passes per step |", "|---" * (len(columns) + 3) + "|"]
    rows = {"before": ("before", next(iter(reported(runs).values())))}
    rows |= {name: ("after", group) for name, group in reported(runs).items()}
    for name, (when, group) in rows.items():
        cells = [[run[when][c] for run in group] for c in columns]
        line = [name, *(f"{mean(v):z.3f} ± {stdev(v):.3f}" for v in cells)]
        line += (
            ["", ""]
            if when == "before"
            else [f"{group[0]['lr']:g}", f"{mean(r['passes_per_step'] for r in group):.2f}"]
        )
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def draw(runs):
    """The rewards over training, one line for each method: the mean of the seeds, and their range."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.9), layout="constrained")
    for name, group in reported(runs).items():
        curves = torch.tensor([run["curve"] for run in group])
        rollouts = 5 * torch.arange(curves.shape[1]) + 2.5
        for k, axis in enumerate(axes):
            (line,) = axis.plot(rollouts, curves[:, :, k].mean(0), label=name)
            bounds = curves[:, :, k].aminmax(dim=0)
            axis.fill_between(rollouts, *bounds, color=line.get_color(), alpha=0.15, linewidth=0)
            axis.set(title=REWARDS[k], xlabel="rollouts")
            axis.axhline(RANGES[1, k], color="grey", linewidth=0.8, linestyle=":")
            axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COMPARED), frameon=False)
    figure.savefig(FIGURE, dpi=110)


if __name__ == "__main__":
    torch.set_num_threads(1)
    report()
