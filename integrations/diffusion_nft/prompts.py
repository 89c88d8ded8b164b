"""Prompts and what is known about them: the quoted text for OCR, GenEval's metadata for count and colour."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_QUOTED = re.compile(r'"([^"]*)"')


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        text: What the text encoders read.
        metadata: GenEval's description of the picture asked for (``tag``, ``include``, ``exclude``), or empty.
            ``include`` is a list of ``{"class": str, "count": int, "color": str}``, ``color`` being optional.
    """

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def quoted(self) -> str | None:
        """The text between the first pair of double quotes: what the picture shall spell. None where there is none."""
        match = _QUOTED.search(self.text)
        return match.group(1) if match else None


def load_prompts(path: str | Path) -> list[Prompt]:
    """Reads a prompt file.

    Args:
        path: ``*.txt``: one prompt a line. ``*.jsonl``: one JSON object a line with at least ``prompt`` (GenEval's
            layout); the other keys become the metadata. Empty lines are skipped.

    Returns:
        The prompts in the file's order, repeated lines included.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The suffix is unknown, a line is malformed, or the file holds no prompt; names the file and line.
    """
    path = Path(path)
    if path.suffix not in {".txt", ".jsonl"}:
        raise ValueError(f"prompt file {path} has suffix {path.suffix!r}; expected .txt or .jsonl")
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    parse = _parse_json if path.suffix == ".jsonl" else _parse_text
    prompts = [parse(line.strip(), f"{path}:{number}") for number, line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"prompt file {path} holds no prompt")
    return prompts


def _parse_text(line: str, where: str) -> Prompt:
    return Prompt(line)


def _parse_json(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ValueError(f'{where} needs a JSON object with a string under "prompt"')
    for item in record.get("include", []):
        if not isinstance(item, dict) or "class" not in item or not _is_positive(item.get("count", 1)):
            raise ValueError(
                f'{where}: every entry of "include" needs a "class" and a "count" of at least 1, got {item}'
            )
    return Prompt(record["prompt"], {key: value for key, value in record.items() if key != "prompt"})


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and value >= 1
