"""What the two commands share: one-line errors and exit codes 0 (done), 1 (failed), 2 (wrong input), 130 (stopped)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from integrations.diffusion_nft.config import RunError, UserError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise UserError(f"{message} (see {self.prog} --help)")


def run(action: Callable[[], None]) -> int:
    """Run a command and turn what it raises into a line on stderr and an exit code."""
    # Advice about optional packages, read when the libraries are imported, would drown our one line.
    for library in ("TRANSFORMERS", "DIFFUSERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        action()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunError, FloatingPointError) as error:  # the latter: gradbalance met a NaN and names the objective
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0
