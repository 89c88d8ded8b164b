"""The page on where balancing pays says what the map's figures say."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import contest, quadratics
from benchmarks.contest import ENTRANTS
from benchmarks.regions import HELPS, PAYS, REGIONS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = " ".join((DOCS / "regimes.md").read_text(encoding="utf-8").split())
LINES = (DOCS / "regimes.md").read_text(encoding="utf-8").splitlines()
FIGURES = json.loads((DOCS / "results" / "regimes.json").read_text())
MAPS = FIGURES["maps"]


def rows(first):
    """The cells of the rows of a table whose heading begins so."""
    start = next(number for number, line in enumerate(LINES) if line.startswith(first))
    found = []
    for line in LINES[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip(" `") for cell in line.strip("|").split("|")])
    return found


def at(objectives, method, signal_to_noise, cosine):
    """Worst progress where all is of one scale, as the page writes it."""
    place = FIGURES["signal_to_noise"].index(signal_to_noise), FIGURES["cosines"].index(cosine)
    return f"{MAPS[objectives]['methods'][method]['worst'][0][place[0]][place[1]]:.2f}"


def total(name, ratios=("1", "10", "1000")):
    return sum(FIGURES["regions"][k][ratio][name] for k in FIGURES["regions"] for ratio in ratios)


def largest_gain(objectives, cosines):
    gains = np.array(MAPS[objectives]["best"]["gain"]["weighted_sum"][0])
    return f"{gains[:, cosines].max():.2f}"


def test_all_methods_and_cells_are_there():
    assert list(FIGURES["methods"]) == list(ENTRANTS)
    assert np.shape(MAPS["2"]["best"]["region"]) == np.shape(MAPS["5"]["best"]["region"]) == (3, 5, 7)
    assert sum(total(name) for name in REGIONS) == 210


def test_the_main_sentence():
    pays, alike, nothing = total("balancing pays"), total("plain sum as good"), total("nothing helps")
    assert "On 210 kinds of random problems" in PAGE
    assert f"above the plain sum in {pays}: wherever scales differ" in PAGE
    assert f"The plain sum is as good in {alike}, all at one scale, and nothing helps in {nothing}" in PAGE
    assert total("plain sum better") == 0
    assert alike == total("plain sum as good", ["1"])
    uneven = ["10", "1000"]
    assert f"balancing pays in {total('balancing pays', uneven)} of 140 cells" in PAGE
    assert f"nothing helps in the other {total('nothing helps', uneven)}." in PAGE
    conflict = sum(
        np.count_nonzero(np.array(MAPS[k]["best"]["region"][0])[:, :3] == "balancing pays") for k in ("2", "5")
    )
    assert conflict > total("balancing pays", ["1"]) / 2  # "mostly where the objectives are in conflict"


def test_the_sentences_about_cases():
    better, worse = total("better than tuned_sum"), total("worse than tuned_sum")
    assert f"a balancer beats `tuned_sum` in {better} cells of 210 and loses to it in {worse}." in PAGE
    agree = slice(3, None)
    assert f"gains {largest_gain('2', agree)} at most for K = 2, {largest_gain('5', agree)} for K = 5." in PAGE
    assert f"The largest gain is {largest_gain('2', slice(None))}, at cosine −0.95." in PAGE
    assert largest_gain("2", slice(None)) == largest_gain("2", [0])
    exact, *noisy = [at("5", "marble", noise, -0.7) for noise in ("inf", "3", "1")]
    aware = [at("5", "noise_aware", noise, -0.7) for noise in ("3", "1")]
    assert f"`marble` reaches {exact} with exact gradients, {noisy[0]} at signal-to-noise 3 and {noisy[1]} at 1" in PAGE
    assert f"`noise_aware` still reaches {aware[0]} and {aware[1]}." in PAGE


def test_regions():
    listed = {(k, scales.replace("one scale", "1").removesuffix(" : 1")): of for k, scales, *of in rows("| K | scales")}
    columns = [*("balancing pays", "plain sum as good", "plain sum better", "nothing helps")]
    columns += ["better than tuned_sum", "worse than tuned_sum"]
    assert listed == {
        (k, ratio): [str(of[name]) for name in columns]
        for k, of_k in FIGURES["regions"].items()
        for ratio, of in of_k.items()
    }
    assert f"higher by {PAYS} or more" in PAGE
    assert f"neither it nor the plain sum has {HELPS}." in PAGE


def test_methods():
    listed = {name: of for name, *of in rows("| method | K = 2, one scale")}
    assert list(listed) == list(FIGURES["methods"])
    for name, of in FIGURES["methods"].items():
        means = [f"{of['by_ratio'][k][place]:.2f}" for k in ("2", "5") for place in (0, -1)]
        assert listed[name] == [*means, str(of["better"]), str(of["worse"])]


def test_what_is_said_about_methods():
    mean = {name: f"{of['mean']:.2f}" for name, of in FIGURES["methods"].items()}
    aware, split, marble = (mean[name] for name in ("noise_aware", "marble_split", "marble"))
    assert f"the means are {aware} (`noise_aware`), {split} (`marble_split`) and {marble} (`marble`)." in PAGE
    exact = {name: of["by_signal_to_noise"]["5"][0] for name, of in FIGURES["methods"].items()}
    assert set(sorted(exact, key=exact.__getitem__)[-2:]) == {"marble", "config"}
    lost = []
    for name in ("marble_split", "noise_aware"):
        for of_k in MAPS.values():
            gain, error = (np.array(of_k["methods"][name][key]) for key in ("gain", "gain_error"))
            lost += np.argwhere((gain <= -PAYS) & (gain <= -2 * error)).tolist()
    noisy = sum(noise >= 3 for _, noise, _ in lost)
    assert all(ratio == 0 or noise >= 3 for ratio, noise, _ in lost)
    assert f"({noisy} of the {len(lost)} cells they lose)." in PAGE
    for name, *of in rows("| method | ∞"):
        assert of == [f"{value:.2f}" for value in FIGURES["methods"][name]["by_signal_to_noise"]["5"]]
    tuned, gain = at("5", "tuned_sum", "0.3", -0.3), MAPS["5"]["best"]["gain"]["tuned_sum"][0][3][2]
    assert f"`tuned_sum` reaches {tuned}, the best balancer {float(tuned) + gain:.2f}." in PAGE
    assert {at("5", "tuned_sum", noise, -0.7) for noise in FIGURES["signal_to_noise"]} == {"0.00"}


def test_how_it_was_measured():
    rates = FIGURES["learning_rates"]
    assert rates == list(contest.LEARNING_RATES)
    assert f"({', '.join(map(str, rates))}, and 0: not to train)" in PAGE
    assert f"in {quadratics.PARAMETERS} parameters" in PAGE
    assert f"eigenvalues over a factor of {quadratics.CONDITION:g}" in PAGE
    assert f"{FIGURES['steps']} steps; the length" in PAGE
    assert f"in each cell on {FIGURES['tuning_seeds']} draws and judged on {FIGURES['seeds']} others" in PAGE
    chosen = np.array([of["learning_rate"] for of_k in MAPS.values() for of in of_k["methods"].values()])
    assert f"was chosen in {100 * (chosen == max(rates)).mean():.0f} % of cases" in PAGE
    assert f"({FIGURES['seconds'] / 60:.0f} minutes of one thread" in PAGE
    assert (len(contest.WEIGHTS), [odd for power, odd in contest.WEIGHTS if power]) == (5, [1.0, 2.0, 4.0, 8.0])


@pytest.mark.parametrize("picture", re.findall(r"\((images/regimes\w*\.png)\)", PAGE))
def test_the_pictures_are_there(picture):
    assert (DOCS / picture).stat().st_size > 10_000
