"""The map of regimes: the quadratics are what they say, known cells come out as they must, pieces are kept."""

import json
import re

import numpy as np
import pytest
import torch

from benchmarks import contest, quadratics
from benchmarks.__main__ import main
from benchmarks.contest import ENTRANTS, enter
from benchmarks.quadratics import Cell, draw
from benchmarks.regions import REGIONS, compare, count, record
from gradbalance import balancers

INFINITY = float("inf")
GRID = ["--steps", "8", "--seeds", "2", "--tuning-seeds", "1", "--ratios", "1000", "--cosines", "-0.7", "0.7"]


@pytest.fixture(autouse=True)
def _same_number_of_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _fewer_parameters(monkeypatch):
    monkeypatch.setattr(quadratics, "PARAMETERS", 100)
    quadratics._shape.cache_clear()
    yield
    quadratics._shape.cache_clear()


def worst(name, cell, objectives=2, steps=60):
    outcome = enter(ENTRANTS[name], [cell], objectives, tuning=[10], seeds=range(3), steps=steps)
    return outcome.worst[0].mean().item()


@pytest.mark.parametrize("objectives", [2, 5])
@pytest.mark.parametrize("cosine", [-0.95, 0.0, 0.7])
def test_gradients_at_the_start_are_those_of_the_cell(objectives, cosine):
    problems = draw([Cell(100.0, INFINITY, cosine)], [3, 4], objectives)
    x = torch.zeros(2, 1, 100, dtype=torch.float64, requires_grad=True)
    by_hand = [torch.autograd.grad(problems.losses(x)[..., k].sum(), x)[0] for k in range(objectives)]
    gradients = problems.gradients(x.detach(), torch.zeros_like(problems.minima))
    torch.testing.assert_close(gradients, torch.stack(by_hand, -2))
    lengths = gradients.norm(dim=-1)
    torch.testing.assert_close(lengths, problems.lengths[:, None])
    torch.testing.assert_close(lengths.amax(-1) / lengths.amin(-1), torch.full((2, 1), 100.0, dtype=torch.float64))
    unit = gradients / lengths[..., None]
    torch.testing.assert_close((unit @ unit.mT)[..., 0, 1:], torch.full((2, 1, objectives - 1), cosine).double())


def test_losses_are_zero_at_their_minima_and_strongly_convex():
    problems = draw([Cell(10.0, INFINITY, 0.3)], [0], 3)
    torch.testing.assert_close(problems.losses(problems.minima)[0].diagonal(), torch.zeros(3, dtype=torch.float64))
    spread = problems.curvature.amax(-1) / problems.curvature.amin(-1)
    assert (problems.curvature > 0).all()
    assert (spread <= quadratics.CONDITION).all()


def test_noise_is_as_large_as_the_cell_says_and_independent_between_halves():
    problems = draw([Cell(1000.0, 0.5, 0.0)], [0], 2)
    drawn = torch.stack([torch.stack(problems.draw_noise()) for _ in range(400)])[:, :, 0]
    mean, difference = drawn.unbind(1)
    torch.testing.assert_close(mean.square().sum(-1).mean(0), problems.noise[0] ** 2, rtol=0.05, atol=0)
    torch.testing.assert_close(problems.noise[0], 2 * problems.lengths[0])
    products = ((mean + difference) * (mean - difference)).sum(-1)
    assert (products.mean(0).abs() < 4 * products.std(0) / 20).all()


def test_a_seed_has_the_same_noise_in_every_cell():
    problems = draw([Cell(1.0, 1.0, -0.7), Cell(1.0, 0.1, 0.7)], [5, 6], 2)
    mean, _ = problems.draw_noise()
    torch.testing.assert_close(10 * mean[:2], mean[2:])
    assert not torch.equal(mean[0], mean[1])


def test_the_reachable_point_is_the_midpoint_of_two_unit_bowls():
    minima = np.array([[1.0, 0.5], [1.0, -0.5]])
    middle = np.array([1.0, 0.0])
    expected = 1 - ((middle - minima[0]) ** 2).sum() / (minima[0] ** 2).sum()
    assert quadratics.reachable(np.ones((2, 2)), minima) == pytest.approx(expected, abs=1e-9)
    assert quadratics.reachable(np.ones((2, 2)), np.ones((2, 2))) == pytest.approx(1.0, abs=1e-9)


