"""Balancers that look at losses alone are brought up to date on every step, at one backward each."""

import math

import pytest
import torch

from gradbalance import BalancedOptimizer
from gradbalance.balancers import FAMO
from gradbalance.state import KEY
from tests.gradbalance.loss_ratios import LossRatios
from tests.gradbalance.models import OneTrunk, TwoHeads
from tests.gradbalance.training import build, everything_of, train

LOSSES = torch.tensor([[1.0, 2.0], [2.0, 3.0], [1.0, 6.0], [4.0, 3.0], [8.0, 3.0]], dtype=torch.float64)


def one_parameter(**options):
    parameter = torch.ones(1, dtype=torch.float64, requires_grad=True)
    inner = torch.optim.SGD([parameter], lr=0.0)
    return parameter, BalancedOptimizer(inner, LossRatios(), **{"refresh_every": 4, **options})


def step(parameter, optimizer, losses, **options):
    optimizer.zero_grad()
    report = optimizer.backward([None if math.isnan(loss) else loss * parameter.sum() for loss in losses], **options)
    return report


def test_an_amortised_step_uses_the_losses_up_to_the_last_one():
    parameter, optimizer = one_parameter()
    used, refreshed = [], []
    for losses in LOSSES:
        report = step(parameter, optimizer, losses)
        used.append(report.coefficients.tolist())
        refreshed.append(report.refreshed)
        assert torch.equal(optimizer.coefficients, report.coefficients)
        assert parameter.grad.item() == pytest.approx((report.coefficients @ losses).item())
        optimizer.step()
    assert refreshed == [True, False, False, False, True]
    ratios = (1 + LOSSES[1:] / LOSSES[:-1]).tolist()
    assert used == [[1.0, 1.0], [1.0, 1.0], ratios[0], ratios[1], ratios[3]]  # a refresh uses its own
    assert optimizer.param_groups[0][KEY]["balancer"] == {"last": [8.0, 3.0], "calls": 5}


@pytest.mark.parametrize("refresh_micro_batches", [1, 2])
def test_a_refresh_that_measures_some_micro_batches_learns_from_the_losses_of_all(refresh_micro_batches):
    """Whole sums at the first step and every later one, whatever is measured, for the next one."""
    parameter, optimizer = one_parameter(refresh_every=2, refresh_micro_batches=refresh_micro_batches)
    used = []
    for losses in LOSSES:
        for i in range(3):
            report = optimizer.backward([loss / 3 * parameter.sum() for loss in losses], accumulate=i < 2)
        used.append(report.coefficients.tolist())
        optimizer.step()
        assert optimizer.param_groups[0][KEY]["balancer"]["last"] == pytest.approx(losses.tolist())
    ratios = (1 + LOSSES[1:] / LOSSES[:-1]).tolist()
    assert used == [pytest.approx(wanted) for wanted in ([1.0, 1.0], [1.0, 1.0], *ratios[:3])]


def test_famo_with_bounds_sees_no_part_of_a_loss():
    x = torch.zeros(1, requires_grad=True)
    optimizer = BalancedOptimizer(
        torch.optim.SGD([x], lr=0.0), FAMO(min_losses=[1.5, 1.5]), refresh_every=2, refresh_micro_batches=1
    )
    for _ in range(4):
        for i in range(4):
            optimizer.backward([(x - 1).square().sum() / 2, (x + 1).square().sum() / 2], accumulate=i < 3)
        optimizer.step()
    assert optimizer.coefficients.tolist() == pytest.approx([0.5, 0.5])


def test_one_backward_an_amortised_step():
    model = OneTrunk()
    optimizer = BalancedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), LossRatios(), refresh_every=3)
    passes, counts = [], []
    model.net[1].register_forward_hook(lambda _, __, features: features.register_hook(passes.append) and None)
    for seed in range(6):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        passes.clear()
        optimizer.zero_grad()
        optimizer.backward(model.losses(x))
        optimizer.step()
        counts.append(len(passes))
    assert counts == [3, 1, 1, 3, 1, 1]


def test_an_absent_objective_keeps_its_coefficient():
    parameter, optimizer = one_parameter(refresh_every=100)
    for losses in ([1.0, 1.0], [2.0, math.nan], [6.0, 5.0], [6.0, 5.0]):
        report = step(parameter, optimizer, torch.tensor(losses))
        optimizer.step()
    assert report.coefficients.tolist() == [1 + 6.0 / 2.0, 1 + 5.0 / 1.0]


def test_a_step_that_is_not_made_teaches_nothing():
    parameter, optimizer = one_parameter(nonfinite="skip")
    step(parameter, optimizer, LOSSES[0])
    optimizer.step()
    before = optimizer.param_groups[0][KEY]
    for dropped in (LOSSES[1], torch.tensor([math.inf, 1.0])):
        step(parameter, optimizer, dropped)
        if not dropped.isinf().any():
            optimizer.zero_grad()
        optimizer.step()
        assert optimizer.param_groups[0][KEY]["balancer"] == before["balancer"]
        assert optimizer.param_groups[0][KEY]["step"] == 1


def test_micro_batches_add_up():
    parameter, optimizer = one_parameter()
    for losses in LOSSES[:3]:
        optimizer.zero_grad()
        for part in (0.25, 0.75):
            optimizer.backward(list((part * losses) * parameter), accumulate=part < 0.5)
        optimizer.step()
    assert optimizer.coefficients.tolist() == pytest.approx((1 + LOSSES[2] / LOSSES[1]).tolist())


def test_smoothing_goes_on():
    parameter, optimizer = one_parameter(ema_decay=0.5, refresh_every=100)
    average = torch.ones(2, dtype=torch.float64)
    for now, last in zip(LOSSES[1:], LOSSES[:-1], strict=True):
        if not optimizer.coefficients.numel():
            step(parameter, optimizer, last)
            optimizer.step()
        step(parameter, optimizer, now)
        optimizer.step()
        average = 0.5 * average + 0.5 * (1 + now / last)
        torch.testing.assert_close(optimizer.coefficients, average)


def test_with_a_closure():
    plain = one_parameter(refresh_every=100)
    closed = one_parameter(refresh_every=100)
    for losses in LOSSES:
        step(*plain, losses)
        plain[1].step()
        closed[1].step(lambda losses=losses: list(losses * closed[0]))
    assert torch.equal(plain[1].coefficients, closed[1].coefficients)


@pytest.mark.parametrize("model", [OneTrunk, TwoHeads])
def test_resumed_on_an_amortised_step_it_goes_on_bit_equal(model):
    data = torch.randn(9, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = build(model=model, balancer=LossRatios(), refresh_every=4)
    first = build(model=model, balancer=LossRatios(), refresh_every=4)
    train(*whole, data)
    train(*first, data[:6])
    second = build(seed=1, model=model, balancer=LossRatios(), refresh_every=4)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    train(*second, data[6:])
    assert everything_of(*second) == everything_of(*whole)
