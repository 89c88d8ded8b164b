"""The engine against its readable twin, in every mode, and the cost of each mode in reverse passes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradbalance import AffineLoss, BalancedOptimizer, MarbleOptimizer
from tests.gradbalance.models import LinearLosses, OneTrunk, TwoHeads, batches, flat_gradient
from tests.gradbalance.reference import ReferenceMarble


def run_both(model, data, *, absent=None, regularize=False, lr=0.01, **options):
    """Train by the library; after each step compare its gradient with the twin's at the same parameters."""
    parameters = list(model.parameters())
    twin = ReferenceMarble(parameters, len(model.losses(data[0][0])), **options)
    optimizer = MarbleOptimizer(torch.optim.SGD(parameters, lr=lr), **options)
    for t, micro_batches in enumerate(data):
        gone = set() if absent is None else absent(t)

        def losses(x, gone=gone):
            return [None if k in gone else loss for k, loss in enumerate(model.losses(x))]

        penalty = [1e-3 * sum(p.square().sum() for p in parameters) for _ in micro_batches] if regularize else None
        expected = twin.gradient([losses(x) for x in micro_batches], penalty or ())
        optimizer.zero_grad()
        for i, x in enumerate(micro_batches):
            report = optimizer.backward(
                losses(x), regularizer=penalty[i] if penalty else None, accumulate=i + 1 < len(micro_batches)
            )
        torch.testing.assert_close(flat_gradient(parameters), expected, rtol=1e-9, atol=1e-12)
        assert report.refreshed == (report.gramian.abs().sum() > 0 and t % options.get("refresh_every", 1) == 0)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("model", [OneTrunk, TwoHeads])
@pytest.mark.parametrize(
    "options",
    [
        {"ema_decay": 0.0},
        {"ema_decay": 0.7},
        {"ema_decay": 0.7, "refresh_every": 4},
        {"ema_decay": 0.5, "refresh_every": 3, "refresh_micro_batches": 2},
        {"ema_decay": 0.0, "refresh_micro_batches": 1},
    ],
)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("regularize", [False, True])
def test_engine_equals_its_twin(model, options, micro, regularize):
    torch.manual_seed(0)
    data = [batches(micro, seed=t) for t in range(9)]
    run_both(model(), data, regularize=regularize, **options)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), every=st.integers(1, 4), decay=st.sampled_from([0.0, 0.7]), micro=st.integers(1, 3))
def test_engine_equals_its_twin_with_absent_objectives(seed, every, decay, micro):
    generator = torch.Generator().manual_seed(seed)
    gone = [
        set(torch.randperm(3, generator=generator)[: int(torch.randint(0, 3, (), generator=generator))].tolist())
        for _ in range(8)
    ]
    torch.manual_seed(seed)
    model = OneTrunk()
    parameters = list(model.parameters())
    twin = ReferenceMarble(parameters, 3, ema_decay=decay, refresh_every=every)
    optimizer = MarbleOptimizer(torch.optim.SGD(parameters, lr=0.02), ema_decay=decay, refresh_every=every)
    for t in range(8):
        data = batches(micro, seed=seed + t)
        losses = [[None if k in gone[t] else loss for k, loss in enumerate(model.losses(x))] for x in data]
        expected = twin.gradient(losses)
        optimizer.zero_grad()
        for i, some in enumerate(losses):
            report = optimizer.backward(some, accumulate=i + 1 < micro)
        torch.testing.assert_close(flat_gradient(parameters), expected, rtol=1e-8, atol=1e-11)
        assert report.absent == [f"objective_{k}" for k in sorted(gone[t])]
        optimizer.step()


def as_affine(model, x):
    """(y − c)² = y² − 2cy + c²: up to a constant affine in the terms y and y²."""
    y = model.net(x)
    targets = torch.cos(x.sum(1, keepdim=True) + 2 * torch.arange(3.0, dtype=x.dtype)).T[:, :, None]
    scale = (10.0 ** torch.arange(-1.0, 2.0, dtype=x.dtype) / y.numel())[:, None, None]
    linear, square = (-2 * scale * targets).expand(3, *y.shape), scale.expand(3, *y.shape)
    return AffineLoss(torch.stack([y, y.square()]), torch.stack([linear, square], dim=1))


