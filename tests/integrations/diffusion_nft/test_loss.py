"""The loss against a slow float64 reference that follows the formulas one picture and one reward at a time."""

import pytest
import torch

from gradbalance import AffineLoss
from integrations.diffusion_nft.loss import nft_coefficients, nft_terms, velocity_kl

N, K, A_MAX, BETA = 6, 3, 5.0, 0.1
SHAPE = (4, 3, 3)


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    clean, fresh = tensor(N, *SHAPE), tensor(N, *SHAPE)
    t = torch.rand(N, generator=draw, dtype=torch.float64) * 0.9 + 0.1
    level = t.view(-1, 1, 1, 1)
    advantages = 4 * tensor(K, N)  # a good part lies beyond the clamp
    advantages[1, :3] = float("nan")
    advantages[2, 5] = float("nan")
    return {
        "velocity": tensor(N, *SHAPE),
        "old_velocity": tensor(N, *SHAPE),
        "clean": clean,
        "fresh": fresh,
        "noisy": (1 - level) * clean + level * fresh,
        "t": t,
        "advantages": advantages,
    }


def terms_of(batch, velocity=None):
    velocity = batch["velocity"] if velocity is None else velocity
    return nft_terms(velocity, batch["old_velocity"], batch["noisy"], batch["clean"], batch["t"], BETA)


def reference(batch, velocity, k):
    """L_k, term by term as the paper writes it."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i in range(N):
        advantage = batch["advantages"][k, i]
        if advantage.isnan():
            continue
        count += 1
        clipped = max(min(float(advantage), A_MAX), -A_MAX)
        r = 0.5 + clipped / (2 * A_MAX)
        v, old, x0 = velocity[i], batch["old_velocity"][i], batch["clean"][i]
        plus = BETA * v + (1 - BETA) * old
        minus = (1 + BETA) * old - BETA * v
        losses = []
        for mixed in (plus, minus):
            prediction = batch["noisy"][i] - batch["t"][i] * mixed
            weight = max(float((prediction - x0).detach().abs().mean()), 1e-5)
            losses.append(((prediction - x0) ** 2 / weight).mean())
        total = total + A_MAX * (r * losses[0] / BETA + (1 - r) * losses[1] / BETA)
    return total / count


def coefficients_of(batch):
    counts = (~batch["advantages"].isnan()).sum(1)
    return nft_coefficients(batch["advantages"], counts, beta=BETA, advantage_clip=A_MAX)


@pytest.mark.parametrize("k", range(K))
def test_loss_and_gradient_match_the_reference(batch, k):
    velocity = batch["velocity"].clone().requires_grad_()
    expected = reference(batch, velocity, k)
    (expected_gradient,) = torch.autograd.grad(expected, velocity)
    loss = AffineLoss(terms_of(batch, velocity), coefficients_of(batch)).losses()[k]
    (gradient,) = torch.autograd.grad(loss, velocity)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-14)


def test_blend_of_objectives_equals_the_sum_of_separate_losses(batch):
    weights = [0.7, -1.3, 2.0]
    velocity = batch["velocity"].clone().requires_grad_()
    separate = sum(w * reference(batch, velocity, k) for k, w in enumerate(weights))
    (expected,) = torch.autograd.grad(separate, velocity)
    blended = AffineLoss(terms_of(batch, velocity), coefficients_of(batch)).combine(weights)
    (gradient,) = torch.autograd.grad(blended, velocity)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-13)


def test_at_the_old_policy_the_gradient_is_the_advantage_times_old_minus_target(batch):
    velocity = batch["old_velocity"].clone().requires_grad_()
    losses = AffineLoss(terms_of(batch, velocity), coefficients_of(batch)).losses()
    target = batch["fresh"] - batch["clean"]
    level = batch["t"].view(-1, 1, 1, 1)
    size = torch.tensor(SHAPE).prod()
    weight = (level * (target - velocity)).detach().abs().mean(dim=(1, 2, 3), keepdim=True)
    for k in range(K):
        (gradient,) = torch.autograd.grad(losses[k], velocity, retain_graph=True)
        advantage = batch["advantages"][k].nan_to_num(0.0).clamp(-A_MAX, A_MAX).view(-1, 1, 1, 1)
        count = (~batch["advantages"][k].isnan()).sum()
        expected = 2 * level**2 * advantage * (batch["old_velocity"] - target) / (weight * size * count)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13)


def test_at_the_old_policy_objectives_with_all_rewards_have_one_loss_value(batch):
    batch["advantages"] = batch["advantages"].nan_to_num(1.0)
    losses = AffineLoss(terms_of(batch, batch["old_velocity"]), coefficients_of(batch)).losses()
    torch.testing.assert_close(losses, losses[:1].expand(K), rtol=1e-12, atol=0)


def test_missing_rewards_have_zero_coefficients_and_no_count_no_row():
    nan = float("nan")
    advantages = torch.tensor([[1.0, nan], [nan, nan]])
    result = nft_coefficients(advantages, torch.tensor([1, 0]), beta=BETA, advantage_clip=A_MAX)
    assert result.shape == (2, 2, 2)
    assert (result[0, :, 1] == 0).all()
    assert (result[1] == 0).all()
    assert result[0, :, 0].tolist() == pytest.approx([A_MAX / BETA * 0.6, A_MAX / BETA * 0.4])


def test_each_objective_is_clamped_before_any_blend():
    advantages = torch.tensor([[20.0], [-4.0]])
    result = nft_coefficients(advantages, torch.tensor([1, 1]), beta=BETA, advantage_clip=A_MAX)
    blended = 0.5 * result.sum(0)[:, 0] * BETA / A_MAX
    # r = (1 + 0.1) / 2; clamping the averaged advantage of 8 instead would give r = 1.
    assert blended.tolist() == pytest.approx([0.55, 0.45])


def test_terms_are_float64_and_constants_carry_no_graph(batch):
    old = batch["old_velocity"].float().requires_grad_()
    velocity = batch["velocity"].float().requires_grad_()
    terms = nft_terms(velocity, old, batch["noisy"].float(), batch["clean"].float(), batch["t"].float(), BETA)
    assert terms.dtype == torch.float64
    terms.sum().backward()
    assert old.grad is None
    assert velocity.grad.dtype == torch.float32


def test_perfect_prediction_is_finite(batch):
    velocity = (batch["fresh"] - batch["clean"]).requires_grad_()
    terms = nft_terms(velocity, velocity.detach(), batch["noisy"], batch["clean"], batch["t"], BETA)
    terms.sum().backward()
    assert terms.isfinite().all()
    assert velocity.grad.isfinite().all()


def test_kl_is_the_mean_squared_difference(batch):
    difference = batch["velocity"] - batch["old_velocity"]
    assert float(velocity_kl(batch["velocity"], batch["old_velocity"])) == pytest.approx(float((difference**2).mean()))