def test_no_point_does_better_than_what_is_reachable():
    problems = draw([Cell(10.0, INFINITY, -0.7)], [0, 1], 3)
    x = torch.zeros(2, 1, 100, dtype=torch.float64)
    goal = (problems.losses(x) * problems.reachable[:, None, None])[:, 0]
    x.requires_grad_()
    optimizer = torch.optim.Adam([x], lr=3e-3)
    best = torch.full((2,), -INFINITY, dtype=torch.float64)
    for _ in range(300):
        optimizer.zero_grad()
        progress = problems.worst_progress(x)
        (-progress).sum().backward()
        optimizer.step()
        best = torch.maximum(best, progress.detach()[:, 0])
    assert goal.shape == (2, 3)
    assert (best > 0.9).all()
    assert (best <= 1 + 1e-9).all()


def test_objectives_that_agree_need_no_balancing():
    cell = Cell(1.0, INFINITY, 0.99)
    found = {name: worst(name, cell) for name in ("weighted_sum", "db_mtl", "marble", "nash_mtl", "noise_aware")}
    assert all(value == pytest.approx(0.97, abs=0.03) for value in found.values()), found


def test_the_plain_sum_leaves_the_small_objective_behind():
    cell = Cell(1000.0, INFINITY, 0.0)
    assert worst("weighted_sum", cell) < 0.1
    assert worst("marble", cell) > 0.9
    assert worst("tuned_sum", cell) > 0.9


def test_where_no_setting_helps_none_is_used():
    outcome = enter(ENTRANTS["db_mtl"], [Cell(1.0, 0.1, -0.95)], 5, tuning=[10, 11], seeds=[0, 1], steps=20)
    assert outcome.learning_rates == [0.0]
    assert outcome.tuned.tolist() == [0.0]
    assert outcome.worst.tolist() == [[0.0, 0.0]]


def test_settings_are_the_best_on_the_tuning_draws():
    entrant, cell = ENTRANTS["marble"], Cell(1.0, 1.0, 0.0)
    outcome = enter(entrant, [cell], 2, tuning=[10, 11], seeds=[0], steps=30)
    by_hand = {
        lr: contest.descend(entrant, [cell], [[(0, lr)]], 2, [10, 11], 30).mean().item()
        for lr in contest.LEARNING_RATES
    }
    assert outcome.learning_rates == [max(by_hand, key=by_hand.__getitem__)]
    assert outcome.tuned.item() == pytest.approx(max(by_hand.values()), abs=1e-12)


@pytest.mark.parametrize("name", ENTRANTS)
def test_every_method_improves_the_worst_off_where_it_is_easy_and_repeats_itself(name):
    cell = Cell(1.0, 3.0, 0.7)
    assert worst(name, cell, objectives=3, steps=20) > 0.6
    assert worst(name, cell, objectives=3, steps=5) == worst(name, cell, objectives=3, steps=5)


def test_noise_aware_is_given_both_gramians_and_marble_split_the_one_without_noise(monkeypatch):
    seen = {}

    def noted(self, gramian, losses=None, signal=None):
        seen[type(self).__name__] = gramian, signal
        return torch.ones(len(gramian), dtype=torch.float64)

    for kind in (balancers.NoiseAware, balancers.Marble):
        monkeypatch.setattr(kind, "coefficients", noted)
    for name in ("noise_aware", "marble_split"):
        contest.descend(ENTRANTS[name], [Cell(1.0, 0.5, 0.0)], [[(0, 0.0)]], 2, [0], 40)
    noisy, signal = seen["NoiseAware"]
    assert noisy.diagonal().mean().item() == pytest.approx(5.0, rel=0.2)  # 1 and noise of 4
    assert signal.diagonal().mean().item() == pytest.approx(1.0, abs=0.7)
    torch.testing.assert_close(seen["Marble"], (signal, signal))


def piece(worst, tuned):
    return {"worst": [[[worst]]], "tuned": [[[tuned]]], "learning_rate": [[[0.1]]]}


