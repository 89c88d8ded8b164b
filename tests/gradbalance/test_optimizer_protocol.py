"""A balanced optimizer is a real torch optimizer: schedulers, scalers, clipping, copies, checkpoints."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from gradbalance import BalancedOptimizer, MarbleOptimizer, NonFiniteError
from gradbalance.state import KEY
from tests.gradbalance.models import LinearLosses, OneTrunk, TwoHeads, batches, flat_gradient


def train(model, optimizer, data, scheduler=None):
    for x in data:
        optimizer.zero_grad()
        optimizer.backward(dict(zip("abc", model.losses(x), strict=True)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def parameters_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def build(seed=0, model=TwoHeads, balancer=None, **options):
    torch.manual_seed(seed)
    model = model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    if balancer is not None:
        return model, BalancedOptimizer(inner, balancer, **options)
    return model, MarbleOptimizer(inner, **{"refresh_every": 3, **options})


def test_it_shares_the_inner_optimizers_parts():
    model, optimizer = build()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state is optimizer.inner.state
    assert optimizer.defaults is optimizer.inner.defaults
    train(model, optimizer, batches(2))
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize(
    "make",
    [
        lambda o: StepLR(o, 2, gamma=0.5),
        lambda o: CosineAnnealingLR(o, 10),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: LambdaLR(o, lambda t: 0.9**t),
        lambda o: SequentialLR(o, [StepLR(o, 1), CosineAnnealingLR(o, 5)], milestones=[2]),
    ],
)
def test_schedulers_drive_the_inner_optimizer(make):
    model, optimizer = build()
    plain = torch.optim.AdamW(OneTrunk().parameters(), lr=0.01)
    scheduler, expected = make(optimizer), make(plain)
    for x in batches(6):
        train(model, optimizer, [x], scheduler)
        plain.step()
        expected.step()
        assert optimizer.inner.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_plateau_scheduler():
    model, optimizer = build()
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    train(model, optimizer, batches(1))
    scheduler.step(1.0)
    scheduler.step(1.0)
    assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(0.001)


def test_step_hooks_fire_once():
    model, optimizer = build()
    calls = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append("pre"))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append("post"))
    train(model, optimizer, batches(2))
    assert calls == ["pre", "post"] * 2


def test_gradient_clipping_before_the_step():
    model, optimizer = build()
    optimizer.backward(model.losses(batches(1)[0]))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert flat_gradient(model.parameters()).norm() == pytest.approx(1e-3, rel=1e-3)
    optimizer.step()


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_train_on_alike(copier):
    model, optimizer = build(shared_parameters=None)
    data = batches(9)
    train(model, optimizer, data[:4])
    other_model, other = copier((model, optimizer))
    train(model, optimizer, data[4:])
    train(other_model, other, data[4:])
    assert torch.equal(parameters_of(model), parameters_of(other_model))
    assert torch.equal(optimizer.coefficients, other.coefficients)


def through_torch_save(optimizer, fresh, model, tmp_path):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))


def through_dcp(optimizer, fresh, model, tmp_path, **flat):
    old_model, new_model = model
    options = StateDictOptions(**flat)
    dcp.save(get_optimizer_state_dict(old_model, optimizer, options=options), checkpoint_id=tmp_path)
    state_dict = get_optimizer_state_dict(new_model, fresh, options=options)
    dcp.load(state_dict, checkpoint_id=tmp_path)
    set_optimizer_state_dict(new_model, fresh, state_dict, options=options)


def through_flat_dcp(optimizer, fresh, model, tmp_path):
    through_dcp(optimizer, fresh, model, tmp_path, flatten_optimizer_state_dict=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # DCP says so when one process saves
@pytest.mark.parametrize("route", [through_torch_save, through_dcp, through_flat_dcp])
@pytest.mark.parametrize("balancer", [None, "pcgrad"])
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_resume_is_bit_equal(route, balancer, steps, tmp_path):
    options = {"balancer": balancer, "refresh_every": 3, "ema_decay": 0.7}
    data = batches(steps + 5)
    model, optimizer = build(**options)
    train(model, optimizer, data[:steps])
    resumed_model, resumed = build(seed=1, **options)
    resumed_model.load_state_dict(copy.deepcopy(model.state_dict()))
    route(optimizer, resumed, (model, resumed_model), tmp_path)
    assert torch.equal(optimizer.coefficients, resumed.coefficients)
    train(model, optimizer, data[steps:])
    train(resumed_model, resumed, data[steps:])
    assert torch.equal(parameters_of(model), parameters_of(resumed_model))
    assert optimizer.param_groups[0][KEY] == resumed.param_groups[0][KEY]
    assert torch.equal(optimizer.report.gramian, resumed.report.gramian)


def test_a_saved_state_is_not_changed_by_later_steps():
    model, optimizer = build()
    data = batches(6)
    train(model, optimizer, data[:3])
    saved = optimizer.state_dict()["param_groups"][0][KEY]
    before = copy.deepcopy(saved)
    train(model, optimizer, data[3:])
    assert saved == before
    assert optimizer.state_dict()["param_groups"][0][KEY] != before


def test_loading_other_objectives_is_an_error_and_loads_nothing():
    model, optimizer = build()
    train(model, optimizer, batches(2))
    _, other = build(objective_names=["a", "b", "c", "d"])
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(
        ValueError, match=r"checkpoint balances \['a', 'b', 'c'\], this optimizer \['a', 'b', 'c', 'd'\]"
    ):
        other.load_state_dict(optimizer.state_dict())
    assert str(other.state_dict()) == str(before)


def test_loading_a_plain_optimizers_checkpoint_starts_to_balance():
    model, optimizer = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.5)
    sum(model.losses(batches(1)[0])).backward()
    inner.step()
    optimizer.load_state_dict(inner.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    train(model, optimizer, batches(1))
    assert len(optimizer.coefficients) == 3


# --- What is not committed leaves no trace ----------------------------------------------------------------------


def snapshot(model, optimizer):
    return copy.deepcopy((list(model.parameters()), optimizer.state_dict()["state"], optimizer.param_groups[0][KEY]))


def same(a, b):
    return str(a) == str(b)


@pytest.mark.parametrize("phase", ["refresh", "amortised"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("model", [OneTrunk, TwoHeads])
def test_nonfinite_loss(phase, bad, nonfinite, model):
    model, optimizer = build(model=model, refresh_every=2, nonfinite=nonfinite)
    data = batches(6)
    train(model, optimizer, data[: 2 if phase == "refresh" else 3])
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    losses = dict(zip("abc", model.losses(data[4]), strict=True))
    losses["b"] = losses["b"] * bad

    def step():
        optimizer.backward(losses)
        optimizer.step()

    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match="'b' is NaN or infinite"):
            step()
    else:
        step()
    assert same(snapshot(model, optimizer), before)
    train(model, optimizer, data[5:])  # and training goes on
    assert not same(snapshot(model, optimizer), before)
    assert parameters_of(model).isfinite().all()


def test_infinite_gradient_of_a_finite_loss_is_named():
    model, optimizer = build(model=OneTrunk)
    a, b, c = model.losses(batches(1)[0])
    zero = sum(p.sum() for p in model.parameters()) * 0
    with pytest.raises(NonFiniteError, match="'objective_2'"):
        optimizer.backward([a, b, c + zero.sqrt()])


def test_infinite_gradient_in_a_head_is_named():
    model, optimizer = build(model=TwoHeads)
    a, b, c = model.losses(batches(1)[0])
    with pytest.raises(NonFiniteError, match="'objective_0'"):
        optimizer.backward([a + (model.heads[0].bias.sum() * 0).sqrt(), b, c])


def test_nonfinite_regularizer_is_named():
    model, optimizer = build()
    with pytest.raises(NonFiniteError, match="'regularizer'"):
        optimizer.backward(model.losses(batches(1)[0]), regularizer=next(model.parameters()).sum() * float("nan"))


@pytest.mark.parametrize("refresh_every", [1, 4])
def test_grad_scaler_gives_the_same_direction_and_skips_cleanly(refresh_every):
    torch.manual_seed(0)
    plain, scaled = OneTrunk(dtype=torch.float32), OneTrunk(dtype=torch.float32)
    scaled.load_state_dict(plain.state_dict())
    first = MarbleOptimizer(torch.optim.SGD(plain.parameters(), lr=0.01), refresh_every=refresh_every)
    second = MarbleOptimizer(
        torch.optim.SGD(scaled.parameters(), lr=0.01), refresh_every=refresh_every, nonfinite="skip"
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    for t, x in enumerate(batches(9, dtype=torch.float32)):
        if t in (4, 6):  # an overflow: on a refresh and on an amortised step
            before, scale = snapshot(scaled, second), scaler.get_scale()
            second.zero_grad()
            losses = scaled.losses(x)
            second.backward([scaler.scale(losses[0]), scaler.scale(losses[1]) * float("inf"), scaler.scale(losses[2])])
            scaler.step(second)
            scaler.update()
            assert same(snapshot(scaled, second), before)
            assert scaler.get_scale() == scale / 2
        first.zero_grad()
        first.backward(plain.losses(x))
        first.step()
        second.zero_grad()
        second.backward([scaler.scale(loss) for loss in scaled.losses(x)])
        scaler.unscale_(second)
        torch.testing.assert_close(
            flat_gradient(scaled.parameters()), flat_gradient(plain.parameters()), rtol=2e-4, atol=1e-5
        )
        scaler.step(second)
        scaler.update()
    assert second.param_groups[0][KEY]["step"] == 9
    torch.testing.assert_close(first.coefficients, second.coefficients, rtol=1e-3, atol=1e-6)


def test_pending_coefficients_are_shown_and_dropped_with_the_gradients():
    problem = LinearLosses([[1.0, 0.0], [0.0, 4.0]])
    optimizer = MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.1))
    optimizer.backward(problem.losses())
    assert optimizer.coefficients.tolist() == pytest.approx([1.25, 0.3125])
    assert optimizer.param_groups[0][KEY]["step"] == 0
    optimizer.zero_grad()
    assert len(optimizer.coefficients) == 0
    optimizer.backward(problem.losses())
    optimizer.step()
    assert optimizer.param_groups[0][KEY]["step"] == 1
    assert optimizer.coefficients.tolist() == pytest.approx([1.25, 0.3125])
