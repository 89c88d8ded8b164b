"""Measure a checkpoint on its held-out prompts: python integrations/diffusion_nft/evaluate.py --checkpoint DIR."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: import from the checkout, and not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from integrations.diffusion_nft.command_line import Parser, run
from integrations.diffusion_nft.config import UserError, load_config


def build_parser() -> Parser:
    """The command's arguments."""
    parser = Parser(prog="evaluate.py", description=__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="a run's folder (its last checkpoint) or one checkpoint"
    )
    parser.add_argument("--config", help="instead of --checkpoint: measure this config's pipeline without a LoRA")
    parser.add_argument("--rewards", nargs="+", metavar="NAME", help="default: those of the run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there (must not exist)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run(lambda: _evaluate(argv))


def _evaluate(argv: Sequence[str] | None) -> None:
    args = build_parser().parse_args(argv)
    if (args.checkpoint is None) == (args.config is None):
        raise UserError("give either --checkpoint DIR or --config NAME")
    if args.json is not None and args.json.exists():
        raise UserError(f"{args.json} exists already")
    checkpoint = None if args.checkpoint is None else find_checkpoint(args.checkpoint)
    config = load_config(args.config if checkpoint is None else str(checkpoint / "config.yaml"))
    result = evaluate_checkpoint(config, checkpoint, args.rewards)
    for name, row in result["rewards"].items():
        print(f"{name:16} {row['mean']:8.4f} ± {row['se']:.4f}  ({row['pictures']} pictures)")
    if args.json is not None:
        from integrations.diffusion_nft.run_folder import RunFolder

        RunFolder(args.json.parent).write_json(args.json.name, result)


def find_checkpoint(path: Path) -> Path:
    """A checkpoint folder, given itself or its run.

    Raises:
        UserError: There is none.
    """
    from integrations.diffusion_nft.run_folder import LORA_FILE, RunFolder

    if not path.is_dir():
        raise UserError(f"checkpoint folder {path} does not exist")
    found = path if (path / LORA_FILE).is_file() else RunFolder(path).latest_checkpoint()
    if found is None or not (found / "config.yaml").is_file():
        raise UserError(f"{path} holds no checkpoint of a run")
    return found


def evaluate_checkpoint(config: Any, checkpoint: Path | None, names: list[str] | None = None) -> dict[str, Any]:
    """Mean and standard error of each reward on the held-out prompts.

    The LoRA is read as any user of diffusers would read it: `pipe.load_lora_weights(checkpoint)`.

    Args:
        config: The run's `Config`.
        checkpoint: A checkpoint folder; None measures the pipeline alone.
        names: Rewards; default those of the config.
    """
    from integrations.diffusion_nft.evaluation import HeldOut, mean_and_error
    from integrations.diffusion_nft.pipeline import load_pipeline
    from integrations.diffusion_nft.run import build_all_rewards
    from integrations.diffusion_nft.sampling import Latents

    rewards = build_all_rewards(names or [*config.rewards, *config.held_out_rewards])
    pipeline = load_pipeline(config)
    if checkpoint is not None:
        pipeline.load_lora_weights(checkpoint)
    held_out = HeldOut(config, Latents(pipeline, config.size, config.max_sequence_length), rewards)
    table = held_out.table(held_out.measure())
    rows = {}
    for name, values in table.items():
        mean, error = mean_and_error(values, held_out.groups)
        rows[name] = {"mean": mean, "se": error, "pictures": sum(value == value for value in values)}
    return {"checkpoint": None if checkpoint is None else str(checkpoint), "rewards": rows}


if __name__ == "__main__":
    sys.exit(main())