def test_all_forms_of_losses_give_the_same_gradient():
    torch.manual_seed(1)
    model, (x,) = OneTrunk(), batches(1)
    forms = [
        model.losses,
        lambda x: dict(zip("abc", model.losses(x), strict=True)),
        lambda x: torch.stack(model.losses(x)),
        lambda x: as_affine(model, x),
    ]
    gradients = []
    for form in forms:
        optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), refresh_every=2)
        for _ in range(2):  # a refresh, then an amortised step on the same data
            optimizer.zero_grad()
            optimizer.backward(form(x))
            gradients.append(flat_gradient(model.parameters()))
            optimizer.step()
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-10, atol=1e-13)


def test_objective_order_does_not_matter():
    torch.manual_seed(2)
    model, (x,) = OneTrunk(), batches(1)
    results = []
    for order in ([0, 1, 2], [2, 0, 1]):
        optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        optimizer.zero_grad()
        optimizer.backward([model.losses(x)[k] for k in order])
        results.append(flat_gradient(model.parameters()))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-14)


class PassCounter:
    """Counts how often the graph behind a tensor is walked in reverse, and how often the model runs forward."""

    def __init__(self, module):
        self.reverse = self.forward = 0
        module.register_forward_hook(self._forward)

    def _forward(self, module, inputs, output):
        self.forward += 1
        output.register_hook(self._reverse)

    def _reverse(self, grad):
        self.reverse += 1


@pytest.mark.parametrize("model", [OneTrunk, TwoHeads])
@pytest.mark.parametrize("regularize", [False, True])
def test_cost_in_passes(model, regularize):
    torch.manual_seed(0)
    model = model()
    module = model.net[0] if isinstance(model, OneTrunk) else model.trunk[0]
    counter = PassCounter(module)
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), refresh_every=3)
    costs = []
    for x in batches(6):
        before = counter.reverse, counter.forward
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters()) if regularize else None
        optimizer.backward(model.losses(x), regularizer=penalty)
        optimizer.step()
        costs.append((counter.reverse - before[0], counter.forward - before[1]))
    assert costs == [(3, 1), (1, 1), (1, 1)] * 2


def test_refresh_micro_batches_bounds_the_cost():
    torch.manual_seed(0)
    model = OneTrunk()
    counter = PassCounter(model.net[0])
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), refresh_micro_batches=2)
    for i, x in enumerate(batches(5)):
        optimizer.backward(model.losses(x), accumulate=i < 4)
    assert (counter.reverse, counter.forward) == (2 * 3 + 3, 5)


def test_one_coefficient_vector_serves_all_micro_batches():
    torch.manual_seed(0)
    model = OneTrunk()
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), refresh_micro_batches=1)
    data = batches(4)
    optimizer.backward(model.losses(data[0]), accumulate=True)
    solved = optimizer.coefficients
    for i, x in enumerate(data[1:]):
        optimizer.backward(model.losses(x), accumulate=i < 2)
        assert torch.equal(optimizer.coefficients, solved)
    optimizer.step()
    assert torch.equal(optimizer.coefficients, solved)


@pytest.mark.parametrize("amortised", [False, True])
def test_graph_is_freed(amortised):
    torch.manual_seed(0)
    model, (x,) = OneTrunk(), batches(1)
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), refresh_every=2)
    if amortised:
        optimizer.backward(model.losses(x))
        optimizer.step()
    losses = model.losses(x)
    report = optimizer.backward(losses)
    assert report.refreshed is not amortised
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses[0].backward()


def test_gradients_are_added_and_only_to_own_parameters():
    torch.manual_seed(0)
    model, (x, z) = OneTrunk(), batches(2)
    foreign = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), refresh_every=2)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward([loss * foreign for loss in model.losses(x)])
        once = flat_gradient(model.parameters())
        optimizer.zero_grad()
        sum(model.losses(z)).backward()
        plain = flat_gradient(model.parameters())
        optimizer.backward([loss * foreign for loss in model.losses(x)])
        torch.testing.assert_close(flat_gradient(model.parameters()), plain + once)
        optimizer.step()
    assert foreign.grad is None


def test_autograd_gradients_that_alias_are_not_written_into():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = MarbleOptimizer(torch.optim.SGD([a, b], lr=0.0), refresh_micro_batches=None)
    for i in range(3):  # a + b hands the very same tensor, expanded from a scalar, to both
        optimizer.backward([(a + b).sum(), 2 * (a + b).sum()], accumulate=i < 2)
    # The unit gradients agree, so d = n̄ ĝ with n̄ = mean(3, 6) per coordinate.
    torch.testing.assert_close(a.grad, torch.full((3,), 4.5))
    torch.testing.assert_close(b.grad, torch.full((3,), 4.5))
    assert a.grad.data_ptr() != b.grad.data_ptr()


