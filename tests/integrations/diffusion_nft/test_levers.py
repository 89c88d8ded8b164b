"""The levers at work on the miniature: what each changes in a step, and that a resumed run goes on alike."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from gradbalance import BalanceReport, measurement, weighted
from integrations.diffusion_nft import run, train
from integrations.diffusion_nft.balancing import Method
from integrations.diffusion_nft.caps import Caps
from integrations.diffusion_nft.config import Config, RunError, UserError, load_config
from integrations.diffusion_nft.trainer import Trainer
from tests.integrations.diffusion_nft.miniature import Redness, make_pipeline, stub_rewards
from tests.integrations.diffusion_nft.test_trainer import away_from_old


def build(config, rewards=None, **changes) -> Trainer:
    values = config.model_dump()
    for key, value in changes.items():
        values[key] = {**values[key], **value} if key in ("balance", "loss", "rollout") else value
    changed = Config.model_validate(values)
    return Trainer(changed, make_pipeline(), rewards or stub_rewards(changed.rewards), Method(changed))


def fake_signal(monkeypatch, *values):
    """What the reports say about signal and noise, the common part included."""
    signal = property(lambda report: torch.tensor([*values, 0.9][: len(report.names)], dtype=torch.float64))
    monkeypatch.setattr(BalanceReport, "signal_to_noise", signal)


def test_a_satisfied_reward_leaves_the_solve_and_comes_back(config):
    trainer = build(config, caps={"darkness": 0.0})  # all pictures are darker than that
    away_from_old(trainer)
    rollout = trainer.rollout()
    trainer.backward(rollout)
    assert trainer.optimizer.report.absent == ["darkness"]
    assert trainer.optimizer.report.update_cosines[0] == pytest.approx(1)
    trainer.optimizer.zero_grad()
    assert trainer.step()["satisfied"] == ["darkness"]
    spoilt = Caps({"darkness": 2.0}, {"darkness": 5.0}, frozenset({"darkness"}))
    trainer.levers = replace(trainer.levers, caps=spoilt)
    assert [trainer.step()["satisfied"] for _ in range(9)].index([]) > 1  # its moving mean falls below 2
    assert trainer.optimizer.report.absent == []


def test_when_all_are_satisfied_only_the_kl_term_acts(config):
    trainer = build(config, caps={"darkness": 0.0, "redness": -9.0})
    away_from_old(trainer)
    record = trainer.step()
    assert trainer.optimizer.report.absent == ["redness", "darkness"]
    assert record["kl"] > 0
    assert record["grad_norm"] > 0


def test_dropout_leaves_out_one_reward_now_and_then_and_never_both(config):
    trainer = build(config, reward_dropout=0.5)
    away_from_old(trainer)
    rollout = trainer.rollout()
    absent = []
    for step in range(12):
        trainer.done = step
        trainer.optimizer.zero_grad()
        trainer.backward(rollout)
        absent.append(tuple(trainer.optimizer.report.absent))
    assert set(absent) == {(), ("redness",), ("darkness",)}


def test_the_common_part_is_half_of_the_sum_of_a_reward_and_its_opposite(config):
    """A reward and its negative have s₁ = −s₂, so g₁ + g₂ = 2h."""

    class Blueness(Redness):
        def __call__(self, images, prompts):
            return -super().__call__(images, prompts)

    rewards = {"redness": Redness(), "darkness": Blueness()}
    trainer = build(config, rewards, loss={"signal_gradients": True, "kl": 0.0})
    away_from_old(trainer)
    trainer.backward(trainer.rollout())
    report = trainer.optimizer.report
    assert report.names == ["redness", "darkness", "common"]
    mix = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64)
    assert (mix @ report.gramian @ mix).sqrt() < 1e-4 * report.gradient_norms.max()
    assert report.gradient_norms[2] > 0.1 * report.gradient_norms[0]
    assert report.coefficients[2] == 0
    assert report.coefficients[0] == pytest.approx(report.coefficients[1])  # ‖s₁‖ = ‖s₂‖, whatever ‖g₁‖ and ‖g₂‖ are


def test_the_common_part_is_the_pull_to_old(config):
    """Where the policy is `old`, r = ½ gives no gradient; away from it, it does."""
    trainer = build(config, loss={"signal_gradients": True, "kl": 0.0})
    rollout = trainer.rollout()
    trainer.backward(rollout)
    norms = trainer.optimizer.report.gradient_norms
    assert norms[2] < 1e-3 * norms[:2].min()
    trainer.optimizer.zero_grad()
    away_from_old(trainer)
    trainer.backward(rollout)
    norms = trainer.optimizer.report.gradient_norms
    assert norms[2] > 1e-2 * norms[:2].min()


def passes_of(trainer, monkeypatch):
    """The reverse passes of a refresh and of the step after it."""
    calls = []

    def counted(function):
        return lambda *arguments, **options: calls.append(1) or function(*arguments, **options)

    for module, name in ((measurement, "reverse_pass"), (weighted, "accumulate_pass")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    counts = []
    for _ in range(2):
        calls.clear()
        trainer.step()
        counts.append(len(calls))
    return counts


def test_signal_gradients_cost_one_more_pass_on_refreshes_only(config, monkeypatch):
    options = {"balance": {"refresh_every": 2}, "loss": {"kl": 0.0, "micro_batch": 12}}
    with monkeypatch.context() as patch:
        plain = passes_of(build(config, **options), patch)
    with monkeypatch.context() as patch:
        signal = passes_of(build(config, **options | {"loss": {**options["loss"], "signal_gradients": True}}), patch)
    assert signal == [plain[0] + 1, plain[1]]


def test_a_drowned_specialist_gets_more_prompts(config, monkeypatch):
    fake_signal(monkeypatch, 0.9, 0.1)
    trainer = build(config, allocate_prompts="signal", rollout={"prompts": 8})
    fixed = build(config, rollout={"prompts": 8})
    assert sorted(p.text for p in trainer._prompts.draw_counts([4, 4], [0, 0])) == sorted(
        p.text for p in fixed._prompts.draw(0)
    )
    valid = [trainer.step()["valid"]["darkness"] for _ in range(12)]
    assert valid[0] == 12  # half of the prompts, three pictures each
    assert valid[-1] == 18  # the other stratum is at half of its share
    assert trainer.levers.allocation.shares == pytest.approx([0.25 + 0.25 * 0.9**12, 0.75 - 0.25 * 0.9**12])


def test_a_run_that_did_not_allocate_prompts_goes_on_with_it(config):
    before = build(config).levers.state_dict()
    levers = build(config, allocate_prompts="signal").levers
    assert levers.loaded(before).allocation == levers.allocation


def test_allocation_by_signal_needs_an_estimate_of_it(config, monkeypatch):
    fake_signal(monkeypatch, float("nan"), float("nan"))
    trainer = build(config, allocate_prompts="signal")
    with pytest.raises(RunError, match="needs a gramian_estimator that tells signal from noise"):
        trainer.step()
    assert trainer.whole
    assert trainer.done == 0


def test_unset_levers_change_nothing(config):
    """Neither the gradient nor what is written of a step."""
    trainer, other = build(config), build(config, caps={"redness": 1e9}, reward_dropout=1e-12)
    for _ in range(3):
        records = [one.step() for one in (trainer, other)]
        assert set(records[1]) - set(records[0]) == {"satisfied"}
    weights = [one.policy.state_dict() for one in (trainer, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    "override",
    [
        "balance.refresh_micro_batches=all",
        "caps={redness: much}",
        "caps={redness: .inf}",
        "reward_dropout=1",
        "reward_groups=[[]]",
        "allocate_prompts=some",
    ],
)
def test_wrong_values_are_named_in_one_line(config_file, override):
    with pytest.raises(UserError) as caught:
        load_config(str(config_file), [override])
    assert override.split("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_resumed_run_ends_as_if_nothing_had_happened(config_file, tmp_path, monkeypatch):
    """All levers at once, stopped after each of its steps."""
    fake_signal(monkeypatch, 0.9, 0.1)
    monkeypatch.setattr(run, "build_rewards", stub_rewards)
    levers = [
        "steps=5",
        "caps={redness: 0.05}",
        "reward_dropout=0.4",
        "allocate_prompts=signal",
        "loss.signal_gradients=true",
        "balance.uniform_after=3",
        "balance.refresh_every=2",
        "balance.gramian_estimator=split",
        "balance.refresh_micro_batches=auto",
        "reward_groups=[[redness], [darkness]]",
    ]
    straight = tmp_path / "straight"
    assert train.main(["--config", str(config_file), "--output", str(straight), *levers]) == 0
    expected = load_file(straight / "checkpoints" / "step-000005" / "policy.safetensors")
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    stopped = tmp_path / "stopped"
    assert train.main(["--config", str(config_file), "--output", str(stopped), *levers]) == 0
    for stop in (1, 2, 4):
        for later in range(stop + 1, 6):
            for file in sorted((stopped / "checkpoints" / f"step-{later:06d}").rglob("*"), reverse=True):
                file.unlink()
            (stopped / "checkpoints" / f"step-{later:06d}").rmdir()
        (stopped / "summary.json").unlink()
        assert train.main(["--resume", str(stopped)]) == 0
        found = load_file(stopped / "checkpoints" / "step-000005" / "policy.safetensors")
        assert all(torch.equal(found[name], expected[name]) for name in expected), stop
        again = [json.loads(line) for line in (stopped / "metrics.jsonl").read_text().splitlines()]
        for a, b in zip(again, lines, strict=True):
            assert {k: v for k, v in a.items() if "second" not in k} == {
                k: v for k, v in b.items() if "second" not in k
            }
    assert {len(line["satisfied"]) for line in lines} <= {0, 1}
