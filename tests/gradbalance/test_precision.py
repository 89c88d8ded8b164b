"""Mixed precision: autocast gradients, low-precision parameters, a loss scale that changes nothing, overflows."""

import copy

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW

from gradbalance import AffineLoss, BalancedOptimizer, MarbleOptimizer, NonFiniteError
from gradbalance.balancers import WeightedSum, available
from gradbalance.state import KEY
from tests.gradbalance import by_hand
from tests.gradbalance.balancers.catalogue import EVERY
from tests.gradbalance.identical import identical, snapshot
from tests.gradbalance.model_zoo import Body, Heads
from tests.gradbalance.models import LinearLosses, OneTrunk, TwoHeads, batches, flat_gradient

LOW = [torch.bfloat16, torch.float16]


def data(count, seed=0):
    return batches(count, size=16, seed=seed, dtype=torch.float32)


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0)


# --- Autocast ---------------------------------------------------------------------------------------------------------

AUTOCAST = {
    "layer norm": lambda: Body(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)),
    "batch norm": lambda: Body(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
    "heads": Heads,
}


@pytest.mark.parametrize("micro", [1, 2], ids=["one batch", "accumulated"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_gradient_equals_the_combination_by_hand(name, dtype, micro):
    """On a refresh Σ λ_k g_k of the autocast g_k; between refreshes the autocast gradient of Σ λ_k L_k."""
    torch.manual_seed(0)
    model = AUTOCAST[name]()
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.001), refresh_every=2)
    for t in range(4):
        twin, rows, sums = copy.deepcopy(model), [], []
        optimizer.zero_grad()
        for i, x in enumerate(data(micro, seed=t)):
            with torch.autocast("cpu", dtype=dtype):
                losses, theirs = model.losses(x), twin.losses(x)
            report = optimizer.backward(losses, accumulate=i + 1 < micro)
            rows.append(by_hand.gradients(twin.parameters(), theirs))
            sums.append(theirs)
        assert report.refreshed is (t % 2 == 0)
        if report.refreshed:
            rows = by_hand.add_rows(rows)
            torch.testing.assert_close(report.gramian, by_hand.gramian(rows), rtol=1e-5, atol=1e-5)
            expected = by_hand.combine(rows, report.coefficients)
            by_hand.assert_gradients(model.parameters(), expected, rtol=1e-4, atol=1e-4)
        else:
            weighted = [
                sum(float(c) * loss for c, loss in zip(report.coefficients, losses, strict=True)) for losses in sums
            ]
            sum(weighted).backward()
            shared = [p for n, p in model.named_parameters() if not n.startswith("heads")]
            expected = [p for n, p in twin.named_parameters() if not n.startswith("heads")]
            shared, expected = flat_gradient(shared), flat_gradient(expected)
            assert (shared - expected).norm() < 1e-5 * expected.norm()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()


@pytest.mark.parametrize("affine", [False, True])
def test_backward_called_inside_autocast(affine):
    """The solve and the blend of coefficients stay in full precision."""
    torch.manual_seed(0)
    model = AUTOCAST["layer norm"]()
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.001), refresh_every=2)
    for x in data(4):
        twin = copy.deepcopy(model)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses, theirs = model.losses(x), twin.losses(x)
            report = optimizer.backward(AffineLoss(torch.stack(losses), torch.eye(3)) if affine else losses)
            rows = by_hand.gradients(twin.parameters(), theirs)
        if report.refreshed:
            expected = by_hand.combine(rows, report.coefficients)
            by_hand.assert_gradients(model.parameters(), expected, rtol=1e-4, atol=1e-4)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                theirs = twin.losses(x)
                weighted = sum(float(c) * loss for c, loss in zip(report.coefficients, theirs, strict=True))
            weighted.backward()
            mine, expected = flat_gradient(model.parameters()), flat_gradient(twin.parameters())
            assert (mine - expected).norm() < 1e-5 * expected.norm()
        torch.testing.assert_close(report.losses.float(), torch.stack(theirs).detach(), rtol=1e-6, atol=0)
        optimizer.step()


