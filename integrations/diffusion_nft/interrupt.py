"""Ctrl-C and SIGTERM stop a run at its next safe point; a second one stops it at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Remembers that a signal came; `check` raises at a safe point."""

    def __init__(self) -> None:
        self.requested = False

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if the run was asked to stop."""
        if self.requested:
            raise KeyboardInterrupt

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGINT and SIGTERM ask for a stop; after the first one the previous handlers are back."""
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in previous.items():
                signal.signal(number, handler)

        def handle(number: int, frame: FrameType | None) -> None:
            self.requested = True
            restore()

        for number in previous:
            signal.signal(number, handle)
        try:
            yield
        finally:
            restore()
