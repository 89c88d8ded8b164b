"""The trial on the miniature pipeline and its two stub rewards."""

import pytest
import torch
import yaml

from integrations.diffusion_nft import run
from tests.integrations.diffusion_nft.miniature import make_pipeline, settings, stub_rewards


@pytest.fixture(autouse=True)
def _stubs(monkeypatch):
    monkeypatch.setattr(run, "build_rewards", stub_rewards)


@pytest.fixture(autouse=True)
def _same_number_of_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def small_pipeline(tmp_path_factory):
    path = tmp_path_factory.mktemp("trial") / "pipeline"
    make_pipeline().save_pretrained(path)
    return path


@pytest.fixture
def config_file(tmp_path, small_pipeline):
    changes = {
        "pipeline": str(small_pipeline),
        "loss": {"micro_batch": 6, "train_timesteps": 1, "kl": 0},
        "averages": {"old_decay": "0"},
        "evaluation": {"steps": 2, "pictures": 12, "images_per_prompt": 3},
    }
    path = tmp_path / "mini.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path, **changes)), encoding="utf-8")
    return path


@pytest.fixture
def config(config_file):
    from integrations.diffusion_nft.config import load_config

    return load_config(str(config_file))
