"""What the benchmarks leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write figures to a file, whole or not at all."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(figures, indent=1) + "\n")
    temporary.replace(path)
