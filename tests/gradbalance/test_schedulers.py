"""LR schedulers, parameter groups and hooks act as on the plain torch optimizer that is given the same gradient."""

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradbalance import BalancedOptimizer, MarbleOptimizer
from tests.gradbalance.models import OneTrunk, batches, parameters_of
from tests.gradbalance.training import build, everything_of, train

STEPS = 12
SCHEDULERS = {
    "StepLR": lambda o: StepLR(o, 3, gamma=0.5),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, STEPS, eta_min=1e-4),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=STEPS + 1),
    "LambdaLR": lambda o: LambdaLR(o, [lambda t: 0.9**t, lambda t: 1 / (1 + t)]),
    "LinearLR warm-up": lambda o: LinearLR(o, start_factor=0.1, total_iters=5),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, factor=0.1, patience=1),
    "SequentialLR": lambda o: SequentialLR(
        o, [LinearLR(o, start_factor=0.1, total_iters=3), CosineAnnealingLR(o, 6)], milestones=[4]
    ),
}
INNER = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "tensor lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01)),
}
schedulers = pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
inners = pytest.mark.parametrize("inner", INNER.values(), ids=INNER)


def in_groups(model):
    return [
        {"params": list(model.net[0].parameters()), "weight_decay": 0.1},
        {"params": list(model.net[2].parameters()), "lr": 0.02},
    ]


def two_models():
    torch.manual_seed(0)
    one, two = OneTrunk(), OneTrunk()
    two.load_state_dict(one.state_dict())
    return one, two


def plain_step(optimizer, losses):
    """The plain sum's gradient by hand: what weighted_sum, or any method with one objective, steps along."""
    optimizer.zero_grad()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for loss in losses:
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True):
            p.grad = g if p.grad is None else p.grad + g
    optimizer.step()


def balanced_step(optimizer, losses):
    optimizer.zero_grad()
    optimizer.backward(losses)
    optimizer.step()


def options_of(optimizer):
    """What a scheduler may move, for each group: the rate, SGD's momentum, Adam's betas."""
    moved = ("lr", "momentum", "betas", "weight_decay", "initial_lr", "max_lr", "max_momentum", "base_momentum")
    return [{key: group[key] for key in moved if key in group} for group in optimizer.param_groups]


@inners
@schedulers
@pytest.mark.parametrize("count", [1, 3])
def test_a_scheduled_run_equals_the_plain_optimizers(scheduler, inner, count):
    """With one objective Marble's step is the plain one, with three the weighted sum's is."""
    ours, theirs = two_models()
    plain = inner(in_groups(theirs))
    wrapped = inner(in_groups(ours))
    optimizer = MarbleOptimizer(wrapped) if count == 1 else BalancedOptimizer(wrapped, "weighted_sum")
    schedule, expected = scheduler(optimizer), scheduler(plain)
    rates = set()
    for x in batches(STEPS):
        balanced_step(optimizer, ours.losses(x)[:count])
        plain_step(plain, theirs.losses(x)[:count])
        metric = [1.0] if isinstance(schedule, ReduceLROnPlateau) else []
        schedule.step(*metric)
        expected.step(*metric)
        assert options_of(optimizer) == options_of(optimizer.inner) == options_of(plain)
        assert schedule.get_last_lr() == expected.get_last_lr()
        torch.testing.assert_close(parameters_of(ours), parameters_of(theirs), rtol=1e-10, atol=1e-13)
        rates.add(float(optimizer.param_groups[0]["lr"]))
    assert len(rates) > 2


@pytest.mark.parametrize(("name", "option"), [("SGD", "momentum"), ("AdamW", "betas")])
def test_one_cycle_cycles_the_inner_momentum(name, option):
    model, _ = two_models()
    optimizer = MarbleOptimizer(INNER[name](in_groups(model)))
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)
    seen = set()
    for x in batches(STEPS):
        balanced_step(optimizer, model.losses(x))
        scheduler.step()
        seen.add(optimizer.inner.param_groups[0][option])
    assert len(seen) > STEPS / 2


@pytest.mark.parametrize("refresh_every", [1, 4])
def test_a_scheduler_may_be_attached_before_wrapping(refresh_every):
    models = two_models()
    optimizers, schedules = [], []
    for model, first in zip(models, (True, False), strict=True):
        inner = torch.optim.AdamW(in_groups(model), lr=0.01)
        schedule = StepLR(inner, 2) if first else None
        optimizer = MarbleOptimizer(inner, refresh_every=refresh_every)
        optimizers.append(optimizer)
        schedules.append(schedule or StepLR(optimizer, 2))
    for x in batches(6):
        for model, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
            balanced_step(optimizer, model.losses(x))
            schedule.step()
    assert everything_of(models[0], optimizers[0]) == everything_of(models[1], optimizers[1])


