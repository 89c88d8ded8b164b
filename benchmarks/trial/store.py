"""A trial's folder: one small JSON file a run, whole or not there; a run that failed leaves its error."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.output import write_json

Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        regime: One of `regimes.REGIMES`.
        method: One of `methods.METHODS`, or a specialist.
        seed: Decides prompts, noise and initial weights.
        lr: Learning rate.
        draw: Which draw of the random search for weights it is; None for any other method.
    """

    regime: str
    method: str
    seed: int
    lr: float
    draw: int | None = None

    def __str__(self) -> str:
        draw = "" if self.draw is None else f", weights {self.draw}"
        return f"{self.regime} {self.method}, seed {self.seed}, lr {self.lr:g}{draw}"


class Store:
    """The files of a trial.

    Args:
        folder: Made when the first run is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def bind(self, config: dict[str, Any]) -> None:
        """Keep the config that all runs of the folder share.

        Raises:
            ValueError: The folder has runs of another config.
        """
        path = self.folder / "config.json"
        kept = json.loads(path.read_text()) if path.exists() else None
        if kept is not None and kept != json.loads(json.dumps(config)):
            raise ValueError(f"--folder: {self.folder} has runs of another config; name a new folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        if kept is None:
            write_json(path, config)

    def path(self, job: Job) -> Path:
        """The file of a run."""
        draw = "" if job.draw is None else f"_weights-{job.draw}"
        return self.folder / job.regime / job.method / f"seed-{job.seed}_lr-{job.lr:g}{draw}.json"

    def adapters(self, job: Job) -> Path:
        """The file of a specialist's LoRA weights."""
        return self.path(job).with_suffix(".safetensors")

    def write(self, job: Job, result: Result) -> None:
        """Leave a run's file."""
        path = self.path(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"job": asdict(job), **result})

    def write_adapters(self, job: Job, tensors: dict[str, torch.Tensor]) -> None:
        """Leave a specialist's LoRA weights, whole or not at all."""
        path = self.adapters(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)

    def read(self, job: Job) -> Result | None:
        """A run's result, None if it has not been made."""
        path = self.path(job)
        return json.loads(path.read_text()) if path.exists() else None

    def done(self, job: Job) -> Result | None:
        """A run's result, None if it has not been made or failed."""
        result = self.read(job)
        return result if result is not None and result["status"] == "done" else None

    def missing(self, jobs: Iterable[Job], *, retry: bool = False) -> list[Job]:
        """The runs without a file and, with `retry`, those that failed."""
        return [job for job in jobs if (self.done(job) if retry else self.read(job)) is None]

    def results(self) -> list[Result]:
        """Every result there is, failed ones too."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("*/*/*.json"))]
