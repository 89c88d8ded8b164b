"""Command line of the benchmarks: ``python -m benchmarks speed``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.speed import solver_times, step_ratios


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name what can be measured")
    speed = commands.add_parser("speed", help="step times as ratios to a plain step, and solver times")
    speed.add_argument("--objectives", type=int, nargs="+", default=[2, 5, 10, 20], help="K to measure")
    speed.add_argument("--width", type=int, default=512, help="width of the network")
    speed.add_argument("--depth", type=int, default=3, help="hidden layers beyond the first")
    speed.add_argument("--batch", type=int, default=256)
    speed.add_argument("--rounds", type=int, default=15, help="timed rounds of ten steps a mode")
    speed.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args(arguments)
    console = Console()
    if options.command == "list":
        console.print("speed  step times as ratios to a plain step, and solver times")
        return 0
    if min([*options.objectives, options.width, options.batch, options.rounds]) < 1 or options.depth < 0:
        parser.error("--objectives, --width, --batch and --rounds must be at least 1, --depth at least 0")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out: the folder {options.out.parent} does not exist")
    shape = {"width": options.width, "depth": options.depth, "batch": options.batch, "rounds": options.rounds}
    steps = [step_ratios(k, **shape) for k in options.objectives]
    modes = [key for key, value in steps[0].items() if isinstance(value, dict)]
    table = Table("K", "parameters", "plain (ms)", *modes[1:], title="time of a step, relative to a plain one")
    for row in steps:
        cells = [
            f"{row[m]['ratio']:.2f} ({row[m]['quartiles'][0]:.2f}–{row[m]['quartiles'][1]:.2f})" for m in modes[1:]
        ]
        table.add_row(str(row["objectives"]), f"{row['parameters']:,}", f"{row['plain_ms']:.2f}", *cells)
    console.print(table)
    solver = solver_times([2, 5, 16, 64], draws=300)
    table = Table("K", "µs", title="min_norm, median")
    for size, microseconds in solver.items():
        table.add_row(str(size), f"{microseconds:.0f}")
    console.print(table)
    if options.out is not None:
        figures = {
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "steps": steps,
            "min_norm_us": solver,
        }
        temporary = options.out.with_suffix(".partial")
        temporary.write_text(json.dumps(figures, indent=1) + "\n")
        temporary.replace(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
