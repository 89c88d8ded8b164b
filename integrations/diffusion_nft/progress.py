"""What the user sees while a run goes on: a bar with rewards and time left, or plain lines without a terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_EVERY = 20.0  # seconds between plain lines


class RunProgress:
    """A context manager around the training loop.

    Args:
        steps: Optimizer steps of the run.
        done: Steps already made (a resumed run).
        console: Where to write; default stdout.
    """

    def __init__(self, steps: int, done: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._steps, self._first = steps, done
        self._start = self._last = time.monotonic()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rewards]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, rewards="")

    def __enter__(self) -> RunProgress:
        self._start = self._last = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """One line above the bar."""
        self._bar.console.print(text, soft_wrap=True)

    def update(self, record: dict[str, Any]) -> None:
        """Show a step's record."""
        step = record["step"]
        rewards = "  ".join(
            f"{name} {'–' if value != value else format(value, '.3f')}" for name, value in record["rewards"].items()
        )
        self._bar.update(self._task, completed=step, rewards=rewards)
        now = time.monotonic()
        if self._bar.disable and (now - self._last >= PLAIN_EVERY or step in (self._first + 1, self._steps)):
            self._last = now
            left = (now - self._start) / (step - self._first) * (self._steps - step)
            self.note(f"step {step}/{self._steps}  {left:.0f} s left  {rewards}")
