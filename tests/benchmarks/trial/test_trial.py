"""``python -m benchmarks run nft_tiny`` and ``report nft_tiny`` on the miniature."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.__main__ import main
from benchmarks.trial import job as job_module
from benchmarks.trial import methods, plan, summary
from benchmarks.trial.job import configure
from benchmarks.trial.regimes import REGIMES
from benchmarks.trial.regimes import settings as regime_settings
from benchmarks.trial.scaling import LEAST, Scale
from benchmarks.trial.store import Job, Store
from integrations.diffusion_nft.balancing import Method

RAN = ["benign", "units"]
KINDS = ["tuned_sum", "stages", "distilled", "published_marble"]


@pytest.fixture
def one_rate(monkeypatch):
    monkeypatch.setattr(plan, "RATES", (0.01,))
    monkeypatch.setattr(plan, "DRAWS", 2)


def run(config_file, folder, *more) -> int:
    return main(["run", "nft_tiny", "--config", str(config_file), "--folder", str(folder), *more])


def report(config_file, folder, *more) -> int:
    picture = ["--picture", str(folder / "trial.png")]
    return main(["report", "nft_tiny", "--config", str(config_file), "--folder", str(folder), *picture, *more])


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("*/*/*.json")}


@pytest.mark.usefixtures("one_rate")
def test_methods_of_every_kind_run_and_the_report_shows_them(config_file, tmp_path, capsys):
    folder, out, table = tmp_path / "runs", tmp_path / "out.json", tmp_path / "table.md"
    some = ["--seeds", "1", "--regimes", *RAN, "--methods", *KINDS]
    assert run(config_file, folder, *some) == 0
    found = json.loads("[" + ",".join((folder / name).read_text() for name in files(folder)) + "]")
    assert {result["status"] for result in found} == {"done"}, [r.get("where") for r in found]
    made = {(r["job"]["regime"], r["job"]["method"]) for r in found if r["job"]["seed"] == 0}
    assert made >= {(regime, method) for regime in RAN for method in KINDS}
    assert not list(folder.rglob("*.partial"))

    assert report(config_file, folder, *some, "--out", str(out), "--table", str(table)) == 0
    shown = json.loads(out.read_text())
    assert set(shown["regimes"]) == set(RAN)
    for regime in shown["regimes"].values():
        assert set(regime["methods"]) == set(KINDS)
        for row in regime["methods"].values():
            assert set(row["changes"]) == {"redness", "darkness"}
            assert all(math.isfinite(row[key][0]) for key in ("worst", "area"))
            assert 0 <= row["conflicts"][0] <= 1
            assert row["batches"] == 4  # two points, two batches each
            assert row["worst"][1] is None  # one seed has no standard error
    assert shown["failed"] == {}
    assert table.read_text().count("| tuned_sum | 1 |") == 2
    assert (folder / "trial.png").stat().st_size > 1000
    capsys.readouterr()


@pytest.mark.usefixtures("one_rate")
def test_a_killed_trial_goes_on_where_it_was(config_file, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs"
    some = ["--seeds", "1", "--methods", "marble", "--regimes", "benign"]
    perform, left = job_module.perform, [3]

    def killed(*arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return perform(*arguments)

    monkeypatch.setattr(job_module, "perform", killed)
    with pytest.raises(KeyboardInterrupt):
        run(config_file, folder, *some)
    before = {name: (folder / name).read_text() for name in files(folder)}
    assert len(before) == 3  # two specialists' rates and marble's
    assert run(config_file, folder, *some, "--list") == 0
    assert "3 runs of" in capsys.readouterr().out  # two specialists and marble
    assert files(folder) == set(before)
    left[0] = 3
    assert run(config_file, folder, *some) == 0
    assert len(files(folder)) == 6
    assert all((folder / name).read_text() == text for name, text in before.items())
    assert run(config_file, folder, *some) == 0  # nothing left: `killed` would raise


@pytest.mark.usefixtures("one_rate")
def test_a_run_that_fails_is_recorded_and_stops_nothing(config_file, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs"
    some = ["--seeds", "1", "--methods", "uniform", "marble", "--regimes", "benign"]
    original = job_module._run

    def broken(job, *more):
        if job.method == "uniform":
            raise FloatingPointError("reward redness is not finite")
        return original(job, *more)

    monkeypatch.setattr(job_module, "_run", broken)
    assert run(config_file, folder, *some) == 0
    out = tmp_path / "out.json"
    assert report(config_file, folder, *some[2:], "--out", str(out)) == 0
    shown = json.loads(out.read_text())
    assert list(shown["regimes"]["benign"]["methods"]) == ["marble"]
    assert "FloatingPointError: reward redness is not finite" in shown["failed"].values()
    monkeypatch.setattr(job_module, "_run", original)
    assert run(config_file, folder, *some) == 0
    assert "0 runs made" in capsys.readouterr().out
    assert run(config_file, folder, *some, "--retry") == 0
    assert "2 runs made, 0 failed" in capsys.readouterr().out


def test_a_folder_of_another_config_is_refused(config_file, tmp_path, capsys):
    Store(tmp_path / "runs").bind({"seed": 0})
    with pytest.raises(SystemExit):
        run(config_file, tmp_path / "runs")
    assert "has runs of another config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nft_tiny", "--jobs", "0"], "--jobs must be at least 1"),
        (["run", "nft_tiny", "--seeds", "0"], "--seeds must be at least 1"),
        (["run", "nft_tiny", "--methods", "marbel"], "--methods: 'marbel' is none of weighted_sum"),
        (["run", "nft_tiny", "--regimes", "easy"], "--regimes: 'easy' is none of benign"),
        (["run", "nft_tiny", "--config", "trail"], "did you mean 'trial'"),
        (["run", "nft_big"], "invalid choice: 'nft_big'"),
        (["report", "nft_tiny", "--folder", "/nowhere"], "has no regime with its specialists"),
        (["report", "nft_tiny", "--table", "/nowhere/x.md"], "the folder /nowhere does not exist"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_regimes_are_what_they_say():
    names = ["a", "b", "c", "d", "e"]
    assert regime_settings("benign", names, names) == {}
    units = regime_settings("units", names, names)["reward_scale"]
    assert units == pytest.approx({"a": 0.01, "b": 0.1, "c": 1, "d": 10, "e": 100})
    assert regime_settings("units", names, ["d"]) == {"reward_scale": {"d": 10.0}}
    assert regime_settings("specialist", names, names) == {"prompts": {"shares": [9, 1]}}


def test_all_methods_of_a_seed_share_prompts_noise_and_steps(config):
    every = [configure(Job("units", method, 5, 0.1), config, None) for method in methods.METHODS]
    every.append(configure(Job("units", methods.specialist("redness"), 5, 0.1), config, None))
    for key in ("seed", "prompts", "rollout", "loss", "steps", "averages", "lora", "optimizer"):
        assert all(getattr(c, key) == getattr(every[0], key) for c in every), key
    assert every[0].optimizer.lr == 0.1


@pytest.mark.parametrize("name", methods.METHODS)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_method_has_a_config_that_works(config, name, regime):
    built = Method(configure(Job(regime, name, 0, 0.1), config, [1.0, 2.0] if name == methods.TUNED_SUM else None))
    assert built.rewards == ["redness", "darkness"]
    assert built.is_sum == (name in {"weighted_sum", "tuned_sum", "gdpo"})


def fake(store: Store, job: Job, redness: float, darkness: float, **more) -> None:
    point = {"step": 2, "rewards": {"redness": redness, "darkness": darkness}}
    start = {"step": 0, "rewards": {"redness": 0.0, "darkness": 0.5}}
    more = {"status": "done", "weights": None, "seconds": 1, "cpu_seconds": 1, **more}
    store.write(job, {"curve": [start, point], **more})


def planned(store, **changes) -> plan.Plan:
    values = {"regimes": ["benign"], "methods": list(methods.METHODS), "seeds": 2, **changes}
    return plan.Plan(store, ["redness", "darkness"], **values)


def test_tuning_chooses_by_the_worst_scaled_gain_and_specialists_by_their_own(tmp_path):
    store = Store(tmp_path)
    low, middle, high = plan.RATES
    asked = planned(store, regimes=list(REGIMES))
    assert asked.rate("benign", "marble") == middle  # before there is anything to choose by
    for lr, gain in ((low, 0.1), (middle, 0.2), (high, 0.4)):
        fake(store, Job("benign", "specialist-redness", plan.TUNING_SEED, lr), gain, 0.5)
        fake(store, Job("benign", "specialist-darkness", plan.TUNING_SEED, lr), 0.0, 0.5 + gain / 4)
    assert asked.rate("benign", "specialist-redness") == high
    fake(store, Job("benign", "marble", plan.TUNING_SEED, low), 0.08, 0.52)  # scaled .2 and .2
    fake(store, Job("benign", "marble", plan.TUNING_SEED, high), 0.4, 0.51)  # scaled 1 and .1
    assert asked.rate("benign", "marble") == low
    assert asked.rate("units", "marble") == low  # units change nothing for it
    fake(store, Job("units", "weighted_sum", plan.TUNING_SEED, high), 0.4, 0.5, spreads=[0.5, 0.0])
    assert asked.rate("units", "tuned_sum") == high
    assert asked.weights(Job("units", "tuned_sum", 0, high, draw=0)) == [2.0, 1.0]
    drawn = np.array(asked.weights(Job("units", "tuned_sum", 0, high, draw=1)))
    assert (np.abs(np.log10(drawn / [2.0, 1.0])) <= 0.5).all()
    assert asked.weights(Job("benign", "marble", 0, high)) is None


def test_worst_area_and_errors_are_those_of_the_definition(tmp_path):
    store, asked = Store(tmp_path), planned(Store(tmp_path), methods=["marble"])
    for seed, end in ((0, 0.3), (1, 0.5)):
        fake(store, asked.job("benign", "specialist-redness", seed), end, 0.0)
        fake(store, asked.job("benign", "specialist-darkness", seed), 0.0, 0.501)  # gains less than LEAST
    for seed, redness in ((0, 0.2), (1, 0.1)):
        fake(store, asked.job("benign", "marble", seed), redness, 0.5 + LEAST)
    row = summary.summarise(asked)["regimes"]["benign"]["methods"]["marble"]
    assert row["worst"] == pytest.approx([(0.5 + 0.25) / 2, 0.125])
    assert row["area"] == pytest.approx([(0.5 + 0.25) / 4, 0.125 / 2])
    assert row["changes"]["redness"] == pytest.approx([0.15, 0.05])
    assert row["seeds"] == 2


def test_a_conflict_is_a_negative_cosine_of_any_reward_that_is_there():
    run = {"curve": [{}, {"cosines": [[0.1, None], [0.2, -0.01]]}, {"cosines": [[-1e-9, 0.3], [-0.5, -0.5]]}]}
    assert summary.conflicts(run) == [False, True, False, True]


def test_scale_without_specialists_says_nothing():
    assert math.isnan(Scale.of({"redness": []}).worst({"redness": 1.0}))


@pytest.mark.slow
@pytest.mark.usefixtures("one_rate")
def test_two_processes_at_a_time(config_file, tmp_path):
    """The tiny pipeline and real rewards: stubs do not reach the other processes."""
    settings = yaml.safe_load(config_file.read_text()) | {"pipeline": "tiny", "rewards": ["tidiness", "framing"]}
    config_file.write_text(yaml.safe_dump(settings))
    folder = tmp_path / "runs"
    assert run(config_file, folder, "--seeds", "1", "--methods", "marble", "--regimes", "units", "--jobs", "2") == 0
    found = [json.loads((folder / name).read_text()) for name in files(folder)]
    assert [result["status"] for result in found] == ["done"] * 6, [r.get("error") for r in found]
