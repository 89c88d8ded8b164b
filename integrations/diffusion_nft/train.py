"""Train a LoRA on several rewards: python integrations/diffusion_nft/train.py --config tiny [key=value …]."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

if not __package__:  # run as a file: import from the checkout, and not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from integrations.diffusion_nft.command_line import Parser, run
from integrations.diffusion_nft.config import UserError, find_config, load_config


def build_parser() -> Parser:
    """The command's arguments."""
    parser = Parser(prog="train.py", description=__doc__)
    parser.add_argument("--config", help="a name in integrations/diffusion_nft/configs, or a YAML file")
    parser.add_argument("--method", help="marble, weighted_sum (of the raw rewards), or any other balancer")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="new folder (default: runs/<config>-<method>-<time>)"
    )
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with the interrupted run in DIR")
    parser.add_argument("--print-config", action="store_true", help="print the whole resolved config and exit")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, e.g. steps=20 optimizer.lr=1e-4")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run(lambda: _train(argv))


def _train(argv: Sequence[str] | None) -> None:
    started = time.perf_counter()
    args = build_parser().parse_intermixed_args(argv)
    if args.resume is not None:
        if args.config or args.method or args.output or args.overrides or args.print_config:
            raise UserError("--resume takes its settings from the run's config.yaml; give nothing else with it")
        from integrations.diffusion_nft.run import resume

        resume(args.resume, started)
        return
    if args.config is None:
        raise UserError("give --config NAME (tiny is the one that runs anywhere) or --resume DIR")
    overrides = [*args.overrides, *([f"method={args.method}"] if args.method else [])]
    config = load_config(args.config, overrides)
    if args.print_config:
        from integrations.diffusion_nft.balancing import Method

        Method(config)  # an unknown method or a wrong option of it is an error here as well
        print(config.to_yaml(), end="")
        return
    from integrations.diffusion_nft.run import train

    name = f"{find_config(args.config).stem}-{config.method}-{datetime.now():%Y%m%d-%H%M%S}"
    train(config, args.output or Path("runs") / name, started)


if __name__ == "__main__":
    sys.exit(main())
