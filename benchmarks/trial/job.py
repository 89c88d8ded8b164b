"""One run of the trial: train, measure the held-out prompts on the way, and say what the applied updates did."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.trial.distil import Distilled, adapters_of
from benchmarks.trial.methods import DISTILLED, METHODS, PLAIN_SUM, PUBLISHED, TRAINER, method_settings, reward_of
from benchmarks.trial.probe import cosines
from benchmarks.trial.published import PublishedMarble
from benchmarks.trial.regimes import settings as regime_settings
from benchmarks.trial.store import Job, Result, Store
from integrations.diffusion_nft.balancing import Method
from integrations.diffusion_nft.config import Config
from integrations.diffusion_nft.evaluation import HeldOut
from integrations.diffusion_nft.pipeline import load_pipeline
from integrations.diffusion_nft.run import build_all_rewards
from integrations.diffusion_nft.trainer import Trainer

MEASURES = 3  # of the held-out prompts, evenly over the run, after the one before it


def perform(job: Job, base: Config, store: Store, weights: list[float] | None, experts: dict[str, Path]) -> Result:
    """Make a run and leave its file; an error is recorded and not raised.

    Args:
        job: The run.
        base: The config that all runs share.
        store: Where the file goes.
        weights: The tuned sum's.
        experts: The weights of the specialists that a distilled model learns from, by reward.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        found: Result = {"status": "done", "weights": weights, **_run(job, base, store, weights, experts)}
    except Exception as error:
        found = {"status": "failed", "error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
    found |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    store.write(job, found)
    return found


def configure(job: Job, base: Config, weights: list[float] | None) -> Config:
    """The config of a run."""
    reward = reward_of(job.method)
    trained = base.rewards if reward is None else [reward]
    changes = {
        "seed": job.seed,
        "rewards": trained,
        "optimizer": {"lr": job.lr},
        "weighted_sum": {"weights": weights},
    }
    values = base.model_dump()
    regime = regime_settings(job.regime, base.rewards, trained)
    for change in (changes, regime, method_settings(job.method, trained, base.steps)):
        for key, value in change.items():
            values[key] = {**values[key], **value} if isinstance(value, dict) else value
    return Config.model_validate(values)


def _run(job: Job, base: Config, store: Store, weights: list[float] | None, experts: dict[str, Path]) -> Result:
    config = configure(job, base, weights)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    rewards = build_all_rewards(base.rewards)
    trained = {name: rewards[name] for name in config.rewards}
    build = TRAINER if reward_of(job.method) else METHODS[job.method].build
    kind = PublishedMarble if build == PUBLISHED else Trainer
    trainer = kind(config, load_pipeline(config), trained, Method(config))
    held_out = HeldOut(config, trainer.latents, rewards)
    found: Result = {}
    if job.method == PLAIN_SUM:
        found["spreads"] = np.nanstd(trainer.rollout().rewards.numpy(), axis=1).tolist()
    step = Distilled(trainer, adapters_of(experts)).step if build == DISTILLED else trainer.step
    found["curve"] = _train(trainer, held_out, step)
    if reward_of(job.method):
        store.write_adapters(job, trainer.policy.state_dict())
    return found


def _train(trainer: Trainer, held_out: HeldOut, step: Callable[[], Any]) -> list[dict[str, Any]]:
    """All steps of a run; returns the measured points: step, rewards in their own units, cosines."""
    steps = trainer.config.steps
    marks = {round(steps * i / MEASURES) for i in range(1, MEASURES + 1)}
    curve, before = [_point(trainer, held_out)], _copy(trainer)
    while trainer.done < steps:
        step()
        if trainer.done in marks:
            change = [now - old for now, old in zip(_copy(trainer), before, strict=True)]
            curve.append(_point(trainer, held_out, change))
            before = _copy(trainer)
    return curve


def _copy(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.policy.parameters]


def _point(trainer: Trainer, held_out: HeldOut, change: list[torch.Tensor] | None = None) -> dict[str, Any]:
    with trainer.policy.averaged():
        measured = held_out.measure()
    point = {
        "step": trainer.done,
        "rewards": dict(zip(held_out.rewards, measured.rewards.nanmean(1).tolist(), strict=True)),
    }
    if change is None:
        return point
    return {**point, "cosines": cosines(trainer, measured, held_out.groups, change)}
