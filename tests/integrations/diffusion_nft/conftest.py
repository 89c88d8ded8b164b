"""Fixtures made from the miniature."""

from pathlib import Path

import pytest
import yaml

from integrations.diffusion_nft.config import Config
from tests.integrations.diffusion_nft.miniature import make_pipeline, settings


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mini") / "pipeline"
    make_pipeline().save_pretrained(path)
    return path


@pytest.fixture
def pipeline():
    return make_pipeline()


@pytest.fixture
def config(tmp_path) -> Config:
    return Config.model_validate(settings(tmp_path))


@pytest.fixture
def config_file(tmp_path, pipeline_folder) -> Path:
    path = tmp_path / "mini.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path, pipeline=str(pipeline_folder))), encoding="utf-8")
    return path
