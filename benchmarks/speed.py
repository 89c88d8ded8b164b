"""What balancing costs: step times as ratios to a plain step, solver times, all interleaved in one run.

These machines are shared and noisy, so nothing here is an absolute claim: each round times every mode once, one after
the other, and a ratio is the median over rounds of a mode's time divided by the plain step's of the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gradbalance import MarbleOptimizer
from gradbalance.solvers import min_norm

AMORTISED = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--objectives", type=int, nargs="+", default=[2, 5, 10, 20], help="K to measure")
    parser.add_argument("--width", type=int, default=512, help="width of the network")
    parser.add_argument("--depth", type=int, default=3, help="hidden layers beyond the first")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of ten steps a mode")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure and print both tables.

    Raises:
        ValueError: an option is out of range.
    """
    if min([*options.objectives, options.width, options.batch, options.rounds]) < 1 or options.depth < 0:
        raise ValueError("--objectives, --width, --batch and --rounds must be at least 1, --depth at least 0")
    shape = {"width": options.width, "depth": options.depth, "batch": options.batch, "rounds": options.rounds}
    steps = [step_ratios(k, **shape) for k in options.objectives]
    modes = [key for key, value in steps[0].items() if isinstance(value, dict)]
    table = Table("K", "parameters", "plain (ms)", *modes[1:], title="time of a step, relative to a plain one")
    for row in steps:
        cells = [
            f"{row[m]['ratio']:.2f} ({row[m]['quartiles'][0]:.2f}–{row[m]['quartiles'][1]:.2f})" for m in modes[1:]
        ]
        table.add_row(str(row["objectives"]), f"{row['parameters']:,}", f"{row['plain_ms']:.2f}", *cells)
    console.print(table)
    solver = solver_times([2, 5, 16, 64], draws=300)
    table = Table("K", "µs", title="min_norm, median")
    for size, microseconds in solver.items():
        table.add_row(str(size), f"{microseconds:.0f}")
    console.print(table)
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, "steps": steps, "min_norm_us": solver}


class _Problem:
    """An MLP whose K outputs are K regression objectives: every layer but the last row is shared."""

    def __init__(self, objectives: int, width: int, depth: int, batch: int) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(width, objectives))
        self.x, self.y = torch.randn(batch, 64), torch.randn(batch, objectives)
        self.parameters = list(self.model.parameters())

    def losses(self) -> list[Tensor]:
        return list((self.model(self.x) - self.y).square().mean(0).unbind())


def _plain(problem: _Problem) -> Callable[[], None]:
    """The floor: one weighted sum, one backward."""
    optimizer = torch.optim.SGD(problem.parameters, lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        sum(problem.losses()).backward()  # type: ignore[union-attr]
        optimizer.step()

    return step


def _by_hand(problem: _Problem) -> Callable[[], None]:
    """K ``autograd.grad`` calls and one weighted sum with fixed weights: what any balancer must pay, and no solve."""
    optimizer = torch.optim.SGD(problem.parameters, lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        losses = problem.losses()
        for k, loss in enumerate(losses):
            gradients = torch.autograd.grad(loss, problem.parameters, retain_graph=k + 1 < len(losses))
            for parameter, gradient in zip(problem.parameters, gradients, strict=True):
                parameter.grad = gradient * 0.5 if parameter.grad is None else parameter.grad.add_(gradient, alpha=0.5)
        optimizer.step()

    return step


def _marble(problem: _Problem, refresh_every: int) -> Callable[[], None]:
    optimizer = MarbleOptimizer(torch.optim.SGD(problem.parameters, lr=1e-4), refresh_every=refresh_every)

    def step() -> None:
        optimizer.zero_grad()
        optimizer.backward(problem.losses())
        optimizer.step()

    return step


def step_ratios(objectives: int, *, width: int, depth: int, batch: int, rounds: int) -> dict[str, Any]:
    """Median time ratios of each mode to a plain step, and the quartiles of the ratios.

    A round times ``AMORTISED`` steps of each mode, so that an amortised round holds exactly one solve.
    """
    modes = {
        "plain": _plain,
        f"amortised (N = {AMORTISED})": lambda problem: _marble(problem, AMORTISED),
        "every step": lambda problem: _marble(problem, 1),
        "by hand, no solve": _by_hand,
    }
    steps = {name: make(_Problem(objectives, width, depth, batch)) for name, make in modes.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for warm_up in [True] + [False] * rounds:
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(AMORTISED):
                step()
            if not warm_up:
                times[name].append((time.perf_counter() - start) / AMORTISED)
    result: dict[str, Any] = {
        "objectives": objectives,
        "parameters": sum(p.numel() for p in _Problem(objectives, width, depth, batch).parameters),
        "batch": batch,
        "plain_ms": 1e3 * statistics.median(times["plain"]),
    }
    for name in steps:
        ratios = sorted(t / plain for t, plain in zip(times[name], times["plain"], strict=True))
        result[name] = {
            "ratio": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]],
        }
    return result


def solver_times(sizes: list[int], *, draws: int) -> dict[int, float]:
    """Median microseconds of ``min_norm`` on the unit Gramian of K random gradients in 2K dimensions."""
    generator = torch.Generator().manual_seed(0)
    medians = {}
    for size in sizes:
        times = []
        for _ in range(draws):
            rows = nn.functional.normalize(torch.randn(size, 2 * size, generator=generator, dtype=torch.float64))
            gramian = rows @ rows.T
            start = time.perf_counter()
            min_norm(gramian)
            times.append(time.perf_counter() - start)
        medians[size] = 1e6 * statistics.median(times)
    return medians
