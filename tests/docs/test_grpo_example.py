"""The multi-reward GRPO example: its rewards, TRL's two ways in it, one backward per step, and that it learns."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from gradbalance import MarbleOptimizer

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def grpo(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "examples")
    return importlib.import_module("grpo")


@pytest.fixture
def quick(grpo, monkeypatch):
    """Few prompts, to train on and to look at."""
    train, held_out = (prompts[:32] for prompts in grpo.all_prompts())
    monkeypatch.setattr(grpo, "all_prompts", lambda: (train, held_out))
    monkeypatch.setattr(grpo, "PROMPTS", 4)
    return grpo


@pytest.fixture
def rollout(grpo):
    """A model, and completions of which some are right: prompts, completions, their mask and rewards."""
    torch.manual_seed(0)
    prompts = grpo.all_prompts()[0][:4].repeat_interleave(grpo.GROUP, 0)
    completions = grpo.demonstrations(prompts)
    return grpo.build_model(), prompts, completions, grpo.completion_mask(completions), grpo.score(prompts, completions)


def tokens(grpo, text):
    special = {"[": grpo.OPEN, "]": grpo.CLOSE, ".": grpo.END, "=": grpo.EQUALS}
    return torch.tensor([[special[c] if c in special else int(c) for c in text]])


@pytest.mark.parametrize(
    ("completion", "rewards"),
    [
        ("13468[86].......", [1.0, 5.0, 0.0]),
        ("86[86]..........", [1.0, 2.0, 0.0]),
        ("13468[68].......", [0.0, 5.0, 0.0]),
        ("13468[8]........", [0.0, 5.0, 0.0]),
        ("1111134680[86]..", [1.0, 5.0, -0.25]),
        ("38164[86........", [0.0, 5.0, 0.0]),
        ("3816416.........", [0.0, 5.0, 0.0]),
        (".[86]...........", [0.0, 0.0, 0.0]),
        ("222222222222222[", [0.0, 0.0, -0.3]),
    ],
)
def test_the_rewards_of_a_completion(grpo, completion, rewards):
    found = grpo.score(tokens(grpo, "38164="), tokens(grpo, completion))
    assert_close(found, torch.tensor(rewards)[:, None])


def test_the_advantages_are_trls(grpo):
    """Group by group and number by number, as its documentation says it."""
    rewards = torch.randn(3, 4 * grpo.GROUP, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1], [5], [0.1]]
    )

    def one_by_one(values):
        return torch.cat([(g - g.mean()) / (g.std() + 1e-4) for g in values.split(grpo.GROUP)])

    assert_close(grpo.advantages(rewards, "sum_then_normalise"), one_by_one(rewards.sum(0))[None])
    total = sum(one_by_one(r) for r in rewards)
    assert_close(grpo.advantages(rewards, "normalise_then_sum"), ((total - total.mean()) / (total.std() + 1e-4))[None])
    assert_close(grpo.advantages(rewards, "marble"), torch.stack([one_by_one(r) for r in rewards]))


@pytest.mark.parametrize("epoch", [0, 1])
def test_the_balanced_gradient_is_that_of_three_separate_losses(grpo, rollout, epoch):
    model, prompts, completions, mask, rewards = rollout
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), floor=0.2)
    assert (grpo.advantages(rewards, "marble") != 0).any(1).all()
    sampled = grpo.log_probabilities(model, prompts, completions).detach()
    for _ in range(epoch + 1):
        current = grpo.log_probabilities(model, prompts, completions)
        optimizer.zero_grad()
        optimizer.backward(grpo.surrogate(current, sampled, rewards, mask, "marble"))
        optimizer.step()
    balanced = [p.grad.clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p += 0.5 * p.grad  # back to where the gradient was taken
    ratio = (grpo.log_probabilities(model, prompts, completions) - sampled).exp()
    assert ((ratio != 1).any() & (ratio.clamp(0.8, 1.28) != ratio).any()).item() == (epoch == 1)
    total = 0.0
    for weight, advantage in zip(optimizer.coefficients.tolist(), grpo.advantages(rewards, "marble"), strict=True):
        loss = -torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.28) * advantage[:, None])
        total = total + weight * ((loss * mask).sum(1) / mask.sum(1)).mean()
    expected = torch.autograd.grad(total, list(model.parameters()))
    for ours, theirs in zip(balanced, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "kl"), [("marble", 0.0), ("marble", 0.1), ("sum_then_normalise", 0.0), ("normalise_then_sum", 0.1)]
)
def test_amortised_steps_take_one_backward(quick, monkeypatch, method, kl):
    reports = []

    class Watched(MarbleOptimizer):
        def backward(self, *args, **options):
            reports.append(super().backward(*args, **options))
            return reports[-1]

    monkeypatch.setattr(quick, "MarbleOptimizer", Watched)
    result = quick.train(method, steps=8, warm_steps=5, kl=kl)
    steps = 8 * quick.EPOCHS
    assert len(result["passes"]) == steps
    refreshed = [report.refreshed for report in reports] or [False] * steps
    assert refreshed.count(False) >= 10
    for passes, measured in zip(result["passes"], refreshed, strict=True):
        assert 1 <= passes <= (3 + (kl > 0) if measured else 1)
    assert torch.tensor(result["curve"]).isfinite().all()
    assert torch.tensor([*result["after"].values()]).isfinite().all()


def test_the_same_seed_trains_the_same_model(quick):
    first, second = (quick.train("marble", seed=3, steps=2, warm_steps=2) for _ in range(2))
    for result in (first, second):
        del result["seconds"]
    assert first == second


def test_the_page_shows_the_results_in_the_file(grpo):
    report = importlib.import_module("grpo_report")
    runs = json.loads(report.RESULTS.read_text(encoding="utf-8"))
    assert report.table(runs) in (DOCS / "grpo.md").read_text(encoding="utf-8")
    for name, group in report.reported(runs).items():
        rates = {r["lr"]: r["after"]["overall"] for r in runs if (r["method"], r["seed"]) == (name, report.SWEEP_SEED)}
        assert sorted(rates) == sorted(report.RATES)
        assert {r["lr"] for r in group} == {max(rates, key=rates.get)}
        assert len(group) == len(report.SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "rising"),
    [
        ("marble", {"answer", "coverage", "brevity", "perfect"}),
        ("normalise_then_sum", {"answer", "coverage", "brevity", "perfect"}),
        ("sum_then_normalise", {"coverage"}),  # the reward with the largest scale
    ],
)
def test_rewards_rise(grpo, method, rising):
    result = grpo.train(method, steps=60)
    assert rising <= {name for name, value in result["after"].items() if value > result["before"][name]}
    assert "brevity" in rising or result["after"]["brevity"] < result["before"]["brevity"]
