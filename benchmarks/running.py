"""Run a trial of training methods: `run nft_tiny`. Killed at any time, it goes on with the runs that are missing."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.trial.plan import Plan
    from benchmarks.trial.store import Job, Result
    from integrations.diffusion_nft.config import Config

TRIALS = ("nft_tiny",)
GUESS = 80.0  # seconds of a run while none has been made


def add_trial(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` and `report` share."""
    parser.add_argument("trial", choices=TRIALS, help="which trial")
    parser.add_argument("--folder", type=Path, default=Path("runs/nft_tiny"), help="where its runs are kept")
    parser.add_argument("--config", default="trial", help="a config of integrations/diffusion_nft, or a YAML file")
    parser.add_argument("--regimes", nargs="+", help="default: all")
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each method, from 0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add_trial(parser)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each a process with one thread")
    parser.add_argument("--retry", action="store_true", help="make failed runs again")
    parser.add_argument("--list", action="store_true", help="say what is missing and how long it takes; run nothing")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Make the missing runs, stage by stage.

    Raises:
        ValueError: An option is wrong.
    """
    if options.jobs < 1:
        raise ValueError("--jobs must be at least 1")
    plan, config = make_plan(options)
    if options.list:
        return _list(plan, options, console)
    plan.store.bind(config.model_dump(mode="json"))
    failed = made = 0
    with _processes(options.jobs) as pool:
        for title, jobs in plan.stages():
            missing = plan.store.missing(jobs, retry=options.retry)
            for number, (job, result) in enumerate(_perform_all(plan, config, missing, pool), start=1):
                made, failed = made + 1, failed + (result["status"] != "done")
                ending = f"{result['seconds']:.0f} s" if result["status"] == "done" else f"FAILED: {result['error']}"
                console.print(f"{title} {number}/{len(missing)}: {job}: {ending}", highlight=False, soft_wrap=True)
    console.print(f"{made} runs made, {failed} failed; everything is in {plan.store.folder}", soft_wrap=True)
    return {"made": made, "failed": failed}


def make_plan(options: argparse.Namespace) -> tuple[Plan, Config]:
    """The plan and config that the options name.

    Raises:
        ValueError: An option is wrong.
    """
    from benchmarks.trial.methods import METHODS
    from benchmarks.trial.plan import Plan
    from benchmarks.trial.regimes import REGIMES
    from benchmarks.trial.store import Store
    from integrations.diffusion_nft.config import load_config

    if options.seeds < 1:
        raise ValueError("--seeds must be at least 1")
    regimes, methods = options.regimes or list(REGIMES), options.methods or list(METHODS)
    for option, given, known in (("--regimes", regimes, REGIMES), ("--methods", methods, METHODS)):
        strange = [name for name in given if name not in known]
        if strange:
            raise ValueError(f"{option}: {strange[0]!r} is none of {', '.join(known)}")
    config = load_config(options.config)
    return Plan(Store(options.folder), config.rewards, regimes, methods, options.seeds), config


def _list(plan: Plan, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    seconds = [result["seconds"] for result in plan.store.results() if result["status"] == "done"]
    each = float(np.mean(seconds)) if seconds else GUESS
    table = Table("stage", "runs", "missing", "hours left")
    total = 0
    for title, jobs in plan.stages():
        missing = len(plan.store.missing(jobs, retry=options.retry))
        total += missing
        table.add_row(title, str(len(jobs)), str(missing), f"{missing * each / options.jobs / 3600:.2f}")
    hours = total * each / options.jobs / 3600
    console.print(table)
    console.print(f"{total} runs of {each:.0f} s each, {options.jobs} at a time: {hours:.1f} hours", soft_wrap=True)
    return {"missing": total, "hours": hours}


def _perform_all(
    plan: Plan, config: Config, jobs: list[Job], pool: ProcessPoolExecutor | None
) -> Iterator[tuple[Job, Result]]:
    """The runs' results as they come; without a pool one after the other in this process."""
    from benchmarks.trial.job import perform

    tasks = [(job, config, plan.store, plan.weights(job), plan.experts(job)) for job in jobs]
    if pool is None:
        for task in tasks:
            yield task[0], perform(*task)
        return
    futures = {pool.submit(perform, *task): task[0] for task in tasks}
    for future in as_completed(futures):
        yield futures[future], future.result()


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor | None]:
    """So many processes of one thread each, which end with this one; None for a single one."""
    if count == 1:
        yield None
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # theirs
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Otherwise the processes of a killed trial would wait for work for ever."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
