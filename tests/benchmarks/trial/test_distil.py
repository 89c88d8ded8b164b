import pytest
import torch
from safetensors.torch import save_file

from benchmarks.trial.distil import KEPT, ROLLOUTS, Distilled, adapters_of, best_pictures
from integrations.diffusion_nft.balancing import Method
from integrations.diffusion_nft.rollout import Rollout
from integrations.diffusion_nft.trainer import Trainer
from tests.integrations.diffusion_nft.miniature import make_pipeline, stub_rewards

NAN = float("nan")


@pytest.fixture
def trainer(config):
    return Trainer(config, make_pipeline(), stub_rewards(config.rewards), Method(config))


def test_the_best_of_each_prompt_are_kept():
    scores = torch.tensor([[0.1, 0.9, 0.2, 0.3, NAN, NAN, NAN, NAN, 0.5, 0.5, 0.4, 0.8]])
    rollout = Rollout([None] * 12, torch.zeros(12, 1), None, scores, {})
    assert best_pictures(rollout, 0, 4) == [1, 11]
    assert KEPT == 4


def test_it_starts_untrained_and_learns_the_specialists_pictures(config, trainer, tmp_path):
    untrained = trainer.policy.state_dict()
    path = tmp_path / "specialist.safetensors"
    save_file({name: tensor + 0.05 for name, tensor in untrained.items()}, path)
    distilled = Distilled(trainer, {"redness": path, "darkness": path})
    assert all(torch.equal(untrained[name], now) for name, now in trainer.policy.state_dict().items())
    assert trainer.done == 0
    kept = ROLLOUTS * 4 + ROLLOUTS * 2  # one of each prompt's three pictures; darkness scores half of the prompts
    assert len(distilled._prompts) == len(distilled._latents) == kept
    losses = [_flow_loss(trainer, distilled)]
    for _ in range(20):
        distilled.step()
    losses.append(_flow_loss(trainer, distilled))
    assert losses[1] < 0.97 * losses[0]
    assert trainer.done == 20


@torch.no_grad()
def _flow_loss(trainer, distilled) -> float:
    draw = torch.Generator().manual_seed(0)
    clean = distilled._latents
    fresh = torch.randn(clean.shape, generator=draw)
    t = torch.full((len(clean),), 0.7)
    embeddings = trainer.latents.embed([prompt.text for prompt in distilled._prompts])
    velocity = trainer.latents.velocity(0.3 * clean + 0.7 * fresh, t, embeddings)
    return float((velocity - (fresh - clean)).square().mean())


def test_a_specialist_without_weights_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"specialist for redness has left no weights \(x.safetensors\)"):
        adapters_of({"redness": tmp_path / "x.safetensors"})
