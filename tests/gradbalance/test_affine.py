import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance import AffineLoss, MarbleOptimizer
from tests.gradbalance.models import flat_gradient


def problem(seed, shape=(2, 5), count=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, generator=generator, dtype=dtype, requires_grad=True)
    terms = torch.tanh(torch.randn(*shape, 4, generator=generator, dtype=dtype) @ x)
    coefficients = torch.randn(count, *shape, generator=generator, dtype=dtype)
    coefficients[torch.rand(count, *shape, generator=generator) < 0.3] = 0.0
    return x, terms, coefficients


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), weights=st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3))
def test_combine_is_the_weighted_sum_of_the_losses_for_any_real_weights(seed, weights):
    x, terms, coefficients = problem(seed)
    loss = AffineLoss(terms, coefficients)
    losses = [(c * terms).sum() for c in coefficients]
    torch.testing.assert_close(loss.losses(), torch.stack(losses))
    expected = sum(w * one for w, one in zip(weights, losses, strict=True))
    torch.testing.assert_close(loss.combine(weights), expected)
    (ours,) = torch.autograd.grad(loss.combine(weights), x, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("refresh_every", [1, 3])
def test_the_optimizer_gives_the_gradient_of_the_separate_losses(refresh_every):
    gradients = []
    for affine in (True, False):
        x = torch.nn.Parameter(problem(0)[0].detach())
        optimizer = MarbleOptimizer(torch.optim.SGD([x], lr=0.1), refresh_every=refresh_every)
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            terms = torch.tanh(torch.randn(2, 5, 4, generator=generator, dtype=torch.float64) @ x)
            coefficients = problem(seed)[2]
            optimizer.zero_grad()
            optimizer.backward(AffineLoss(terms, coefficients) if affine else [(c * terms).sum() for c in coefficients])
            gradients.append(flat_gradient([x]))
            optimizer.step()
    for ours, theirs in zip(gradients[:5], gradients[5:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_an_objective_masked_out_everywhere_is_absent():
    x, terms, coefficients = problem(0)
    coefficients[1] = 0.0
    leaf = torch.nn.Parameter(x.detach())
    optimizer = MarbleOptimizer(torch.optim.SGD([leaf], lr=0.1))
    terms = torch.tanh(torch.ones(2, 5, 4, dtype=torch.float64) @ leaf)
    report = optimizer.backward(AffineLoss(terms, coefficients, names=["a", "b", "c"]))
    assert report.absent == ["b"]
    assert optimizer.coefficients[1] == 0
    assert report.inactive == []


def test_low_precision_terms_keep_exact_coefficients():
    terms = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    loss = AffineLoss(terms, torch.full((2, 3), 1 / 3))
    assert loss.losses().tolist() == pytest.approx([1.0, 1.0])


def test_policy_gradient_with_masks_and_token_advantages():
    torch.manual_seed(0)
    log_probs = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(3, 4, 1, dtype=torch.float64)
    mask = torch.rand(3, 4, 1) < 0.6
    advantages = advantages.masked_fill(~mask, torch.nan)
    losses = AffineLoss.policy_gradient(log_probs, advantages, mask).losses()
    for k in range(3):
        kept = mask[k].expand(4, 6)
        expected = -(advantages[k].expand(4, 6) * log_probs)[kept].mean()
        torch.testing.assert_close(losses[k], expected)


def test_clipped_surrogate_equals_ppo():
    torch.manual_seed(0)
    ratio = (1 + 0.5 * torch.randn(50, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(3, 50, dtype=torch.float64)
    mask = torch.rand(3, 50) < 0.7
    losses = AffineLoss.clipped_surrogate(ratio, advantages, clip=0.2, mask=mask).losses()
    for k in range(3):
        a = advantages[k]
        ppo = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)[mask[k]].mean()
        torch.testing.assert_close(losses[k], ppo)
        torch.testing.assert_close(
            torch.autograd.grad(losses[k], ratio, retain_graph=True)[0], torch.autograd.grad(ppo, ratio)[0]
        )


@pytest.mark.parametrize(
    ("terms", "coefficients", "names", "error", "message"),
    [
        (
            torch.ones(3),
            torch.tensor([[1.0, 2.0, 3.0], [1.0, float("nan"), 0.0]]),
            None,
            ValueError,
            r"objective\(s\) \[1\]",
        ),
        (torch.ones(3), torch.tensor([[1.0, 2.0, float("inf")]]), None, ValueError, "NaN or infinity"),
        (torch.ones(3), torch.ones(2, 4), None, ValueError, r"\(K, 3\) with K >= 1, got \(2, 4\)"),
        (torch.ones(3), torch.ones(3), None, ValueError, "must have shape"),
        (torch.ones(3), torch.ones(0, 3), None, ValueError, "must have shape"),
        (torch.ones(3), torch.ones(2, 3, requires_grad=True), None, ValueError, "are constants"),
        (torch.ones(3), torch.ones(2, 3), ["a"], ValueError, "2 distinct names"),
        (torch.ones(3), torch.ones(2, 3), ["a", "a"], ValueError, "2 distinct names"),
        (torch.ones(3), torch.ones(2, 3, dtype=torch.long), None, TypeError, "coefficients must be a floating-point"),
        ([1.0], torch.ones(2, 1), None, TypeError, "terms must be a floating-point tensor, got list"),
    ],
)
def test_bad_input_is_named(terms, coefficients, names, error, message):
    with pytest.raises(error, match=message):
        AffineLoss(terms, coefficients, names)


def test_bad_weights_and_clip():
    loss = AffineLoss(torch.ones(3), torch.ones(2, 3))
    with pytest.raises(ValueError, match="expected 2 weights"):
        loss.combine([1.0])
    with pytest.raises(ValueError, match="clip must be positive"):
        AffineLoss.clipped_surrogate(torch.ones(3), torch.ones(1, 3), clip=0.0)