# --- Shared and head parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh_every", [1, 3])
def test_heads_get_their_own_plain_gradient(refresh_every):
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), refresh_every=refresh_every)
    for x in batches(4):
        losses = model.losses(x)
        plain = [
            torch.autograd.grad(loss, head.weight, retain_graph=True)[0]
            for loss, head in zip(losses, model.heads, strict=True)
        ]
        optimizer.zero_grad()
        optimizer.backward(losses)
        for head, gradient in zip(model.heads, plain, strict=True):
            torch.testing.assert_close(head.weight.grad, gradient)
        assert (optimizer.coefficients - 1).abs().min() > 1e-3  # else the trunk would be plain too
        optimizer.step()


def test_shared_parameters_decide():
    torch.manual_seed(0)
    model, (x,) = OneTrunk(), batches(1)
    chosen = [model.net[0].weight]
    optimizer = MarbleOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), shared_parameters=iter(chosen), refresh_every=2
    )
    for _ in range(2):
        optimizer.zero_grad()
        losses = model.losses(x)
        per = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
        report = optimizer.backward(losses)
        weights = report.coefficients
        expected = sum(w * g[0] for w, g in zip(weights, per, strict=True))
        torch.testing.assert_close(model.net[0].weight.grad, expected)
        torch.testing.assert_close(model.net[2].bias.grad, sum(g[3] for g in per))
        torch.testing.assert_close(report.gradient_norms, torch.stack([g[0].norm() for g in per]))
        optimizer.step()


def test_unused_and_frozen_parameters_stay_untouched():
    torch.manual_seed(0)
    model, data = OneTrunk(), batches(4)
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.net[0].bias.requires_grad_(False)
    frozen = model.net[0].bias.detach().clone()
    optimizer = MarbleOptimizer(
        torch.optim.AdamW([*model.parameters(), unused], lr=0.1, weight_decay=0.5), refresh_every=2
    )
    for x in data:
        optimizer.zero_grad()
        optimizer.backward(model.losses(x))
        assert unused.grad is None
        assert model.net[0].bias.grad is None
        optimizer.step()
    assert torch.equal(unused, torch.ones(2, dtype=torch.float64))
    assert torch.equal(model.net[0].bias, frozen)


def test_added_parameter_group_is_balanced_from_the_next_step():
    torch.manual_seed(0)
    model, data = OneTrunk(), batches(3)
    optimizer = MarbleOptimizer(torch.optim.SGD(model.net[0].parameters(), lr=0.0), refresh_every=10)
    optimizer.backward(model.losses(data[0]))
    optimizer.step()
    optimizer.add_param_group({"params": list(model.net[2].parameters()), "lr": 0.0})
    optimizer.zero_grad()
    report = optimizer.backward(model.losses(data[1]))
    assert report.refreshed
    whole = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), ema_decay=0.7)
    expected = whole.backward(model.losses(data[1]))
    torch.testing.assert_close(report.gramian, expected.gramian)


# --- Degenerate objectives ----------------------------------------------------------------------------------------


def test_single_objective_is_the_inner_optimizer():
    torch.manual_seed(0)
    model, data = OneTrunk(), batches(3)
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), refresh_every=2)
    for x in data:
        loss = sum(model.losses(x))
        plain = torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]
        )
        optimizer.zero_grad()
        optimizer.backward([loss])
        torch.testing.assert_close(flat_gradient(model.parameters()), plain, rtol=1e-12, atol=1e-15)
        optimizer.step()


def test_objective_without_gradient_leaves_the_solve():
    rows = [[1.0, 0.0], [0.0, 4.0], [0.0, 0.0]]
    problem = LinearLosses(rows)
    optimizer = MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.1), ema_decay=0.0)
    report = optimizer.backward(problem.losses())
    assert report.inactive == ["objective_2"]
    torch.testing.assert_close(problem.x.grad, torch.tensor([1.25, 1.25], dtype=torch.float64))
    assert report.conflicts == 0
    assert report.update_cosines.isnan().tolist() == [False, False, True]


def test_constant_loss_is_inactive_not_an_error():
    problem = LinearLosses([[1.0, 0.0], [0.0, 4.0]])
    optimizer = MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.1), ema_decay=0.0)
    report = optimizer.backward([*problem.losses(), torch.tensor(3.0)])
    assert report.inactive == ["objective_2"]
    assert problem.x.grad.isfinite().all()
    assert problem.x.grad.abs().min() > 0.1