def test_the_wrong_order_is_warned_of_as_in_torch():
    """And the right order is not: all other tests here fail on any warning."""
    _, optimizer = build()
    scheduler = StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step\(\)"):
        scheduler.step()


@pytest.mark.parametrize("closure", [False, True])
def test_a_skipped_first_step_is_no_wrong_order(closure):
    model, optimizer = build(nonfinite="skip")
    scheduler, lr = StepLR(optimizer, 1, gamma=0.5), optimizer.param_groups[0]["lr"]
    losses = [loss * float("nan") for loss in model.losses(batches(1)[0])]
    if closure:
        optimizer.step(lambda: losses)
    else:
        balanced_step(optimizer, losses)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    assert caught == []
    assert optimizer.inner.param_groups[0]["lr"] == lr / 2


# --- Parameter groups -------------------------------------------------------------------------------------------


@inners
@pytest.mark.parametrize("count", [1, 3])
def test_a_group_that_is_added_in_the_middle(inner, count):
    ours, theirs = two_models()
    (first, second), (plain_first, plain_second) = in_groups(ours), in_groups(theirs)
    plain, wrapped = inner([plain_first]), inner([first])
    options = {"refresh_every": 4}
    optimizer = (
        MarbleOptimizer(wrapped, **options) if count == 1 else BalancedOptimizer(wrapped, "weighted_sum", **options)
    )
    for t, x in enumerate(batches(6)):
        if t == 2:
            optimizer.add_param_group(second)
            plain.add_param_group(plain_second)
        balanced_step(optimizer, ours.losses(x)[:count])
        plain_step(plain, theirs.losses(x)[:count])
        assert options_of(optimizer) == options_of(plain)
        torch.testing.assert_close(parameters_of(ours), parameters_of(theirs), rtol=1e-10, atol=1e-13)
    assert len(optimizer.state) == 4


def test_a_scheduler_that_is_attached_after_a_group_was_added():
    model, _ = two_models()
    first, second = in_groups(model)
    optimizer = MarbleOptimizer(torch.optim.SGD([first], lr=0.1))
    balanced_step(optimizer, model.losses(batches(1)[0]))
    optimizer.add_param_group(second)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    balanced_step(optimizer, model.losses(batches(1)[0]))
    scheduler.step()
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.05, 0.01]


@pytest.mark.parametrize("refresh_every", [1, 3])
def test_each_group_has_its_own_rate_and_decay(refresh_every):
    """SGD by hand with the balanced gradient."""
    model, _ = two_models()
    groups = in_groups(model)
    optimizer = MarbleOptimizer(torch.optim.SGD(groups, lr=0.05), refresh_every=refresh_every)
    for x in batches(4):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        optimizer.backward(model.losses(x))
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        for p, old, gradient, rate, decay in zip(
            model.parameters(), before, gradients, [0.05, 0.05, 0.02, 0.02], [0.1, 0.1, 0.0, 0.0], strict=True
        ):
            torch.testing.assert_close(p.detach(), old - rate * (gradient + decay * old), rtol=1e-12, atol=1e-15)


# --- Step hooks -------------------------------------------------------------------------------------------------


class Calls:
    """Step hooks that write down their kind and the optimizer they were given."""

    def __init__(self):
        self.kinds, self.optimizers = [], []

    def hook(self, kind):
        def called(optimizer, args, kwargs):
            self.kinds.append(kind)
            self.optimizers.append(optimizer)

        return called


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def global_calls(calls):
    handles = [
        register_optimizer_step_pre_hook(calls.hook("pre")),
        register_optimizer_step_post_hook(calls.hook("post")),
    ]
    yield calls
    for handle in handles:
        handle.remove()


def by_backward(model, optimizer, x):
    balanced_step(optimizer, model.losses(x))


def by_closure(model, optimizer, x):
    optimizer.step(lambda: model.losses(x))


ways = pytest.mark.parametrize("way", [by_backward, by_closure])


def hooked(optimizer, calls):
    return [optimizer.register_step_pre_hook(calls.hook("pre")), optimizer.register_step_post_hook(calls.hook("post"))]


