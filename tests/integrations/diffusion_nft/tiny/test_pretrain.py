"""The pre-training script: it runs from any folder, is reproducible, and leaves a whole checkpoint."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from integrations.diffusion_nft.tiny import load_pipeline, pretrain
from integrations.diffusion_nft.tiny.pictures import draw, random_scene


def weights(path):
    return load_pipeline(path).transformer.state_dict()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(pretrain, "_sample_grid", functools.partial(pretrain._sample_grid, columns=1))


def test_same_seed_same_checkpoint_and_the_old_one_is_replaced(quick, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("a", 2)):
        pretrain.train(seed, steps=2, batch=4, output=tmp_path / name, save_every=2)
        if name == "b":
            first, second = weights(tmp_path / "a"), weights(tmp_path / "b")
            assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(weights(tmp_path / "a")["proj_out.weight"], first["proj_out.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert {"README.md", "samples.png", "prompts_train.jsonl", "prompts_held_out.jsonl"} <= {
        path.name for path in (tmp_path / "a").iterdir()
    }


def test_an_interrupted_save_leaves_the_old_checkpoint(quick, tmp_path, monkeypatch):
    pretrain.train(0, steps=1, batch=4, output=tmp_path / "a", save_every=1)
    before = weights(tmp_path / "a")
    monkeypatch.setattr(pretrain, "_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pretrain.train(1, steps=1, batch=4, output=tmp_path / "a", save_every=1)
    after = weights(tmp_path / "a")
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_loss_is_that_of_flow_matching():
    """The velocity of the straight paths has no loss, and σ is logit-normal with the scheduler's shift."""
    pipeline = pretrain.build(0)
    rng = np.random.default_rng(0)
    scenes = [random_scene(rng) for _ in range(8)]
    pictures = np.stack([draw(scene, rng) for scene in scenes])
    tokens, pooled = pretrain._Captions(pipeline)(scenes)

    class Perfect(torch.nn.Module):
        """The velocity of straight paths to the known pictures: (x_σ − x0)/σ."""

        def forward(self, noisy, tokens, pooled, timestep):
            vae, sigma = pipeline.vae, timestep.view(-1, 1, 1, 1) / 1000
            pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2) / 127.5 - 1
            clean = (vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
            self.sigma = sigma.flatten()
            return type("Output", (), {"sample": (noisy - clean) / sigma})

    pipeline.transformer = perfect = Perfect()
    loss = pretrain._flow_matching_loss(pipeline, pictures, tokens, pooled, torch.Generator().manual_seed(0))
    assert loss < 1e-8
    uniform = torch.randn(8, generator=torch.Generator().manual_seed(0)).sigmoid()
    torch.testing.assert_close(perfect.sigma, 2 * uniform / (1 + uniform))


@pytest.mark.slow
def test_runs_from_any_folder(tmp_path):
    script = Path(pretrain.__file__)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, script, "--output", "made/here", "--steps", "1"], cwd=tmp_path, env=environment, check=True
    )
    assert "--output made/here --steps 1" in (tmp_path / "made/here/README.md").read_text()