def test_opposite_gradients_stand_still():
    problem = LinearLosses([[1.0, 2.0], [-3.0, -6.0]])
    optimizer = MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.1), ema_decay=0.0)
    report = optimizer.backward(problem.losses())
    assert problem.x.grad.abs().max() < 1e-12
    assert (report.min_cosine, report.conflicts) == (0.0, 0)


@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e7])
@pytest.mark.parametrize("which", ["all", "first"])
def test_direction_does_not_depend_on_the_scale_of_a_loss(scale, which):
    torch.manual_seed(0)
    model, (x,) = OneTrunk(dtype=torch.float32), batches(1, dtype=torch.float32)
    directions = []
    for factor in (1.0, scale):
        optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), ema_decay=0.0)
        optimizer.zero_grad()
        losses = model.losses(x)
        losses = [loss * factor if which == "all" or k == 0 else loss for k, loss in enumerate(losses)]
        optimizer.backward(losses)
        directions.append(flat_gradient(model.parameters()).double())
    assert torch.nn.functional.cosine_similarity(*directions, dim=0) > 1 - 1e-6


def test_objectives_that_alternate_are_never_frozen():
    """Each is alone in its step, so neither may end with the other's whole share."""
    torch.manual_seed(0)
    model = OneTrunk(count=2)
    optimizer = MarbleOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), objective_names=["a", "b"], refresh_every=4
    )
    for t, x in enumerate(batches(12)):
        optimizer.zero_grad()
        name = "ab"[t % 2]
        report = optimizer.backward({name: model.losses(x)[t % 2]})
        assert report.absent == ["ba"[t % 2]]
        assert flat_gradient(model.parameters()).norm() > 1e-3
        optimizer.step()


def test_step_with_all_objectives_absent_only_regularizes():
    problem = LinearLosses([[1.0, 0.0], [0.0, 4.0]])
    optimizer = MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.1))
    optimizer.backward(problem.losses())
    optimizer.step()
    before = optimizer.coefficients
    optimizer.zero_grad()
    report = optimizer.backward([None, None], regularizer=(problem.x - 1).square().sum())
    torch.testing.assert_close(problem.x.grad, 2 * (problem.x.detach() - 1))
    assert report.absent == ["objective_0", "objective_1"]
    optimizer.step()
    assert torch.equal(optimizer.coefficients, before)


# --- Low precision ------------------------------------------------------------------------------------------------


def test_bf16_parameters_are_summed_in_float32():
    """64 micro-batches whose gradients a bf16 sum would swallow: 1 + 64 · 2⁻⁹ stays 1 in bf16."""
    x = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = BalancedOptimizer(torch.optim.SGD([x], lr=0.0), "weighted_sum")
    optimizer.backward([x.float()[0], x.float()[1]], accumulate=True)
    for i in range(64):
        optimizer.backward([x.float()[0] * 2**-9, x.float()[1] * 2**-9], accumulate=i < 63)
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad, torch.full((2,), 1.125, dtype=torch.bfloat16), rtol=0, atol=0)


def test_mixed_dtypes_in_one_model():
    torch.manual_seed(0)
    low = nn.Parameter(torch.randn(5).bfloat16())
    high = nn.Parameter(torch.randn(5))
    optimizer = MarbleOptimizer(torch.optim.SGD([low, high], lr=0.1), refresh_every=2)
    for _ in range(4):
        optimizer.zero_grad()
        y = low.float() * high
        report = optimizer.backward([y.sum(), y.square().sum()])
        expected = sum(
            c * g.norm() ** 0 for c, g in zip(report.coefficients, report.gradient_norms.unsqueeze(1), strict=True)
        )
        assert expected > 0
        assert (low.grad.dtype, high.grad.dtype) == (torch.bfloat16, torch.float32)
        optimizer.step()
    assert low.isfinite().all()


# --- Closures -------------------------------------------------------------------------------------------------------


def test_closure_equals_backward_and_step():
    torch.manual_seed(0)
    one, two = OneTrunk(), OneTrunk()
    two.load_state_dict(one.state_dict())
    first = MarbleOptimizer(torch.optim.SGD(one.parameters(), lr=0.05), refresh_every=2)
    second = MarbleOptimizer(torch.optim.SGD(two.parameters(), lr=0.05), refresh_every=2)
    for x in batches(5):
        first.zero_grad()
        first.backward(one.losses(x))
        first.step()
        loss = second.step(lambda x=x: two.losses(x))
        assert loss == pytest.approx(float(second.coefficients @ second.report.losses))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.coefficients, second.coefficients)


