"""Published MARBLE in benchmarks has the published faults, and the library's own has not: each fault is shown."""

import math

import pytest
import torch

from benchmarks.trial.published import DECAY, EVERY, PublishedMarble, blended_loss, harmonised
from gradbalance import BalancedOptimizer, MarbleOptimizer
from integrations.diffusion_nft.balancing import Method
from integrations.diffusion_nft.loss import nft_coefficients
from integrations.diffusion_nft.trainer import Trainer
from tests.integrations.diffusion_nft.miniature import make_pipeline, stub_rewards

NAN = float("nan")


def cosines(direction, gradients):
    return (gradients @ direction / (gradients.norm(dim=1) * direction.norm())).tolist()


def test_fault_1_alpha_of_unit_gradients_weighs_raw_ones():
    angle = 2 * math.pi / 3
    gradients = torch.tensor([[10.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
    alpha, direction = harmonised(gradients)
    assert cosines(direction, gradients) == pytest.approx([0.5, 0.5])
    terms = torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))
    # The advantages' losses are the raw gradients here: P's coefficient is c r, with r linear in the advantage.
    assert cosines(alpha @ gradients, gradients) == pytest.approx([0.996, -0.419], abs=1e-3)
    blended_loss(terms, alpha, torch.tensor([[2.0], [4.0]], dtype=torch.float64), beta=1.0, clip=5.0).backward()
    assert terms.grad.flatten().tolist() == pytest.approx([5 * 0.8, 5 * 0.2])  # r = ½ + (½·2 + ½·4)/10


def test_fault_2_the_blend_is_clamped_and_not_its_parts():
    alpha, advantages = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([[9.0], [-1.0]])
    terms = torch.eye(2, dtype=torch.float64)[:, :1]  # P = 1, N = 0: the loss is c r
    published = float(blended_loss(terms, alpha, advantages.double(), beta=1.0, clip=5.0)) / 5
    assert published == pytest.approx(0.5 + 4 / 10)
    exact = nft_coefficients(advantages, torch.tensor([1, 1]), beta=1.0, advantage_clip=5.0)[:, 0, 0] / 5
    assert float(alpha @ exact) == pytest.approx(0.5 + 2 / 10)


def test_fault_3_a_missing_reward_is_diluted_and_pulls_to_the_old_policy():
    only = torch.tensor([1.0], dtype=torch.float64)
    advantages = torch.tensor([[2.0, NAN, NAN]], dtype=torch.float64)
    terms = torch.tensor([[1.0, 10.0, 10.0], [0.0, 10.0, 10.0]], dtype=torch.float64)
    published = float(blended_loss(terms, only, advantages, beta=1.0, clip=5.0))
    assert published == pytest.approx((5 * 0.7 + 2 * 5 * 10) / 3)
    exact = nft_coefficients(advantages, torch.tensor([1]), beta=1.0, advantage_clip=5.0)
    assert float((exact * terms).sum()) == pytest.approx(5 * 0.7)


def build(config, kind=PublishedMarble, **changes):
    changed = config.model_copy(update=changes)
    return kind(changed, make_pipeline(), stub_rewards(changed.rewards), Method(changed))


def test_fault_4_one_micro_batch_steps_along_another_alpha(config):
    trainer = build(config)
    trainer._average = torch.tensor([1.0, 0.0], dtype=torch.float64)
    rollout = trainer.rollout()
    used = []
    loss = trainer._loss
    trainer._loss = lambda terms, alpha, advantages: used.append(alpha.clone()) or loss(terms, alpha, advantages)
    trainer.balance(rollout)
    assert [alpha.tolist() for alpha in used[:2]] == [[1, 0], [0, 1]]  # the measured micro-batch, each reward alone
    assert len(used) == 3  # and one micro-batch more
    fresh = (trainer._average - DECAY * torch.tensor([1.0, 0.0])) / (1 - DECAY)
    assert fresh.sum() == pytest.approx(1)
    assert torch.equal(used[2], trainer._average)
    assert not torch.allclose(fresh, trainer._average)


def test_alpha_is_cached_between_refreshes(config):
    trainer = build(config)
    coefficients = [trainer.step()["coefficients"] for _ in range(3)]
    assert coefficients[0] == coefficients[1] == coefficients[2]
    trainer.done = EVERY
    assert trainer.step()["coefficients"] != coefficients[0]


def test_everything_but_the_balance_is_the_same(config):
    published, ours = build(config), build(config, kind=Trainer)
    assert published.rollout().rewards.nan_to_num().equal(ours.rollout().rewards.nan_to_num())
    assert isinstance(ours.optimizer, MarbleOptimizer)
    assert isinstance(published.optimizer, BalancedOptimizer)
    assert {"step", "rewards", "grad_norm", "decays", "seconds"} <= set(published.step())


def test_a_zero_gradient_has_no_part_in_the_direction():
    gradients = torch.tensor([[3.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    alpha, direction = harmonised(gradients)
    assert alpha.tolist() == [1, 0]
    assert direction.tolist() == [1.5, 0]
