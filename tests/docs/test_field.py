"""The tests that docs/field.md names are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "field.md").read_text(encoding="utf-8")


def test_the_tests_that_are_named_exist():
    named = re.findall(r"`(\w+)::(test_\w+)`", PAGE)
    assert named
    for module, name in set(named) - {("scale", "test_x")}:
        source = (ROOT / "tests" / "peers" / f"test_peers_{module}.py").read_text(encoding="utf-8")
        assert f"def {name}(" in source, name


def test_the_files_that_are_named_exist():
    for path in re.findall(r"`((?:tests|docs)/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(test_\w+\.py)`", PAGE):
        assert (ROOT / "tests" / "gradbalance" / name).exists(), name