def test_lbfgs_evaluates_often_with_one_coefficient_vector():
    torch.manual_seed(0)
    model, (x,) = OneTrunk(), batches(1)
    inner = torch.optim.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe")
    optimizer = MarbleOptimizer(inner)
    seen, start = [], [loss.item() for loss in model.losses(x)]

    def closure():
        seen.append(optimizer.coefficients)
        return model.losses(x)

    for _ in range(5):
        optimizer.step(closure)
    assert len(seen) > 10
    coefficients = optimizer.coefficients
    end = [loss.item() for loss in model.losses(x)]
    assert sum(c * e for c, e in zip(coefficients.tolist(), end, strict=True)) < sum(
        c * s for c, s in zip(coefficients.tolist(), start, strict=True)
    )


# --- Wrong input --------------------------------------------------------------------------------------------------


def make(**options):
    problem = LinearLosses([[1.0, 0.0], [0.0, 1.0]])
    return problem, MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.1), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema_decay": 1.0}, "ema_decay must be a number in"),
        ({"refresh_every": 0}, "refresh_every must be an integer of at least 1, got 0"),
        ({"refresh_every": 2.0}, "refresh_every must be an integer"),
        ({"refresh_every": True}, "refresh_every must be an integer"),
        ({"refresh_every": None}, "refresh_every must be an integer"),
        ({"refresh_micro_batches": 0}, "refresh_micro_batches must be"),
        ({"nonfinite": "ignore"}, "nonfinite must be"),
        ({"objective_names": "ab"}, "objective_names must be distinct"),
        ({"objective_names": ["a", "a"]}, "objective_names must be distinct"),
        ({"objective_names": []}, "objective_names must be distinct"),
        ({"shared_parameters": [torch.zeros(7)]}, r"shapes \[\(7,\)\]"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_only_torch_optimizers_are_wrapped_and_only_once():
    _, optimizer = make()
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got list"):
        MarbleOptimizer([])
    with pytest.raises(TypeError, match="already a MarbleOptimizer"):
        BalancedOptimizer(optimizer, "mgda")
    with pytest.raises(TypeError, match="balancer must be"):
        BalancedOptimizer(optimizer.inner, 3)
    with pytest.raises(ValueError, match="pcgrad"):
        BalancedOptimizer(optimizer.inner, "pcgard")


def test_bad_losses_are_explained():
    problem, optimizer = make(objective_names=["a", "b"])
    cases = [
        (sum(problem.losses()), ValueError, "one scalar loss.*can no longer be balanced"),
        ([sum(problem.losses())], ValueError, "got 1 losses, but this optimizer balances 2"),
        (problem.x[None], ValueError, r"must have shape \(K,\), got \(1, 2\)"),
        ([problem.x, problem.x], ValueError, r"loss of 'a' must be a scalar, got shape \(2,\)"),
        ([1.0, 2.0], TypeError, "loss of 'a' must be a tensor or None, got float"),
        ({"a": problem.losses()[0], "c": problem.losses()[1]}, ValueError, r"unknown objective\(s\) \['c'\]"),
        ("ab", TypeError, "got str"),
        (None, TypeError, "got NoneType"),
        ([loss.detach() for loss in problem.losses()], RuntimeError, "no loss of .* requires grad"),
    ]
    for losses, error, message in cases:
        with pytest.raises(error, match=message):
            optimizer.backward(losses)
    with pytest.raises(ValueError, match="losses is empty"):
        make()[1].backward([])
    with pytest.raises(ValueError, match="regularizer must be a real scalar"):
        optimizer.backward(problem.losses(), regularizer=1.0)
    assert problem.x.grad is None
    assert optimizer.coefficients.tolist() == [0.0, 0.0]


def test_step_inside_an_accumulation_is_an_error():
    problem, optimizer = make()
    optimizer.backward(problem.losses(), accumulate=True)
    with pytest.raises(RuntimeError, match="accumulate=False"):
        optimizer.step()
    assert torch.equal(problem.x, torch.zeros(2, dtype=torch.float64))


def test_step_without_backward_steps_the_inner_optimizer():
    problem, optimizer = make()
    problem.x.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(problem.x.detach(), torch.full((2,), -0.1, dtype=torch.float64))
    assert len(optimizer.coefficients) == 0
