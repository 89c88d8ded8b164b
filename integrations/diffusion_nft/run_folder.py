"""A run's folder: every file whole at every moment, JSON without NaN, nothing overwritten.

Files are written next to their name and renamed; a checkpoint is a folder that gets its name when it is complete.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from integrations.diffusion_nft.config import Config, UserError

LORA_FILE = "pytorch_lora_weights.safetensors"


class RunFolder:
    """The files of one run.

    Args:
        path: An existing run folder; `create` makes a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        """Make a new folder with the run's config.

        Raises:
            UserError: The folder exists and holds something, or cannot be made.
        """
        check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make output folder {path}: {error.strerror}") from None
        folder = cls(path)
        folder.write_text("config.yaml", config.to_yaml())
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open a run to resume or evaluate it.

        Raises:
            UserError: It is no run folder.
        """
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path} is no run folder: it has no config.yaml")
        return cls(path)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A temporary path that takes the given name when the block ends well."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}")
        try:
            yield temporary
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file atomically."""
        with self.writing(name) as path:
            path.write_text(text, encoding="utf-8")

    def write_json(self, name: str, value: Any) -> None:
        """Write JSON atomically; NaN and infinities become null."""
        self.write_text(name, json.dumps(_plain(value), indent=1, allow_nan=False) + "\n")

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add one whole line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(record), allow_nan=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def write_evaluation(self, step: int, table: dict[str, list[float]]) -> None:
        """Keep the held-out rewards, picture by picture."""
        self.write_json(f"evaluations/{_label(step)}.json", table)

    def evaluations(self) -> dict[int, dict[str, list[float]]]:
        """The held-out rewards by step; NaN where a reward does not apply."""
        found = {}
        for path in sorted((self.path / "evaluations").glob("step-*.json")):
            table = json.loads(path.read_text(encoding="utf-8"))
            found[int(path.stem.removeprefix("step-"))] = {
                name: [math.nan if value is None else value for value in values] for name, values in table.items()
            }
        return found

    def forget_after(self, step: int) -> None:
        """Drop metrics and evaluations later than a step: a resumed run makes them again."""
        kept = [record for record in self.metrics() if record["step"] <= step]
        self.write_text("metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))
        for later in (s for s in self.evaluations() if s > step):
            (self.path / "evaluations" / f"{_label(later)}.json").unlink()

    def save_checkpoint(
        self,
        step: int,
        export: Callable[[Path], None],
        policy: dict[str, torch.Tensor],
        optimizer: dict[str, Any],
        state: dict[str, Any],
    ) -> Path:
        """Write `checkpoints/step-…`, whole or not at all.

        Args:
            step: Completed optimizer steps.
            export: Writes the LoRA for `pipe.load_lora_weights` into a folder.
            policy: All LoRA weights.
            optimizer: The optimizer's state.
            state: The rest, for JSON.
        """
        target = self.path / "checkpoints" / _label(step)
        if target.exists():
            return target
        temporary = target.with_name(f".{target.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        export(temporary)
        save_file(policy, temporary / "policy.safetensors")
        torch.save(optimizer, temporary / "optimizer.pt")
        (temporary / "state.json").write_text(json.dumps(_plain({"step": step, **state})), encoding="utf-8")
        shutil.copyfile(self.path / "config.yaml", temporary / "config.yaml")
        temporary.replace(target)
        return target

    def latest_checkpoint(self) -> Path | None:
        """The checkpoint with the most steps."""
        return max((self.path / "checkpoints").glob("step-*"), default=None)


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Policy, optimizer and the rest of a checkpoint; runs no code from the files."""
    policy = load_file(path / "policy.safetensors")
    optimizer = torch.load(path / "optimizer.pt", weights_only=True)
    return policy, optimizer, json.loads((path / "state.json").read_text(encoding="utf-8"))


def check_free(path: Path) -> None:
    """Raise `UserError` if an output folder holds something already."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"output folder {path} exists already; give another --output, or --resume {path}")


def _label(step: int) -> str:
    return f"step-{step:06d}"


def _plain(value: Any) -> Any:
    """JSON-ready: tensors and tuples to lists, non-finite numbers to null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
