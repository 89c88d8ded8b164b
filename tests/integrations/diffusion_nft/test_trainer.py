import copy

import numpy as np
import pytest
import torch

from integrations.diffusion_nft.balancing import Method
from integrations.diffusion_nft.config import Config
from integrations.diffusion_nft.trainer import Trainer, present_counts
from tests.integrations.diffusion_nft.miniature import make_pipeline, stub_rewards

NAN = float("nan")


def build(config, rewards=None, **changes) -> Trainer:
    values = config.model_dump()
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    changed = Config.model_validate(values)
    return Trainer(changed, make_pipeline(), rewards or stub_rewards(changed.rewards), Method(changed))


def gradient(trainer, rollout) -> torch.Tensor:
    trainer.optimizer.zero_grad()
    trainer.backward(rollout)
    return torch.cat([parameter.grad.flatten() for parameter in trainer.policy.parameters]).double()


def away_from_old(trainer):
    """Move the trained weights, so that the three forwards differ."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.policy.parameters:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))


def test_the_gradient_does_not_depend_on_the_micro_batches(config):
    trainers = [build(config, loss={"micro_batch": size, "train_timesteps": 2}) for size in (12, 5, 1)]
    rollout = trainers[0].rollout()
    assert rollout.rewards.isnan().any()
    for trainer in trainers:
        away_from_old(trainer)
    whole, *parts = (gradient(trainer, rollout) for trainer in trainers)
    for part in parts:
        assert (part - whole).norm() <= 1e-4 * whole.norm()


def test_the_gradient_is_that_of_the_published_loss(config):
    """One objective: the balanced gradient is a positive multiple of ∇loss; here the weighted sum has λ = 1 exactly."""
    trainer = build(config, method="weighted_sum", rewards=None, loss={"kl": 0.05, "train_timesteps": 2})
    away_from_old(trainer)
    rollout = trainer.rollout()
    result = gradient(trainer, rollout)

    rewards = rollout.rewards.nan_to_num(0.0).sum(0)
    settings, loss = trainer.config.loss, 0.0
    draws = _draws(trainer, len(rewards))
    for i in range(len(rewards)):
        group = rewards[i // 3 * 3 : i // 3 * 3 + 3]
        advantage = (rewards[i] - group.mean()) / (rewards.std(correction=0) + 1e-4)
        r = 0.5 + float(advantage.clamp(-5, 5)) / 10
        x0 = rollout.latents[i : i + 1]
        embeddings = trainer.latents.embed([rollout.prompts[i].text])
        for t, fresh in zip(*draws[i], strict=True):
            noisy = (1 - t) * x0 + t * fresh.unsqueeze(0)
            velocity = trainer.latents.velocity(noisy, t.view(1), embeddings)
            with torch.no_grad(), trainer.policy.sampling():
                old = trainer.latents.velocity(noisy, t.view(1), embeddings)
            with torch.no_grad(), trainer.policy.base():
                reference = trainer.latents.velocity(noisy, t.view(1), embeddings)
            plus = noisy - t * (settings.beta * velocity + (1 - settings.beta) * old)
            minus = noisy - t * ((1 + settings.beta) * old - settings.beta * velocity)
            parts = [((x - x0) ** 2 / (x - x0).detach().abs().mean()).mean() for x in (plus, minus)]
            policy = 5 / settings.beta * (r * parts[0] + (1 - r) * parts[1])
            kl = ((velocity - reference) ** 2).mean()
            loss = loss + (policy + settings.kl * kl) / (len(rewards) * 2)
    expected = torch.autograd.grad(loss, trainer.policy.parameters)
    expected = torch.cat([part.flatten() for part in expected]).double()
    assert (result - expected).norm() <= 1e-4 * expected.norm()


def _draws(trainer, count):
    """Each picture's noise levels and fresh noise, as `backward` draws them."""
    from integrations.diffusion_nft.randomness import generator, noise

    draw = generator(trainer.config.seed, "train", trainer.done)
    order = torch.randperm(count, generator=draw)
    times = trainer._timesteps(count, draw)
    fresh = noise((times.shape[1], *trainer.latents.shape), count, draw)
    return {i: (times[i], fresh[place]) for place, i in enumerate(order.tolist())}


def test_every_picture_has_its_own_order_of_distinct_sampling_levels(config):
    trainer = build(config, rollout={"steps": 25}, loss={"train_timesteps": None})
    times = trainer._timesteps(50, torch.Generator().manual_seed(0))
    assert times.shape == (50, 24)  # int(0.99 · 25)
    levels = trainer.latents.levels(25)[:-1]
    assert torch.isin(times, levels).all()
    assert all(len(row.unique()) == 24 for row in times)
    assert len({tuple(row.tolist()) for row in times}) == 50
    assert trainer.config.loss.timestep_fraction == 0.99