@pytest.mark.parametrize(
    ("plain", "balanced", "region"),
    [
        ([0.5, 0.6], [0.9, 0.9], "balancing pays"),
        ([0.5, 0.6], [0.52, 0.6], "plain sum as good"),
        ([0.2, 0.9], [0.9, 0.4], "plain sum as good"),  # one draw each way
        ([0.9, 0.9], [0.5, 0.6], "plain sum better"),
        ([0.0, 0.0], [0.07, 0.07], "nothing helps"),
        ([-0.9, -0.9], [0.0, 0.0], "nothing helps"),
    ],
)
def test_regions(plain, balanced, region):
    pieces = {"weighted_sum": piece(plain, 0.9), "marble": piece(balanced, 0.5), "mgda": piece([9.0, 9.0], 0.4)}
    found = compare(pieces)
    assert found["best"]["method"] == [[["marble"]]]  # by the tuning draws alone
    gain = np.subtract(balanced, plain)
    assert found["best"]["gain"] == {"weighted_sum": [[[pytest.approx(gain.mean(), abs=1e-4)]]]}
    assert found["best"]["region"] == [[[region]]]
    counts = count({"2": found}, {"ratios": [1.0]})["2"]["1"]
    assert {name: counts[name] for name in REGIONS} == {name: int(name == region) for name in REGIONS}
    assert counts["better than weighted_sum"] == (gain.min() > 0.06)
    assert counts["worse than weighted_sum"] == (gain.max() < -0.06)


def test_the_record_counts_cells_that_differ_by_more_than_their_error():
    pieces = {
        "weighted_sum": {"worst": [[[[0.5, 0.5], [0.5, 0.5], [0.2, 0.8]]]]},
        "marble": {"worst": [[[[0.7, 0.8], [0.4, 0.44], [0.8, 0.4]]]]},
    }
    for of in pieces.values():
        of.update(tuned=[[[0.0] * 3]], learning_rate=[[[0.1] * 3]])
    found = record({"2": compare(pieces)}, list(pieces))
    assert (found["marble"]["better"], found["marble"]["worse"]) == (1, 1)
    assert (found["weighted_sum"]["better"], found["weighted_sum"]["worse"]) == (0, 0)
    assert found["marble"]["mean"] == pytest.approx(0.59, abs=1e-4)
    assert found["marble"]["by_ratio"] == {"2": [pytest.approx(0.59, abs=1e-4)]}


def test_regimes(tmp_path, capsys):
    out, picture = tmp_path / "regimes.json", tmp_path / "regimes.png"
    arguments = ["regimes", *GRID, "--signal-to-noise", "inf", "1", "--objectives", "2", "3", "--picture", str(picture)]
    arguments += ["--methods", "weighted_sum", "marble", "noise_aware", "--pieces", str(tmp_path / "pieces")]
    assert main([*arguments, "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert np.shape(figures["maps"]["3"]["methods"]["marble"]["worst"]) == (1, 2, 2)
    assert figures["signal_to_noise"] == ["inf", "1"]
    regions = [of for of_k in figures["regions"].values() for of in of_k.values()]
    assert sum(of[name] for of in regions for name in REGIONS) == 8
    assert picture.stat().st_size > 1000
    assert (tmp_path / "regimes_methods.png").stat().st_size > 1000
    assert "marble, K = 3" in capsys.readouterr().out
    assert main([*arguments, "--out", str(tmp_path / "again.json")]) == 0
    assert json.loads((tmp_path / "again.json").read_text()) == figures
    assert "K = 3" not in capsys.readouterr().out  # nothing was measured again
    kept = tmp_path / "pieces" / "noise_aware_3.json"
    kept.write_text(kept.read_text().replace("SplitGramian(parts=2", "SplitGramian(parts=4"))
    assert main(arguments) == 0
    assert re.findall(r"(\w+), K = \d", capsys.readouterr().out) == ["noise_aware"]  # other defaults are
    assert main([*arguments, "--seeds", "3"]) == 0
    assert "marble, K = 3" in capsys.readouterr().out  # so are other settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps and --tuning-seeds must be at least 1"),
        (["--objectives", "1"], "--seeds and --objectives at least 2"),
        (["--cosines", "1"], "--cosines between -1 and 1"),
        (["--methods", "marble"], "--methods must have weighted_sum"),
        (["--methods", "marbel"], "invalid choice: 'marbel'"),
        (["--picture", "/nowhere/x.png"], "the folder /nowhere does not exist"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["regimes", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
