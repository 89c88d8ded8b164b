"""``python -m benchmarks``: every command runs, writes what it says, and refuses what it cannot do."""

import json

import numpy as np
import pytest
import torch

from benchmarks import agreement, landscape, noise
from benchmarks.__main__ import COMMANDS, main
from benchmarks.methods import make
from gradbalance.balancers import available


@pytest.fixture(autouse=True)
def _same_number_of_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_list_names_every_command(capsys):
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(COMMANDS)


@pytest.mark.parametrize("name", available())
def test_every_method_can_be_made_for_any_number_of_objectives(name):
    for k in (1, 2, 5, 32):
        assert make(name, k).coefficients(torch.eye(k), torch.ones(k)).shape == (k,)


def test_balancers(tmp_path, capsys):
    out = tmp_path / "balancers.json"
    assert main(["balancers", "--objectives", "2", "3", "--draws", "2", "--out", str(out)]) == 0
    times = json.loads(out.read_text())["microseconds"]
    assert list(times) == ["2", "3"]
    for of_size in times.values():
        assert set(of_size) >= set(available())
        assert all(time > 0 for families in of_size.values() for time in families.values())
    assert "nash_mtl" in capsys.readouterr().out


def test_agreement_of_one_method(tmp_path, capsys):
    out = tmp_path / "agreement.json"
    assert main(["agreement", "--methods", "uniform", "config", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["differences"]
    assert sorted(found) == ["config", "uniform"]
    assert all(0 <= difference < 1e-6 for oracles in found.values() for difference in oracles.values())


def test_every_pair_is_of_a_balancer_there_is():
    assert {method.split(",")[0] for method, _ in agreement.PAIRS} <= set(available())
    assert agreement.EXPLAINED.keys() <= agreement.PAIRS.keys()


def test_directions(tmp_path, capsys):
    out, picture = tmp_path / "directions.json", tmp_path / "directions.png"
    methods = ["--methods", "marble", "weighted_sum", "famo", "modo"]
    assert main(["directions", "--picture", str(picture), "--out", str(out), *methods]) == 0
    assert picture.stat().st_size > 1000
    cosines = json.loads(out.read_text())["min_cosine"]
    assert cosines["marble"] > 0 > cosines["weighted_sum"]
    assert cosines["modo"] > 0  # after many calls
    assert "famo" not in cosines  # looks at no gradient


def test_paths(tmp_path, capsys):
    out, picture = tmp_path / "paths.json", tmp_path / "paths.png"
    methods = ["--methods", "marble", "famo"]
    assert main(["paths", "--picture", str(picture), "--steps", "3", "--out", str(out), *methods]) == 0
    assert picture.stat().st_size > 1000
    assert json.loads(out.read_text())["arrived"] == {"marble": [False] * 5, "famo": [False] * 5}


def test_noise(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(noise, "LEVELS", (0.95,))
    monkeypatch.setattr(noise, "DIMENSIONS", (50_000,))
    monkeypatch.setattr(noise, "JUDGED", 5)
    monkeypatch.setattr(noise, "AT", 0.95)
    out, picture = tmp_path / "noise.json", tmp_path / "noise.png"
    assert main(["noise", "--draws", "2", "--picture", str(picture), "--out", str(out)]) == 0
    assert picture.stat().st_size > 1000
    progress = json.loads(out.read_text())["progress"]["agreeing"]["50000"]["0.95"]
    assert set(progress) == set(noise.METHODS)
    assert progress["noise-aware max–min"]["worst"][0] > progress["Marble, batch"]["worst"][0]


def test_inner_products_under_noise_are_what_is_said_of_them():
    """On average U + E/A for a step and U across its parts, and the signals along themselves."""
    rng, signals, ratio = np.random.default_rng(0), np.array([[1.0, 0.0], [0.6, 0.8]]), np.array([2.0, 0.5])
    steps = [noise._step(rng, signals, ratio, 100) for _ in range(4000)]
    noisy, signal = noise.estimate([gramian for gramian, _ in steps], 0.0)
    u = signals @ signals.T
    expected = u + np.outer(ratio, ratio) * ((1 - noise.SHARED) * np.eye(2) + noise.SHARED)
    np.testing.assert_allclose(signal, u, atol=0.03)
    np.testing.assert_allclose(noisy, expected, atol=0.03)
    np.testing.assert_allclose(np.mean([along for _, along in steps], axis=(0, 1)), u, atol=0.03)


def test_the_landscape_has_its_known_minima():
    best = landscape.objectives(torch.tensor([7.0, -8.4345], dtype=torch.float64))
    assert best[0].item() == pytest.approx(-19.9894 * landscape.SCALE, abs=1e-4)
    middle = landscape.objectives(torch.tensor([0.0, -8.3551], dtype=torch.float64))
    assert middle[0].item() / landscape.SCALE == pytest.approx(-15.0916, abs=1e-4)
    assert middle[1].item() == pytest.approx(-15.0916, abs=1e-4)


def test_a_path_ends_where_it_should():
    paths = landscape.descend([lambda: make("mgda", 2)], steps=1000, lr=0.02)
    assert paths.points.shape == (11, 1, 5, 2)
    assert torch.equal(paths.points[0, 0], torch.tensor(landscape.STARTS, dtype=torch.float64))
    assert paths.arrived.tolist() == [[False, False, False, True, False]]  # the start that is nearest
    assert abs(paths.points[-1, 0, 3, 1] - landscape.FRONT) < 0.15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["balancers", "--draws", "0"], "--draws must be at least 1"),
        (["balancers", "--methods", "marbel"], "no balancer is called 'marbel'; did you mean 'marble'"),
        (["agreement", "--methods", "marbel"], "nothing to compare 'marbel' with"),
        (["paths", "--steps", "0"], "--steps must be at least 1"),
        (["paths", "--picture", "/nowhere/x.png"], "the folder /nowhere does not exist"),
        (["noise", "--draws", "1"], "--draws must be at least 2"),
        (["directions", "--picture", "/nowhere/x.png"], "the folder /nowhere does not exist"),
        (["speed", "--batch", "0"], "--batch and --rounds must be at least 1"),
        (["balancers", "--out", "/nowhere/x.json"], "the folder /nowhere does not exist"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
