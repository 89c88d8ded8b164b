"""A whole training run: measure, train, measure again, and leave a folder that tells the story."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from integrations.diffusion_nft import figures
from integrations.diffusion_nft.balancing import Method
from integrations.diffusion_nft.config import Config, UserError, load_config
from integrations.diffusion_nft.evaluation import HeldOut
from integrations.diffusion_nft.interrupt import Interrupt
from integrations.diffusion_nft.pipeline import load_pipeline
from integrations.diffusion_nft.progress import RunProgress
from integrations.diffusion_nft.rewards import Reward, build_rewards
from integrations.diffusion_nft.run_folder import RunFolder, check_free
from integrations.diffusion_nft.summary import summarise, table
from integrations.diffusion_nft.trainer import Trainer


def train(config: Config, output: Path, started: float) -> None:
    """Run a config into a new folder.

    Args:
        config: The run's settings.
        output: A folder that is not there yet, or is empty.
        started: `time.perf_counter()` when the command began: the summary's seconds leave nothing out.

    Raises:
        UserError: Something the user gave is wrong; nothing has been written.
        KeyboardInterrupt: The run was stopped; its files are whole and its last step is in a checkpoint.
    """
    check_free(output)
    Run(config).execute(output, started)


def resume(path: Path, started: float) -> None:
    """Go on with an interrupted run from its last checkpoint.

    Raises:
        UserError: There is nothing to resume in this folder.
    """
    folder = RunFolder.open(path)
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None:
        raise UserError(f"{path} has no checkpoint to resume from")
    if (path / "summary.json").exists():
        raise UserError(f"the run in {path} is finished (it has a summary.json); start a new one")
    Run(load_config(str(path / "config.yaml"))).execute(path, started, checkpoint)


def build_all_rewards(names: list[str]) -> dict[str, Reward]:
    """The rewards by name; an unknown one is a `UserError`."""
    try:
        return build_rewards(names)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from None


class Run:
    """Everything a run needs, built and checked before its folder is made.

    Args:
        config: The run's settings.

    Raises:
        UserError: A setting does not fit what is there.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._interrupt = Interrupt()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        method = Method(config)
        rewards = build_all_rewards([*config.rewards, *config.held_out_rewards])
        trained = {name: rewards[name] for name in config.rewards}
        self.trainer = Trainer(config, load_pipeline(config), trained, method, self._interrupt.check)
        self.held_out = HeldOut(config, self.trainer.latents, rewards)

    def execute(self, path: Path, started: float, checkpoint: Path | None = None) -> None:
        """Train into `path`, from a checkpoint if one is given."""
        start = started if checkpoint is None else started - self.trainer.load(checkpoint)
        folder = RunFolder.create(path, self.config) if checkpoint is None else RunFolder.open(path)
        folder.forget_after(self.trainer.done)
        with self._interrupt.listening(), RunProgress(self.config.steps, self.trainer.done) as progress:
            try:
                self._loop(folder, progress, start)
            except BaseException:
                if self.trainer.whole:
                    saved = self.trainer.save(folder, time.perf_counter() - start)
                    progress.note(f"stopped after step {self.trainer.done}; checkpoint: {saved}")
                    progress.note(f"go on with --resume {path}")
                raise
            summary = summarise(
                self.config, folder.metrics(), folder.evaluations(), self.held_out.groups, time.perf_counter() - start
            )
            folder.write_json("summary.json", summary)
            for line in table(summary):
                progress.note(line)
            if summary["measured_steps"]:
                cosine, rate = summary["min_cosine"], summary["conflict_rate"]
                progress.note(f"smallest cosine {cosine:.3f}, conflict rate {rate:.2f}")
            progress.note(f"{summary['seconds']:.0f} s; everything is in {path}")

    def _loop(self, folder: RunFolder, progress: RunProgress, start: float) -> None:
        trainer, every = self.trainer, self.config.evaluation.every
        if 0 not in folder.evaluations():
            progress.note("measuring the held-out prompts before training")
            self._evaluate(folder, "before")
        while trainer.done < self.config.steps:
            record = trainer.step()
            folder.append_metrics(record)
            progress.update(record)
            if record["losses"] is None:
                progress.note(f"step {record['step']}: no reward tells any two pictures apart; nothing to learn")
            if trainer.done < self.config.steps:
                if every and trainer.done % every == 0:
                    self._evaluate(folder, f"step-{trainer.done:06d}")
                if trainer.done % self.config.save_every == 0:
                    trainer.save(folder, time.perf_counter() - start)
        trainer.save(folder, time.perf_counter() - start)
        progress.note("measuring the held-out prompts after training")
        self._evaluate(folder, "after")
        evaluations, metrics = folder.evaluations(), folder.metrics()
        figures.save(folder, "rewards.png", figures.rewards_figure(metrics, evaluations, self.held_out.groups))
        figures.save(folder, "balance.png", figures.balance_figure(metrics, self.config.rewards))

    def _evaluate(self, folder: RunFolder, label: str) -> None:
        with self.trainer.policy.averaged():
            measured = self.held_out.measure(self._interrupt.check)
        folder.write_evaluation(self.trainer.done, self.held_out.table(measured))
        title = f"{label}: held-out prompts, {self.config.method}, step {self.trainer.done}"
        grid = figures.grid_figure(measured, list(self.held_out.rewards), self.config.evaluation.grid, title)
        figures.save(folder, f"samples/{label}.png", grid)
