import numpy as np
import pytest
import torch

from benchmarks.trial import probe
from benchmarks.trial.probe import cosines
from integrations.diffusion_nft.balancing import Method
from integrations.diffusion_nft.evaluation import HeldOut
from integrations.diffusion_nft.randomness import generator
from integrations.diffusion_nft.trainer import Trainer
from tests.integrations.diffusion_nft.miniature import make_pipeline, stub_rewards


@pytest.fixture
def trainer(config):
    return Trainer(config, make_pipeline(), stub_rewards(config.rewards), Method(config))


def test_the_gradients_are_those_that_training_balances(config, trainer, monkeypatch):
    alone = config.model_copy(update={"rewards": ["redness"]})
    single = Trainer(alone, make_pipeline(), stub_rewards(["redness"]), Method(alone))
    rollout = single.rollout()
    single.backward(rollout)  # one objective: its gradient as it is
    expected = torch.cat([p.grad.flatten() for p in single.policy.parameters]).double()
    monkeypatch.setattr(probe, "generator", lambda seed, purpose, *indices: generator(seed, "train", *indices))
    groups = torch.arange(len(rollout.prompts)) // config.rollout.images_per_prompt
    both = trainer.rollout()
    found = probe._gradients(trainer, both, groups)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-6 * float(expected.norm()))


def test_a_change_down_a_gradient_has_cosine_one_and_nothing_is_changed(config, trainer, monkeypatch):
    trainer.step()
    monkeypatch.setattr(probe, "BATCHES", 1)
    held_out = HeldOut(config, trainer.latents, trainer.rewards)
    with trainer.policy.averaged():
        measured = held_out.measure()
        down = -probe._gradients(trainer, measured, torch.from_numpy(held_out.groups))
    before = trainer.policy.state_dict()
    change = torch.split(down[1], [p.numel() for p in trainer.policy.parameters])
    ((_, second),) = cosines(trainer, measured, held_out.groups, change)
    assert second == pytest.approx(1)
    ((_, opposite),) = cosines(trainer, measured, held_out.groups, [-part for part in change])
    assert opposite == pytest.approx(-1)
    assert all(torch.equal(before[name], now) for name, now in trainer.policy.state_dict().items())
    assert all(p.grad is None for p in trainer.policy.parameters)


def test_a_reward_that_is_not_in_a_batch_has_no_cosine(config, trainer):
    held_out = HeldOut(config, trainer.latents, trainer.rewards)
    measured = held_out.measure()
    quoted = np.array([prompt.quoted is not None for prompt in measured.prompts])
    change = [torch.ones_like(p) for p in trainer.policy.parameters]
    with_text, without = cosines(trainer, measured, np.where(quoted, 0, 1), change)
    assert without[1] is None
    assert with_text[1] is not None