@ways
@pytest.mark.parametrize("balancer", [None, "weighted_sum"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_step_hooks_fire_once_a_step(calls, way, balancer, scheduled):
    model, optimizer = build(balancer=balancer, refresh_every=2)
    handles = hooked(optimizer, calls)
    if scheduled:
        StepLR(optimizer, 1)
    for x in batches(3):
        way(model, optimizer, x)
    assert calls.kinds == ["pre", "post"] * 3
    assert all(seen is optimizer for seen in calls.optimizers)
    for handle in handles:
        handle.remove()
    way(model, optimizer, batches(1)[0])
    assert len(calls.kinds) == 6


@ways
def test_the_inner_optimizers_own_hooks_fire_too(calls, way):
    model, optimizer = build()
    hooked(optimizer.inner, calls)
    way(model, optimizer, batches(1)[0])
    assert calls.kinds == ["pre", "post"]
    assert all(seen is optimizer.inner for seen in calls.optimizers)


def test_a_pre_hook_acts_on_the_balanced_gradient_before_the_step():
    model, optimizer = build()
    before = parameters_of(model)

    def drop(optimizer, args, kwargs):
        optimizer.inner.zero_grad()

    optimizer.register_step_pre_hook(drop)
    by_backward(model, optimizer, batches(1)[0])
    assert torch.equal(parameters_of(model), before)


@ways
def test_global_hooks_fire_once_a_step_not_for_wrapper_and_inner_both(global_calls, way):
    model, optimizer = build(refresh_every=2)
    for x in batches(3):
        way(model, optimizer, x)
    assert global_calls.kinds == ["pre", "post"] * 3


def test_global_hooks_fire_once_for_a_step_without_backward(global_calls):
    _, optimizer = build()
    optimizer.step()
    assert global_calls.kinds == ["pre", "post"]


@ways
@pytest.mark.parametrize("amortised", [False, True])
def test_a_skipped_step_has_no_post_hook(calls, way, amortised):
    model, optimizer = build(nonfinite="skip", refresh_every=100)
    if amortised:
        train(model, optimizer, batches(1))
    hooked(optimizer, calls)
    losses = dict(zip("abc", model.losses(batches(1)[0]), strict=True))
    losses["b"] = losses["b"] * float("nan")
    if way is by_backward:
        balanced_step(optimizer, losses)
    else:
        optimizer.step(lambda: losses)
    assert "post" not in calls.kinds


@pytest.mark.parametrize("amortised", [False, True])
def test_a_skipped_step_has_no_global_post_hook(global_calls, amortised):
    model, optimizer = build(nonfinite="skip", refresh_every=100)
    if amortised:
        train(model, optimizer, batches(1))
    global_calls.kinds.clear()
    losses = dict(zip("abc", model.losses(batches(1)[0]), strict=True))
    balanced_step(optimizer, {**losses, "b": losses["b"] * float("nan")})
    assert "post" not in global_calls.kinds


# --- State dict hooks -------------------------------------------------------------------------------------------


def test_state_dict_hooks():
    model, optimizer = build()
    train(model, optimizer, batches(1))
    seen = []
    handles = [
        optimizer.register_state_dict_pre_hook(lambda o: seen.append(("pre", o))),
        optimizer.register_state_dict_post_hook(lambda o, d: {**d, "note": "kept"}),
        optimizer.register_state_dict_post_hook(lambda o, d: seen.append(("post", o, sorted(d)))),
    ]
    state_dict = optimizer.state_dict()
    assert seen == [("pre", optimizer), ("post", optimizer, ["note", "param_groups", "state"])]
    assert state_dict["note"] == "kept"
    for handle in handles:
        handle.remove()
    assert sorted(optimizer.state_dict()) == ["param_groups", "state"]
    assert len(seen) == 2


def test_load_state_dict_hooks():
    model, saved = build()
    train(model, saved, batches(2))
    _, optimizer = build(seed=1)
    seen = []

    def halve_the_rate(o, state_dict):
        seen.append(("pre", o))
        groups = [{**group, "lr": group["lr"] / 2} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(halve_the_rate)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("post", o, o.coefficients.tolist())))
    optimizer.load_state_dict(saved.state_dict())
    assert seen == [("pre", optimizer), ("post", optimizer, saved.coefficients.tolist())]
    assert optimizer.param_groups[0]["lr"] == saved.param_groups[0]["lr"] / 2


def test_hooks_are_called_in_order_and_prepend_goes_first():
    _, optimizer = build()
    order = []
    optimizer.register_state_dict_pre_hook(lambda o: order.append(1))
    optimizer.register_state_dict_pre_hook(lambda o: order.append(0), prepend=True)
    optimizer.state_dict()
    assert order == [0, 1]
