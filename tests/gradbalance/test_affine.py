import numpy as np
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


def ppo(ratio, advantage, low, high, kept, reduction):
    """One objective as everybody writes it."""
    loss = -torch.min(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
    if reduction == "sequence_mean":
        return torch.stack([row[here].mean() for row, here in zip(loss, kept, strict=True) if here.any()]).mean()
    return loss[kept].sum() if reduction == "sum" else loss[kept].mean()


def rollouts(seed, count, low, high, shape=(5, 7)):
    """Ratios below, inside and above the range, at 1 and at both bounds; advantages of both signs; any mask."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    features = torch.randn(*shape, 6, generator=generator, dtype=torch.float64)
    special = torch.tensor([1 - low, 1.0, 1 + high, 0.3, 3.0], dtype=torch.float64)
    start = special[torch.randint(5, shape, generator=generator)]
    log_ratio = features @ theta
    ratio = start + (log_ratio - log_ratio.detach())  # these values, and a gradient of their own
    advantages = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    advantages[torch.rand(advantages.shape, generator=generator) < 0.2] = 0.0
    mask = torch.rand(count, *shape, generator=generator) < 0.7
    mask[:, 0, 0] = True
    mask[:, 1] = False
    return theta, ratio, advantages, mask


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clip=st.tuples(st.floats(0.01, 0.9), st.floats(0.01, 2.0)),
    reduction=st.sampled_from(["mean", "sequence_mean", "sum"]),
    weights=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8),
)
def test_clipped_surrogate_is_k_separate_ppo_losses(seed, clip, reduction, weights):
    theta, ratio, advantages, mask = rollouts(seed, len(weights), *clip)
    loss = AffineLoss.clipped_surrogate(
        ratio, advantages.masked_fill(~mask, torch.nan), clip, mask, reduction=reduction
    )
    expected = [ppo(ratio, a, *clip, m, reduction) for a, m in zip(advantages, mask, strict=True)]
    for ours, theirs in zip(loss.losses(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(one, theta, retain_graph=True)[0] for one in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    blended = sum(w * one for w, one in zip(weights, expected, strict=True))
    gradients = [torch.autograd.grad(one, theta, retain_graph=True)[0] for one in (loss.combine(weights), blended)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12 * sum(map(abs, weights)))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("ratio", "passes"), [(0.8, "both"), (1.0, "both"), (1.25, "both"), (0.5, "+"), (2.0, "-")])
def test_where_both_sides_of_the_min_are_equal_the_gradient_is_that_of_the_ratio(advantage, ratio, passes):
    """torch halves the gradient at a tie; the halves through ρ and clip ρ (open at its bounds) add up again."""
    ratio = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    loss = AffineLoss.clipped_surrogate(ratio, torch.tensor([[advantage]]), clip=(0.2, 0.25))
    (gradient,) = torch.autograd.grad(loss.losses().sum(), ratio)
    assert gradient.item() == (-advantage if passes in ("both", "+" if advantage > 0 else "-") else 0.0)


def test_the_first_step_after_sampling_is_the_policy_gradient():
    torch.manual_seed(0)
    log_probs = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    advantages, mask = torch.randn(3, 4, dtype=torch.float64), torch.rand(4, 6) < 0.8
    ratio = (log_probs - log_probs.detach()).exp()
    for reduction in ("mean", "sequence_mean", "sum"):
        surrogate = AffineLoss.clipped_surrogate(ratio, advantages, mask=mask, reduction=reduction)
        reinforce = AffineLoss.policy_gradient(log_probs, advantages, mask, reduction=reduction)
        gradients = [
            torch.autograd.grad(loss.combine([0.5, -3.0, 2.0]), log_probs, retain_graph=True)[0]
            for loss in (surrogate, reinforce)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-14)


def test_a_completion_mask_and_rewards_that_do_not_apply_go_together():
    torch.manual_seed(0)
    ratio = (0.5 + torch.rand(4, 6, dtype=torch.float64)).requires_grad_()
    rewards = torch.randn(3, 4, dtype=torch.float64)
    rewards[1, :2] = rewards[2] = torch.nan  # the second applies to half of them, the third to none
    completion_mask = (torch.arange(6) < torch.tensor([[6], [2], [4], [1]])).int()
    mask = completion_mask.bool() & ~rewards.isnan()[:, :, None]
    for reduction in ("mean", "sequence_mean"):
        loss = AffineLoss.clipped_surrogate(ratio, rewards, mask=mask, reduction=reduction)
        assert loss.present.tolist() == [True, True, False]
        for k, ours in enumerate(loss.losses()[:2]):
            expected = ppo(ratio, rewards[k, :, None], 0.2, 0.2, mask[k], reduction)
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_a_sum_leaves_the_divisor_to_the_advantages():
    """Two micro-batches, divided by what counts in both, add up to the whole; so does Dr. GRPO's constant."""
    _, ratio, advantages, mask = rollouts(0, 3, 0.2, 0.2, shape=(6, 7))
    whole = AffineLoss.clipped_surrogate(ratio, advantages, mask=mask).losses()
    shares = advantages / mask.sum((1, 2), keepdim=True)
    parts = [
        AffineLoss.clipped_surrogate(ratio[half], shares[:, half], mask=mask[:, half], reduction="sum").losses()
        for half in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-13, atol=1e-13)


def test_an_upper_bound_for_negative_advantages_is_a_bound_on_the_ratio():
    """TRL's ``delta`` (two-sided clipping)."""
    _, ratio, advantages, _ = rollouts(1, 2, 0.2, 0.3)
    ours = AffineLoss.clipped_surrogate(ratio.clamp(max=2.0), advantages, clip=(0.2, 0.3)).losses()
    first, second = ratio.clamp(max=2.0) * advantages, ratio.clamp(0.8, 1.3) * advantages
    torch.testing.assert_close(ours, -torch.min(first, second).mean((1, 2)), rtol=1e-12, atol=1e-12)


def test_low_precision_ratios_are_clipped_and_weighted_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(4, 6, 9, dtype=torch.bfloat16, requires_grad=True)
    tokens, advantages = torch.randint(9, (4, 6, 1)), torch.randn(3, 4)
    log_probs = logits.log_softmax(-1).gather(-1, tokens).squeeze(-1)
    ratio = (log_probs - log_probs.detach() + 0.2 * torch.randn(4, 6)).exp().bfloat16()
    loss = AffineLoss.clipped_surrogate(ratio, advantages, clip=0.1)
    everything = torch.ones(4, 6, dtype=torch.bool)
    expected = [ppo(ratio.float(), a[:, None], 0.1, 0.1, everything, "mean") for a in advantages]
    torch.testing.assert_close(loss.losses(), torch.stack(expected))
    for k in range(3):
        gradients = [torch.autograd.grad(o, logits, retain_graph=True)[0] for o in (loss.losses()[k], expected[k])]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("refresh_every", [1, 4])
def test_the_optimizer_follows_k_separate_ppo_losses(refresh_every):
    steps = []
    for affine in (True, False):
        theta = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
        optimizer = MarbleOptimizer(torch.optim.Adam([theta], lr=0.1), refresh_every=refresh_every)
        for seed in range(9):
            _, _, advantages, mask = rollouts(seed, 3, 0.2, 0.2)
            features = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            ratio = (features @ theta).exp()
            losses = AffineLoss.clipped_surrogate(ratio, advantages, mask=mask)
            if not affine:
                losses = [ppo(ratio, a, 0.2, 0.2, m, "mean") for a, m in zip(advantages, mask, strict=True)]
            optimizer.zero_grad()
            optimizer.backward(losses)
            optimizer.step()
        steps.append(theta.detach().clone())
    torch.testing.assert_close(*steps, rtol=1e-10, atol=1e-12)


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


def test_bad_weights():
    with pytest.raises(ValueError, match="expected 2 weights"):
        AffineLoss(torch.ones(3), torch.ones(2, 3)).combine([1.0])


@pytest.mark.parametrize(
    ("advantages", "options", "message"),
    [
        ((2, 4), {"clip": 0.0}, "clip must be positive"),
        ((2, 4), {"clip": (0.2, -0.1)}, "clip must be positive"),
        ((2, 4), {"clip": (0.1, 0.2, 0.3)}, "one number or two"),
        ((2, 4), {"clip": float("nan")}, "clip must be positive"),
        ((2, 4), {"clip": True}, "clip must be positive"),
        ((2, 4), {"mask": torch.full((4, 6), float("nan"))}, "clipped_surrogate: mask must hold 0 and 1 only"),
        ((2, 4), {"mask": torch.full((4, 6), 0.25)}, "clipped_surrogate: mask must hold 0 and 1 only"),
        ((2, 4), {"reduction": "average"}, r'"mean", "sequence_mean" or "sum", got \'average\''),
        ((2,), {}, r"advantages must have shape \(K, \*S\) with S = \(4, 6\), got \(2,\)"),
        ((2, 4, 6, 1), {}, "advantages must have shape"),
        ((2, 5), {}, r"advantages of shape \(2, 5, 1\) does not fit \(K, \*S\) = \(2, 4, 6\)"),
        ((2, 4), {"mask": torch.ones(2, 4)}, r"clipped_surrogate: mask of shape \(2, 4\) does not fit"),
    ],
)
def test_bad_rollouts_are_named(advantages, options, message):
    with pytest.raises(ValueError, match=message):
        AffineLoss.clipped_surrogate(torch.ones(4, 6), torch.ones(advantages), **options)


@pytest.mark.parametrize("name", ["ratio", "advantages", "mask"])
def test_lists_are_no_tensors(name):
    given = {"ratio": torch.ones(4, 6), "advantages": torch.ones(2, 4), "mask": torch.ones(4, 6)}
    with pytest.raises(TypeError, match=f"clipped_surrogate: {name} must be a tensor, got list"):
        AffineLoss.clipped_surrogate(**{**given, name: given[name].tolist()})


def test_numbers_of_numpy_are_numbers():
    ratio = torch.full((4,), 2.0)
    one = AffineLoss.clipped_surrogate(ratio, torch.ones(1, 4), clip=np.float32(0.5)).losses()
    assert one.tolist() == [-1.5]


def test_a_sequence_mean_needs_sequences():
    with pytest.raises(ValueError, match=r'policy_gradient: "sequence_mean" needs sequences'):
        AffineLoss.policy_gradient(torch.ones(4), torch.ones(2, 4), reduction="sequence_mean")