# --- Low-precision and mixed parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh_every", [1, 2])
@pytest.mark.parametrize("upcast", [True, False], ids=["float32 losses", "losses of the parameters' dtype"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_low_precision_parameters(dtype, upcast, refresh_every):
    torch.manual_seed(0)
    model = OneTrunk(dtype=dtype)
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.01), refresh_every=refresh_every)
    for t, x in enumerate(batches(4, size=16, dtype=dtype)):
        twin = copy.deepcopy(model)
        losses, theirs = ([loss.float() if upcast else loss for loss in m.losses(x)] for m in (model, twin))
        optimizer.zero_grad()
        report = optimizer.backward(losses)
        assert report.refreshed is (t % refresh_every == 0)
        rows = by_hand.gradients(twin.parameters(), theirs)
        expected = by_hand.combine(rows, report.coefficients)
        eps = torch.finfo(dtype).eps
        if report.refreshed:  # added in float32, rounded once
            by_hand.assert_gradients(model.parameters(), expected, rtol=eps, atol=0.1 * eps)
        else:  # one low-precision reverse pass
            largest = max(e.abs().max() for e in expected)
            by_hand.assert_gradients(model.parameters(), expected, rtol=10 * eps, atol=4 * eps * float(largest))
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())


class EveryDtype(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(4).to(d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        )

    def losses(self, x):
        half, brain, single, double = self.weights
        y = (x * half.float() * brain.float()).tanh() * single
        return [(y * double).square().mean(), 10 * (y - 1).square().mean(), (y.double() + double).cos().mean()]


@pytest.mark.parametrize("micro", [1, 3], ids=["one batch", "accumulated"])
def test_four_dtypes_in_one_model(micro):
    torch.manual_seed(0)
    model = EveryDtype()
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.01), refresh_every=2)
    for t in range(4):
        twin, rows = copy.deepcopy(model), []
        optimizer.zero_grad()
        for i, x in enumerate(data(micro, seed=t)):
            report = optimizer.backward(model.losses(x), accumulate=i + 1 < micro)
            rows.append(by_hand.gradients(twin.parameters(), twin.losses(x)))
        expected = by_hand.combine(by_hand.add_rows(rows), report.coefficients)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            eps = torch.finfo(parameter.dtype).eps
            tolerance = 4 * eps if report.refreshed and micro == 1 else 16 * max(eps, torch.finfo(torch.float32).eps)
            by_hand.assert_gradients([parameter], [gradient], rtol=max(tolerance, 1e-5), atol=tolerance)
        optimizer.step()


# --- Coefficients that the losses' own dtype cannot hold --------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("coefficient", [1e7, 1e-9, -1e7])
def test_a_coefficient_beyond_a_half_precision_loss_is_not_lost_in_silence(dtype, coefficient):
    """Amortised steps put λ into a cotangent of the loss's dtype: float16 would make it inf, or 0.

    An error that names the objective is right, and so is the right gradient.
    """
    problem = LinearLosses([[1.0, 0.0], [0.0, 1 / coefficient]])
    optimizer = BalancedOptimizer(
        SGD([problem.x], lr=0.0), WeightedSum([1.0, coefficient]), refresh_every=2, objective_names=["a", "b"]
    )
    optimizer.backward([loss.to(dtype) for loss in problem.losses()])
    torch.testing.assert_close(problem.x.grad, torch.ones(2, dtype=torch.float64))
    optimizer.step()
    optimizer.zero_grad()
    try:
        optimizer.backward([loss.to(dtype) for loss in problem.losses()])
        gradient = problem.x.grad.clone()
        optimizer.step()
    except (ValueError, NonFiniteError) as error:
        assert "'b'" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(gradient, torch.ones(2, dtype=torch.float64), rtol=0.01, atol=0)


# --- GradScaler: the same direction -----------------------------------------------------------------------------------

AFFINE = "affine"
FORMS = {
    "list": lambda scale, losses: [scale(loss) for loss in losses],
    "scaled list": lambda scale, losses: scale(losses),
    "dict": lambda scale, losses: {name: scale(loss) for name, loss in zip("abc", losses, strict=True)},
    "tensor": lambda scale, losses: scale(torch.stack(losses)),
    AFFINE: lambda scale, losses: AffineLoss(scale(torch.stack(losses)), torch.eye(len(losses))),
}
MODES = {
    "exact": {"refresh_every": 1, "micro": 1},
    "amortised": {"refresh_every": 3, "micro": 1},
    "accumulated": {"refresh_every": 1, "micro": 2},
    "accumulated, amortised": {"refresh_every": 3, "micro": 2},
    "accumulated, one measured": {"refresh_every": 2, "micro": 2, "refresh_micro_batches": 1},
}


def penalty(model):
    return 1e-3 * sum(p.square().sum() for p in model.parameters())


