import json

import pytest
import torch
from safetensors.torch import load_file

from integrations.diffusion_nft.config import UserError
from integrations.diffusion_nft.run_folder import RunFolder, check_free, load_checkpoint

NAN = float("nan")


@pytest.fixture
def folder(tmp_path, config):
    return RunFolder.create(tmp_path / "a" / "run", config)


def save(folder, step, value=1.0):
    return folder.save_checkpoint(
        step,
        lambda path: (path / "lora").write_text("lora"),
        {"trained.x": torch.full((2,), value)},
        {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
        {"seconds": 1.5},
    )


def test_create_refuses_a_folder_with_content_and_changes_nothing(folder, config):
    (folder.path / "config.yaml").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        RunFolder.create(folder.path, config)
    assert (folder.path / "config.yaml").read_text() == "mine"


def test_an_empty_folder_is_free_and_a_file_is_not(tmp_path):
    check_free(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        check_free(tmp_path / "file")


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make output folder"):
        RunFolder.create(tmp_path / "file" / "run", config)


def test_open_needs_a_run(tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        RunFolder.open(tmp_path)


def test_json_has_no_nan(folder):
    folder.write_json("x.json", {"a": NAN, "b": [float("inf"), 1.0], "c": torch.tensor([1.0, NAN]), "d": (1, "x")})
    assert json.loads((folder.path / "x.json").read_text()) == {
        "a": None,
        "b": [None, 1.0],
        "c": [1.0, None],
        "d": [1, "x"],
    }


def test_a_failed_write_leaves_the_old_file_and_no_other(folder):
    folder.write_text("x.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        folder.write_text("x.txt", "a surrogate cannot be encoded: \ud800")
    assert (folder.path / "x.txt").read_text() == "old"
    assert {p.name for p in folder.path.iterdir()} == {"config.yaml", "x.txt"}


def test_metrics_and_evaluations_read_back_and_can_be_cut(folder):
    for step in (1, 2, 3):
        folder.append_metrics({"step": step, "x": NAN})
        folder.write_evaluation(step, {"r": [1.0 * step, NAN]})
    assert [record["step"] for record in folder.metrics()] == [1, 2, 3]
    assert folder.metrics()[0]["x"] is None
    folder.forget_after(2)
    assert [record["step"] for record in folder.metrics()] == [1, 2]
    assert list(folder.evaluations()) == [1, 2]
    value, missing = folder.evaluations()[2]["r"]
    assert value == 2.0
    assert missing != missing


def test_checkpoints_are_whole_and_the_latest_is_found(folder):
    assert folder.latest_checkpoint() is None
    save(folder, 2)
    save(folder, 10, value=4.0)
    latest = folder.latest_checkpoint()
    assert latest.name == "step-000010"
    assert (latest / "lora").read_text() == "lora"
    policy, optimizer, state = load_checkpoint(latest)
    assert torch.equal(policy["trained.x"], torch.full((2,), 4.0))
    assert optimizer["param_groups"] == [{"lr": 0.1}]
    assert state == {"step": 10, "seconds": 1.5}


def test_an_interrupted_checkpoint_is_not_found_and_a_saved_one_is_kept(folder):
    def stop(path):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.save_checkpoint(1, stop, {}, {}, {})
    assert folder.latest_checkpoint() is None
    save(folder, 1)
    path = save(folder, 1, value=9.0)
    assert load_file(path / "policy.safetensors")["trained.x"][0] == 1
