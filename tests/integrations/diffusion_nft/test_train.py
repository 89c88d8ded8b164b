"""The two commands from the outside: files, figures, exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from integrations.diffusion_nft import evaluate, run, train, trainer
from tests.integrations.diffusion_nft.miniature import STUBS, make_pipeline, stub_rewards

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    monkeypatch.setattr(run, "build_rewards", stub_rewards)


def command(config_file, output, *more) -> int:
    return train.main(["--config", str(config_file), "--output", str(output), *more])


@pytest.mark.parametrize("method", ["marble", "weighted_sum"])
def test_a_run_writes_every_file_with_sane_content(config_file, tmp_path, capsys, method):
    out = tmp_path / "out"
    assert command(config_file, out, "--method", method) == 0
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == [1, 2]
    assert metrics[0]["valid"] == {"redness": 12, "darkness": 6}
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["method"], summary["held_out"]) == (2, method, {})
    assert summary["seconds"] > 0
    assert -1 <= summary["min_cosine"] <= 1
    assert 0 <= summary["conflict_rate"] <= 1
    for row in summary["rewards"].values():
        assert row["change"] == pytest.approx(row["after"] - row["before"])
        assert row["after"] != row["before"]
        assert row["se"] > 0
    for picture in ("rewards.png", "balance.png", "samples/before.png", "samples/after.png"):
        with Image.open(out / picture) as image:
            assert min(image.size) > 100
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["step-000001", "step-000002"]
    assert not list(out.rglob(".*"))
    pipeline = make_pipeline()
    pipeline.load_lora_weights(out / "checkpoints" / "step-000002")
    assert train.main(["--config", str(out / "config.yaml"), "--print-config"]) == 0


def test_before_is_the_untrained_pipeline_and_evaluate_repeats_after(config_file, tmp_path):
    out = tmp_path / "out"
    assert command(config_file, out) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert evaluate.main(["--config", str(config_file), "--json", str(tmp_path / "base.json")]) == 0
    assert evaluate.main(["--checkpoint", str(out), "--json", str(tmp_path / "after.json")]) == 0
    for file, moment in (("base.json", "before"), ("after.json", "after")):
        measured = json.loads((tmp_path / file).read_text())["rewards"]
        for name, row in summary["rewards"].items():
            assert measured[name]["mean"] == pytest.approx(row[moment], abs=2e-3)  # a few pictures round differently


def test_held_out_rewards_are_measured_and_not_trained_on(config_file, tmp_path):
    out = tmp_path / "out"
    assert command(config_file, out, "rewards=[redness]", "held_out_rewards=[darkness]", "steps=1") == 0
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["rewards"]) == ["redness"]
    assert list(summary["held_out"]) == ["darkness"]
    assert list(json.loads((out / "metrics.jsonl").read_text())["coefficients"]) == ["redness"]


def stop_after(calls, action):
    """A redness that acts in its n-th call."""

    class Stopping(STUBS["redness"]):
        count = 0

        def __call__(self, images, prompts):
            Stopping.count += 1
            if Stopping.count == calls:
                action()
            return super().__call__(images, prompts)

    return lambda names: {**stub_rewards(names), "redness": Stopping()}


# The held-out set is one batch and each step's rollout three: the 6th call is in the middle of step 2.
IN_STEP_2 = 6


def test_ctrl_c_leaves_whole_files_and_resume_ends_as_if_nothing_happened(config_file, tmp_path, monkeypatch, capsys):
    assert command(config_file, tmp_path / "straight", "steps=3") == 0
    out = tmp_path / "stopped"
    monkeypatch.setattr(run, "build_rewards", stop_after(IN_STEP_2, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert command(config_file, out, "steps=3", "save_every=100") == 130
    assert f"stopped after step 1; checkpoint: {out}/checkpoints/step-000001" in capsys.readouterr().out.replace(
        "\n", ""
    )
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 1
    assert not (out / "summary.json").exists()
    make_pipeline().load_lora_weights(out / "checkpoints" / "step-000001")

    monkeypatch.setattr(run, "build_rewards", stub_rewards)
    assert train.main(["--resume", str(out)]) == 0
    weights = [
        load_file(p / "checkpoints" / "step-000003" / "policy.safetensors") for p in (tmp_path / "straight", out)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    summaries = [json.loads((p / "summary.json").read_text()) for p in (tmp_path / "straight", out)]
    assert summaries[0]["rewards"] == summaries[1]["rewards"]
    assert summaries[0]["min_cosine"] == summaries[1]["min_cosine"]
    assert train.main(["--resume", str(out)]) == 2


def test_sigterm_stops_too(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "build_rewards", stop_after(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert command(config_file, tmp_path / "out") == 130
    assert (tmp_path / "out" / "checkpoints" / "step-000000").is_dir()


def test_a_failing_reward_ends_the_run_with_one_line_and_a_checkpoint(config_file, tmp_path, monkeypatch, capsys):
    def fail():
        raise RuntimeError("engine gone")

    monkeypatch.setattr(run, "build_rewards", stop_after(IN_STEP_2, fail))
    assert command(config_file, tmp_path / "out") == 1
    captured = capsys.readouterr()
    assert captured.err == "error: reward 'redness' failed: RuntimeError: engine gone\n"
    assert (tmp_path / "out" / "checkpoints" / "step-000001").is_dir()


def test_a_nan_in_the_model_ends_the_run_with_one_line_and_the_last_whole_step(
    config_file, tmp_path, monkeypatch, capsys
):
    terms = trainer.nft_terms
    calls = []

    def break_in_step_2(*arguments):
        calls.append(1)
        return terms(*arguments) * (float("nan") if len(calls) == 6 else 1.0)  # three micro-batches a step

    monkeypatch.setattr(trainer, "nft_terms", break_in_step_2)
    assert command(config_file, tmp_path / "out", "balance.refresh_every=2") == 1
    assert "NaN or infinite" in capsys.readouterr().err
    policy = load_file(tmp_path / "out" / "checkpoints" / "step-000001" / "policy.safetensors")
    assert all(tensor.isfinite().all() for tensor in policy.values())


def wrong(capsys, *argv, main=train.main) -> str:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["steps=0"], "steps=0"),
        (["stepz=1"], "did you mean 'steps'"),
        (["stepz"], "not key=value"),
        (["--method", "marbel"], "did you mean 'marble'"),
        (["rewards=[rednes]"], "unknown reward 'rednes'"),
        (["balance.options={preference: [1, 2, 3]}"], "preference"),
        (["--method", "weighted_sum", "weighted_sum.weights=[1, 2, 3]"], "3 values for 2 rewards"),
        (["pipeline=/no/such/folder"], "no such folder"),
        (["prompts.train=[no_such_file.txt]"], "no_such_file.txt not found"),
        (["prompts.held_out=[no_such_file.txt]"], "no_such_file.txt not found"),
        (["lora.targets=[no_such_layer]"], "no_such_layer"),
        (["device=warp"], "device='warp'"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_wrong_input_is_one_line_exit_code_2_and_no_folder(config_file, tmp_path, capsys, arguments, part):
    out = tmp_path / "out"
    assert part in wrong(capsys, "--config", str(config_file), "--output", str(out), *arguments)
    assert not out.exists()


def test_an_existing_folder_is_not_touched(config_file, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "exists already" in wrong(capsys, "--config", str(config_file), "--output", str(out))
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_other_wrong_commands(tmp_path, capsys, config_file):
    assert "--config" in wrong(capsys)
    assert "not found" in wrong(capsys, "--config", "no_such")
    assert "no run folder" in wrong(capsys, "--resume", str(tmp_path / "nowhere"))
    assert "nothing else" in wrong(capsys, "--resume", str(tmp_path), "steps=3")
    for argv, part in (
        ([], "either --checkpoint"),
        (["--checkpoint", str(tmp_path / "nowhere")], "does not exist"),
        (["--checkpoint", str(tmp_path)], "no checkpoint"),
        (["--config", str(config_file), "--rewards", "blueness"], "unknown reward 'blueness'"),
        (["--config", str(config_file), "--json", str(config_file)], "exists already"),
    ):
        assert part in wrong(capsys, *argv, main=evaluate.main)


def test_print_config_prints_the_resolved_config(config_file, capsys):
    import yaml

    assert train.main(["--config", str(config_file), "--print-config", "seed=9", "--method", "mgda"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["seed"], printed["method"], printed["loss"]["beta"]) == (9, "mgda", 0.1)
    assert "unknown method 'marbel'" in wrong(capsys, "--config", str(config_file), "--print-config", "method=marbel")


@pytest.mark.parametrize("script", ["train.py", "evaluate.py"])
def test_the_scripts_run_as_files_from_anywhere(script, tmp_path):
    path = ROOT / "integrations" / "diffusion_nft" / script
    shown = subprocess.run([sys.executable, path, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--config" in shown.stdout
    failed = subprocess.run([sys.executable, path, "--config", "tinny"], cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: config 'tinny' not found")
    assert failed.stderr.count("\n") == 1
