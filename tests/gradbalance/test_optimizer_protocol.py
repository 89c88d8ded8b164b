"""A balanced optimizer is a real torch optimizer: shared parts, clipping, scalers, and steps that never happen.

Schedulers and hooks are in test_schedulers.py, checkpoints and copies in test_resume.py.
"""

import copy

import pytest
import torch

from gradbalance import MarbleOptimizer, NonFiniteError
from gradbalance.state import KEY
from tests.gradbalance.models import LinearLosses, OneTrunk, TwoHeads, batches, flat_gradient, parameters_of
from tests.gradbalance.training import build, train


def test_it_shares_the_inner_optimizers_parts():
    model, optimizer = build()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state is optimizer.inner.state
    assert optimizer.defaults is optimizer.inner.defaults
    train(model, optimizer, batches(2))
    assert len(optimizer.state) == len(list(model.parameters()))


def test_gradient_clipping_before_the_step():
    model, optimizer = build()
    optimizer.backward(model.losses(batches(1)[0]))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert flat_gradient(model.parameters()).norm() == pytest.approx(1e-3, rel=1e-3)
    optimizer.step()


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