def one_step(model, optimizer, micro_batches, *, scaler=None, form="list", factors=(1.0, 1.0, 1.0), regularize=False):
    """Backward of every micro-batch, unscaled; returns the gradient. The step itself is the caller's."""
    scale = (lambda loss: loss) if scaler is None else scaler.scale
    optimizer.zero_grad()
    for i, x in enumerate(micro_batches):
        losses = [f * loss for f, loss in zip(factors, model.losses(x), strict=True)]
        optimizer.backward(
            FORMS[form](scale, losses),
            regularizer=scale(penalty(model)) if regularize else None,
            accumulate=i + 1 < len(micro_batches),
        )
    if scaler is not None:
        scaler.unscale_(optimizer)
    return flat_gradient(model.parameters())


@pytest.mark.parametrize("factor", [1e-7, 1.0, 1e7])
@pytest.mark.parametrize("regularize", [False, True], ids=["plain", "regularizer"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_a_grad_scaler_changes_no_step(form, mode, regularize, factor):
    """Its scale is a power of two: in float32 not even a bit may differ."""
    options = dict(MODES[mode])
    micro = options.pop("micro")
    torch.manual_seed(0)
    plain = (OneTrunk if form == AFFINE else TwoHeads)(dtype=torch.float32)
    scaled = copy.deepcopy(plain)
    first = MarbleOptimizer(AdamW(plain.parameters(), lr=0.01), **options)
    second = MarbleOptimizer(AdamW(scaled.parameters(), lr=0.01), nonfinite="skip", **options)
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    for t in range(5):
        step = {"micro_batches": data(micro, seed=t), "form": form, "factors": [factor] * 3, "regularize": regularize}
        expected = one_step(plain, first, **step)
        gradient = one_step(scaled, second, scaler=scaler, **step)
        assert torch.equal(gradient, expected)
        first.step()
        scaler.step(second)
        scaler.update()
    assert scaler.get_scale() == 2.0**18
    assert identical(list(plain.parameters()), list(scaled.parameters()))
    torch.testing.assert_close(second.coefficients, first.coefficients, rtol=1e-12, atol=0)


@pytest.mark.parametrize("which", ["all", "one"])
@pytest.mark.parametrize("factor", [1e-7, 1e7])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_the_direction_under_a_scaler_does_not_depend_on_the_size_of_a_loss(form, mode, factor, which):
    options = dict(MODES[mode])
    micro = options.pop("micro")
    torch.manual_seed(0)
    model = OneTrunk(dtype=torch.float32)
    plain, scaled = (MarbleOptimizer(SGD(model.parameters(), lr=0.0), ema_decay=0.5, **options) for _ in range(2))
    scaler = GradScaler("cpu")
    factors = (factor, factor, factor) if which == "all" else (1.0, factor, 1.0)
    for t in range(3):
        micro_batches = data(micro, seed=t)
        expected = one_step(model, plain, micro_batches)
        plain.step()
        gradient = one_step(model, scaled, micro_batches, scaler=scaler, form=form, factors=factors)
        scaler.step(scaled)
        scaler.update()
        assert cosine(gradient, expected) > 1 - 1e-6
        torch.testing.assert_close(scaled.report.weights, plain.report.weights, rtol=1e-4, atol=1e-6)
    assert scaler.get_scale() == 2.0**16


# Where a factor of all losses changes the direction, losses cannot be scaled.
@pytest.mark.parametrize("balancer", [name for name in available() if EVERY[name].degree is not None])
def test_every_balancer_under_a_scaler(balancer):
    torch.manual_seed(0)
    model = OneTrunk(dtype=torch.float32)
    plain, scaled = (
        BalancedOptimizer(SGD(model.parameters(), lr=0.0), EVERY[balancer].make(3), ema_decay=0.5, refresh_every=2)
        for _ in range(2)
    )
    scaler = GradScaler("cpu")
    for x in data(4):
        expected = one_step(model, plain, [x])
        plain.step()
        assert cosine(one_step(model, scaled, [x], scaler=scaler), expected) > 1 - 1e-6
        scaler.step(scaled)
        scaler.update()


# --- GradScaler: overflow, and unscaling once -------------------------------------------------------------------------


def infinite_loss(model, x):
    a, b, c = model.losses(x)
    return [a, b * torch.inf, c]


def infinite_gradient(model, x):
    """A finite loss whose gradient is infinite: the root at 0."""
    a, b, c = model.losses(x)
    return [a, b + (next(model.parameters()).sum() * 0).sqrt(), c]


@pytest.mark.parametrize("overflow", [infinite_loss, infinite_gradient])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_an_overflow_skips_the_step_and_leaves_no_trace(mode, form, overflow):
    """Training goes on as if that batch had not been: bit-equal to a run that never saw it."""
    options = dict(MODES[mode])
    micro = options.pop("micro")
    torch.manual_seed(0)
    model = (OneTrunk if form == AFFINE else TwoHeads)(dtype=torch.float32)
    clean = copy.deepcopy(model)
    optimizer = MarbleOptimizer(AdamW(model.parameters(), lr=0.01), nonfinite="skip", **options)
    other = MarbleOptimizer(AdamW(clean.parameters(), lr=0.01), **options)
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
    scale = scaler.scale
    overflows = 0
    for t in range(6):
        micro_batches = data(micro, seed=t)
        if t in (3, 4):  # a refresh and an amortised step, where there are such
            before = snapshot(model, optimizer)
            optimizer.zero_grad()
            for i, x in enumerate(micro_batches):
                losses = overflow(model, x) if i == t % micro else model.losses(x)
                optimizer.backward(
                    FORMS[form](scale, losses),
                    regularizer=scale(penalty(model)),
                    accumulate=i + 1 < micro,
                )
            scaler.step(optimizer)
            scaler.update()
            overflows += 1
            assert identical(snapshot(model, optimizer), before)
            assert scaler.get_scale() == 2.0 ** (16 - overflows)
        one_step(model, optimizer, micro_batches, scaler=scaler, form=form, regularize=True)
        scaler.step(optimizer)
        scaler.update()
        one_step(clean, other, micro_batches, form=form, regularize=True)
        other.step()
    assert identical(list(model.parameters()), list(clean.parameters()))
    assert optimizer.param_groups[0][KEY]["step"] == 6


@pytest.mark.parametrize("refresh_every", [1, 3])
def test_fp16_autocast_that_really_overflows_finds_its_scale(refresh_every):
    """Every step is skipped until float16 can hold the scaled gradients, then training starts."""
    torch.manual_seed(0)
    model = AUTOCAST["layer norm"]()
    optimizer = MarbleOptimizer(AdamW(model.parameters(), lr=0.01), nonfinite="skip", refresh_every=refresh_every)
    scaler = GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    (x,) = data(1)
    before, first = snapshot(model, optimizer), [loss.item() for loss in model.losses(x)]
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            losses = model.losses(x)
        optimizer.backward(scaler.scale(losses))
        scaler.step(optimizer)
        scaler.update()
        if optimizer.report.skipped:
            assert identical(snapshot(model, optimizer), before)
    assert 2.0**8 < scaler.get_scale() < 2.0**24
    assert optimizer.param_groups[0][KEY]["step"] >= 20
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(loss < start for loss, start in zip(model.losses(x), first, strict=True))


@pytest.mark.parametrize("refresh_every", [1, 3])
def test_unscale_once_then_clip_then_step(refresh_every):
    torch.manual_seed(0)
    plain = TwoHeads(dtype=torch.float32)
    scaled = copy.deepcopy(plain)
    first = MarbleOptimizer(AdamW(plain.parameters(), lr=0.01), refresh_every=refresh_every)
    second = MarbleOptimizer(AdamW(scaled.parameters(), lr=0.01), refresh_every=refresh_every, nonfinite="skip")
    scaler = GradScaler("cpu")
    for x in data(4):
        one_step(plain, first, [x])
        one_step(scaled, second, [x], scaler=scaler)
        for model in (plain, scaled):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            assert norm > 0.01
        first.step()
        scaler.step(second)
        scaler.update()
        assert identical(list(plain.parameters()), list(scaled.parameters()))


def test_unscaling_twice_is_torchs_error():
    problem = LinearLosses([[1.0, 0.0], [0.0, 4.0]])
    optimizer = MarbleOptimizer(SGD([problem.x], lr=0.1))
    scaler = GradScaler("cpu")
    optimizer.backward([scaler.scale(loss) for loss in problem.losses()])
    scaler.unscale_(optimizer)
    gradient = problem.x.grad.clone()
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    assert torch.equal(problem.x.grad, gradient)
    scaler.step(optimizer)
    assert problem.x.abs().min() > 0


def test_an_overflow_without_skip_says_what_to_do():
    problem = LinearLosses([[1.0, 0.0], [0.0, 4.0]])
    optimizer = MarbleOptimizer(SGD([problem.x], lr=0.1))
    a, b = problem.losses()
    with pytest.raises(NonFiniteError, match=r"'objective_1' is NaN or infinite.*nonfinite=\"skip\""):
        optimizer.backward([a, b * torch.inf])
