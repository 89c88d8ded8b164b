import pytest
import torch

from integrations.diffusion_nft.config import Averages, Lora, UserError
from integrations.diffusion_nft.policy import Policy, ema_decay, old_decay
from integrations.diffusion_nft.sampling import Latents
from tests.integrations.diffusion_nft.miniature import SIDE, make_pipeline

LORA = Lora(rank=2, alpha=6)


@pytest.fixture
def policy(pipeline):
    return Policy(pipeline, LORA, Averages(old_decay="1", ema_max=0.5))


def output(pipeline):
    latents = Latents(pipeline, None, 8)
    draw = torch.Generator().manual_seed(1)
    noisy = torch.randn(2, 12, SIDE, SIDE, generator=draw)
    embeddings = latents.embed(["red circle", 'text "A"'])
    with torch.no_grad():
        return latents.velocity(noisy, torch.tensor([0.3, 0.8]), embeddings)


def perturb(policy, seed=0):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))


def test_all_policies_are_the_base_model_at_the_start(pipeline):
    before = output(pipeline)
    policy = Policy(pipeline, LORA, Averages())
    assert torch.equal(output(pipeline), before)
    for view in (policy.sampling, policy.base, policy.averaged):
        with view():
            assert torch.equal(output(pipeline), before)


def test_each_view_gives_its_own_policy_and_the_trained_one_comes_back(pipeline, policy):
    base = output(pipeline)
    perturb(policy)
    trained = output(pipeline)
    assert not torch.allclose(trained, base)
    for view in (policy.sampling, policy.base, policy.averaged):
        with view():
            assert torch.equal(output(pipeline), base)
        assert torch.equal(output(pipeline), trained)


def test_only_the_trained_adapter_requires_gradients(pipeline, policy):
    trained = {id(p) for p in policy.parameters}
    for view in (policy.sampling, policy.base, policy.averaged):
        with view():
            pass
        assert {id(p) for p in pipeline.transformer.parameters() if p.requires_grad} == trained


def test_old_and_ema_move_only_in_follow_and_by_their_decay(policy):
    before = policy.state_dict()
    perturb(policy)
    changed = policy.state_dict()
    assert all(torch.equal(changed[n], before[n]) for n in before if not n.startswith("trained."))
    decays = policy.follow(100)
    assert decays == {"ema": 0.5, "old": 0.1}
    after = policy.state_dict()
    for name in (n.removeprefix("trained.") for n in before if n.startswith("trained.")):
        for kind, decay in decays.items():
            expected = decay * before[f"{kind}.{name}"] + (1 - decay) * changed[f"trained.{name}"]
            torch.testing.assert_close(after[f"{kind}.{name}"], expected)


def test_averaged_restores_the_live_weights_when_the_block_fails(policy):
    perturb(policy)
    before = policy.state_dict()
    with pytest.raises(RuntimeError), policy.averaged():
        raise RuntimeError
    after = policy.state_dict()
    assert all(torch.equal(after[n], before[n]) for n in before)


def test_export_is_read_by_load_lora_weights_to_the_same_output(pipeline, policy, tmp_path):
    perturb(policy)
    policy.follow(5)
    policy.export(tmp_path)
    with policy.averaged():
        expected = output(pipeline)
    fresh = make_pipeline()
    base = output(fresh)
    fresh.load_lora_weights(tmp_path)
    result = output(fresh)
    assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (result - base).abs().max() > 1e-3 * base.abs().max()


def test_state_dict_is_restored_exactly_and_is_a_copy(policy):
    perturb(policy)
    policy.follow(3)
    saved = policy.state_dict()
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    perturb(policy, seed=1)
    policy.follow(4)
    assert all(torch.equal(saved[n], kept[n]) for n in kept)
    policy.load_state_dict(saved)
    assert all(torch.equal(policy.state_dict()[n], kept[n]) for n in kept)


def test_state_of_another_rank_is_refused(policy):
    other = Policy(make_pipeline(), Lora(rank=3, alpha=3), Averages())
    with pytest.raises(UserError, match="rank"):
        policy.load_state_dict(other.state_dict())


def test_unknown_targets_are_named(pipeline):
    with pytest.raises(UserError, match="no_such_layer"):
        Policy(pipeline, Lora(targets=["no_such_layer"]), Averages())


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        ("0", 50, 0.0),
        ("1", 50, 0.05),
        ("1", 900, 0.5),
        ("2", 74, 0.0),
        ("2", 75, 0.0),
        ("2", 95, 0.15),
        ("2", 900, 0.999),
        ("marble", 50, 0.05),
        ("marble", 5000, 0.95),
    ],
)
def test_old_decay_schedules(kind, step, expected):
    assert old_decay(kind, step) == pytest.approx(expected)


def test_unknown_schedule_is_an_error():
    with pytest.raises(ValueError, match="'3'"):
        old_decay("3", 1)


def test_ema_decay_warms_up():
    assert ema_decay(0, 0.9) == pytest.approx(0.1)
    assert ema_decay(1, 0.9) == pytest.approx(2 / 11)
    assert ema_decay(10_000, 0.9) == 0.9
