"""The tables of the page on noise are those measured, and what it says of them holds."""

import json
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "noise_aware.md").read_text(encoding="utf-8")
FIGURES = json.loads((DOCS / "results" / "noise.json").read_text())
PROGRESS = FIGURES["progress"]


def table(geometry, dimension, level):
    lines = [f"| {geometry} | each | worst | geometric mean |", "|---|---|---|---|"]
    for method, of in PROGRESS[geometry][dimension][level].items():
        each = " ".join(f"{value:.2f}" for value in of["each"])
        cells = (f"{mean:.3f} ± {error:.3f}" for mean, error in (of["worst"], of["geometric mean"]))
        lines.append(" | ".join((f"| {method}", each, *cells)) + " |")
    return "\n".join(lines)


def floors():
    methods = ("Marble, U", "noise-aware max–min", "noise-aware Nash")
    lines = ["| worst / geometric mean | floor | " + " | ".join(methods) + " |", "|---|---|---|---|---|"]
    for geometry, dimensions in FIGURES["floors"]["progress"].items():
        for dimension, by_floor in dimensions.items():
            for floor, of in by_floor.items():
                cells = (f"{of[m]['worst'][0]:.3f} / {of[m]['geometric mean'][0]:.3f}" for m in methods)
                lines.append(f"| {geometry}, P = {int(dimension):,} | {floor} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def values(geometry, dimension, method, measure):
    return [of[method][measure][0] for of in PROGRESS[geometry][dimension].values()]


def test_the_tables_are_those_measured():
    assert table("agreeing", "50000", "0.4") in PAGE
    assert table("conflicting", "50000", "0.4") in PAGE
    assert floors() in PAGE


def test_the_setting_is_that_measured():
    assert (FIGURES["draws"], FIGURES["steps"], FIGURES["judged"], FIGURES["floor"]) == (40, 20, 200, 0.01)
    assert FIGURES["pattern"] == [0.2, 0.6, 0.5, 1.0, 0.8]
    assert (FIGURES["parts"], FIGURES["shared"], FIGURES["floors"]["level"]) == (4, 0.2, 0.4)


def test_what_the_page_says_of_them():
    for geometry in PROGRESS:
        for dimension in PROGRESS[geometry]:
            told = (geometry, dimension)
            for measure in ("worst", "geometric mean"):
                batch, average = (values(*told, f"Marble, {name}", measure) for name in ("batch", "N"))
                assert all(abs(a - b) < 2e-3 for a, b in zip(batch, average, strict=True))
    for dimension in ("2000", "50000"):
        best = [max(of, key=lambda m: of[m]["worst"][0]) for of in PROGRESS["agreeing"][dimension].values()]
        assert set(best) == {"noise-aware max–min, exact"}
        best = [max(of, key=lambda m: of[m]["geometric mean"][0]) for of in PROGRESS["agreeing"][dimension].values()]
        assert set(best) == {"noise-aware Nash, exact"}
        sums = values("conflicting", dimension, "sum of unit gradients", "worst")
        assert max(sums) < 0
        assert sums[-1] < sums[0]
        for name in ("Marble, U", "noise-aware max–min", "noise-aware Nash"):
            assert min(values("conflicting", dimension, f"{name}, exact", "worst")) > 0
            assert values("conflicting", dimension, name, "worst")[0] < 0  # not seen: no help
    for method, measure in (("noise-aware max–min", "worst"), ("noise-aware Nash", "geometric mean")):
        for rival in ("sum of unit gradients", "Marble, batch", "Marble, N", "Marble, U"):
            ours, theirs = (values("agreeing", "50000", name, measure) for name in (method, rival))
            assert all(a > b for a, b in zip(ours, theirs, strict=True)), (method, rival)
