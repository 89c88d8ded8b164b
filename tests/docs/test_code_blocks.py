"""Every Python block of the README and the docs runs, in order, and prints what the text block after it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


def blocks(page):
    return [(match.group(1), match.group(2)) for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_code_blocks_run(page):
    namespace = {}
    for source, expected in blocks(page):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(source, str(page), "exec"), namespace)
        if expected is not None:
            assert output.getvalue().strip() == expected.strip()


def test_there_is_code_to_run():
    assert blocks(ROOT / "README.md")
    assert any(expected for page in PAGES for _, expected in blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_are_alive(page):
    for target in re.findall(r"\]\(([^)#\s]+)", FENCED.sub("", page.read_text(encoding="utf-8"))):
        if "://" not in target:
            assert (page.parent / target).exists(), target
