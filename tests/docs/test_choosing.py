"""The page that helps to choose says what the catalogue's tests prove and what the benchmarks measured."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.agreement import EXPLAINED, PAIRS
from benchmarks.methods import PICTURED
from gradbalance.balancers import available
from tests.gradbalance.balancers.catalogue import EVERY

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "choosing.md").read_text()
ROWS = {
    cells[0].strip("` "): [cell.strip() for cell in cells[1:]]
    for cells in (line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| `"))
    if len(cells) == 8
}
COLUMNS = ("step", "looks at", "one loss × c", "no conflict", "remembers", "µs", "mind")


def column(name):
    return {method: cells[COLUMNS.index(name)] for method, cells in ROWS.items()}


def test_every_method_has_a_row():
    assert sorted(ROWS) == available()


def test_what_it_looks_at():
    for method, says in column("looks at").items():
        if says != "as inside":
            assert (says in ("gradients", "norms")) == EVERY[method].make(3).uses_gradients, method


def test_the_scale_of_one_loss():
    for method, says in column("one loss × c").items():
        if says != "as inside":
            assert says.startswith("same") == EVERY[method].invariant, method


def test_no_conflict():
    for method, says in column("no conflict").items():
        if says != "as inside":
            proved = EVERY[method].no_conflict
            assert {"yes": True, "if independent": "independent"}.get(says, False) == proved, method
    assert EVERY["ca_grad, 1"].no_conflict is True


def test_what_it_remembers():
    for method, says in column("remembers").items():
        if says != "as inside":
            assert (says == "–") == (EVERY[method].make(3).state_dict() == {}), method


def test_the_times_are_those_measured():
    measured = json.loads((DOCS / "results" / "balancers.json").read_text())["microseconds"]
    for method, says in column("µs").items():
        small, large = (max(measured[k][method].values()) for k in ("5", "32"))
        assert says == f"{small:.0f}, {large:.0f}", method


def test_the_agreement_is_that_measured():
    measured = json.loads((DOCS / "results" / "agreement.json").read_text())["differences"]
    listed = re.findall(r"^\| ([\w, =/½α]+) \| ([^|]+) \| (\S+) \|$", PAGE[PAGE.index("## Agreement") :], re.MULTILINE)
    expected = [(m, o.strip(), f"{d:.0e}") for m, of in sorted(measured.items()) for o, d in sorted(of.items())]
    assert [(m, o.strip(), d) for m, o, d in listed[1:]] == expected  # the first is the heading
    assert {(m, o) for m, o, _ in expected} == set(PAIRS)


@pytest.mark.parametrize("pair", EXPLAINED)
def test_what_does_not_agree_is_explained_on_the_page(pair):
    method, oracle = pair
    assert re.search(rf"{oracle}'s `?{method}`?", PAGE, re.IGNORECASE)


def test_the_arrivals_on_the_page_are_of_all_methods():
    figures = json.loads((DOCS / "results" / "paths.json").read_text())
    assert sorted(figures["arrived"]) == PICTURED
    assert figures["steps"] == 50_000
