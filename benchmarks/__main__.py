"""Command line of the benchmarks: ``python -m benchmarks list``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks import agreement, balancers, directions, noise, paths, regimes, reporting, running, speed
from benchmarks.output import write_json

COMMANDS = {
    "speed": speed,
    "balancers": balancers,
    "agreement": agreement,
    "directions": directions,
    "paths": paths,
    "noise": noise,
    "regimes": regimes,
    "run": running,
    "report": reporting,
}
"""Each is a module with ``add_arguments(parser)`` and ``run(options, console)``, which returns figures for a file."""


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measurements behind the documentation.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name what can be measured")
    about = {name: (module.__doc__ or "").split("\n")[0] for name, module in COMMANDS.items()}
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=about[name], description=module.__doc__)
        command.add_argument("--out", type=Path, help="also write the figures to this JSON file")
        module.add_arguments(command)
    options = parser.parse_args(arguments)
    console = Console()
    if options.command == "list":
        for name, line in about.items():
            console.print(f"{name:<10} {line}", highlight=False, soft_wrap=True)
        return 0
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out: the folder {options.out.parent} does not exist")
    try:
        figures = COMMANDS[options.command].run(options, console)
    except ValueError as error:
        parser.error(str(error))
    if options.out is not None:
        write_json(options.out, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
