"""Turn the runs of a trial into its table and figure: `report nft_tiny`. Works at any time, with what is there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drawing import add_picture, check_picture
from benchmarks.running import add_trial, make_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add_trial(parser)
    add_picture(parser, "nft_tiny.png")
    parser.add_argument("--table", type=Path, help="also write the tables to this Markdown file")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print the tables and draw the figure.

    Raises:
        ValueError: An option is wrong, or no regime has its specialists yet.
    """
    from benchmarks.trial.drawing import draw
    from benchmarks.trial.summary import markdown, summarise

    check_picture(options.picture)
    if options.table is not None and not options.table.parent.is_dir():
        raise ValueError(f"--table: the folder {options.table.parent} does not exist")
    plan, _ = make_plan(options)
    summary = summarise(plan)
    if not any(found["methods"] for found in summary["regimes"].values()):
        raise ValueError(
            f"--folder: {options.folder} has no regime with its specialists and a method; see `run --list`"
        )
    page = markdown(summary, f"python -m benchmarks run {options.trial}")
    console.print(page, highlight=False, soft_wrap=True, markup=False)
    if options.table is not None:
        options.table.write_text(page, encoding="utf-8")
    draw(summary, options.picture)
    return summary