def test_step_updates_everything_and_reports_it(config):
    trainer = build(config, averages={"old_decay": "0", "ema_max": 0.0})
    before = trainer.policy.state_dict()
    record = trainer.step()
    after = trainer.policy.state_dict()
    assert any(not torch.equal(before[n], after[n]) for n in before if n.startswith("trained."))
    for name in (n.removeprefix("trained.") for n in after if n.startswith("trained.")):
        assert torch.equal(after[f"old.{name}"], after[f"trained.{name}"])
        assert torch.equal(after[f"ema.{name}"], after[f"trained.{name}"])
    assert record["step"] == trainer.done == 1
    assert record["valid"] == {"redness": 12, "darkness": 6}
    assert record["decays"] == {"ema": 0.0, "old": 0.0}
    assert record["kl"] == 0  # the LoRA starts as the base model
    assert record["grad_norm"] > 0
    assert set(record["seconds"]) == {"sample", "reward", "train"}
    assert min(record["update_cosines"].values()) == record["min_cosine"] >= 0  # one solve, not smoothed yet


def test_runs_with_one_seed_are_equal_and_with_another_are_not(config):
    def last(seed):
        trainer = build(config, seed=seed)
        trainer.step()
        return trainer.policy.state_dict()

    first, again, other = last(1), last(1), last(2)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert any(not torch.equal(first[n], other[n]) for n in first)


def test_an_objective_that_tells_no_pictures_apart_is_absent_from_the_step(config):
    class Flat:
        name = "darkness"

        def __call__(self, images, prompts):
            return np.full(len(prompts), 0.3)

    rewards = {**stub_rewards(["redness"]), "darkness": Flat()}
    trainer = build(config, rewards)
    away_from_old(trainer)
    rollout = trainer.rollout()
    trainer.backward(rollout)
    assert trainer.optimizer.report.absent == ["darkness"]
    assert trainer.optimizer.report.update_cosines[0] == pytest.approx(1)


def test_a_step_without_any_signal_moves_nothing_but_the_count(config):
    class Nothing:
        name = "redness"

        def __call__(self, images, prompts):
            return np.full(len(prompts), np.nan)

    trainer = build(config, {"redness": Nothing(), "darkness": Nothing()})
    before = copy.deepcopy(trainer.policy.state_dict())
    record = trainer.step()
    assert (record["step"], record["losses"], record["refreshed"]) == (1, None, False)
    assert trainer.done == 1
    assert trainer.whole
    assert all(torch.equal(before[name], value) for name, value in trainer.policy.state_dict().items())
    assert len(trainer.optimizer.state) == 0


def test_present_counts():
    advantages = torch.tensor([[1.0, -1.0, NAN], [0.0, 0.0, 0.0], [NAN, NAN, NAN], [0.0, 2.0, 0.0]])
    assert present_counts(advantages).tolist() == [2, 0, 0, 3]


def test_kl_weight_zero_needs_no_reference_forward(config, monkeypatch):
    trainer = build(config, loss={"kl": 0.0})
    monkeypatch.setattr(trainer.policy, "base", lambda: pytest.fail("reference forward"))
    assert trainer.step()["kl"] == 0


def test_on_policy_one_forward_serves_both_policies(config, monkeypatch):
    trainer = build(config, averages={"old_decay": "0"}, loss={"kl": 0.0})
    trainer.step()
    rollout = trainer.rollout()
    shared = gradient(trainer, rollout)
    monkeypatch.setattr(type(trainer.policy), "is_on_policy", False)
    assert torch.equal(gradient(trainer, rollout), shared)


@pytest.mark.parametrize("method", ["marble", "gdpo"])
def test_other_units_of_a_reward_change_nothing_under_a_balanced_method(config, method):
    plain, scaled = build(config, method=method), build(config, method=method, reward_scale={"redness": 1e-3})
    records = [(plain.step(), scaled.step()) for _ in range(2)]
    for first, second in records:
        assert second["rewards"]["redness"] == pytest.approx(1e-3 * first["rewards"]["redness"])
        assert second["coefficients"] == pytest.approx(first["coefficients"], rel=1e-6)
    before, after = plain.policy.state_dict(), scaled.policy.state_dict()
    assert all(torch.allclose(before[name], after[name], rtol=1e-4, atol=1e-7) for name in before)


def test_other_units_of_a_reward_change_the_raw_sum(config):
    plain, scaled = (build(config, method="weighted_sum", reward_scale=factors) for factors in ({}, {"redness": 1e-3}))
    plain.step(), scaled.step()
    before, after = plain.policy.state_dict(), scaled.policy.state_dict()
    assert not all(torch.allclose(before[name], after[name], rtol=1e-3, atol=1e-5) for name in before)


def test_check_never_runs_while_parameters_change(config):
    states = []
    trainer = build(config)
    trainer._check = lambda: states.append(trainer.whole)
    trainer.step()
    assert len(states) > 4
    assert all(states)
