"""How far each balancer is from independent implementations of the same method.

Methods and oracles are paired in this package's modules; each pair gives the largest difference of λ, relative to the
largest |λ|, over several numbers of objectives and random draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.agreement import losses, noise, projecting, solving

PAIRS: dict[tuple[str, str], Callable[[], float]] = {**losses.PAIRS, **projecting.PAIRS, **solving.PAIRS, **noise.PAIRS}
"""(method, oracle) -> the function that measures their difference."""

EXPLAINED: dict[tuple[str, str], str] = {**projecting.EXPLAINED, **solving.EXPLAINED}
"""Pairs that differ by more than 1e-6, and why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--methods", nargs="+", help="balancers to compare; default: all")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure and print the table.

    Raises:
        ValueError: a method has no oracle here.
    """
    unknown = set(options.methods or []) - {method.split(",")[0] for method, _ in PAIRS}
    if unknown:
        raise ValueError(f"--methods: there is nothing to compare {', '.join(map(repr, sorted(unknown)))} with")
    table = Table("method", "oracle", "largest difference")
    found: dict[str, dict[str, float]] = {}
    for (method, oracle), difference in sorted(PAIRS.items()):
        if options.methods is None or method.split(",")[0] in options.methods:
            found.setdefault(method, {})[oracle] = difference()
            table.add_row(method, oracle, f"{found[method][oracle]:.0e}")
    console.print(table)
    explained = {" / ".join(pair): why for pair, why in EXPLAINED.items() if pair[0] in found}
    for pair, why in explained.items():
        console.print(f"{pair}: {why}", highlight=False)
    return {"differences": found, "explained": explained}
