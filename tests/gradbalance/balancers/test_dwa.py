"""Dynamic weight average."""

import math

import pytest
import torch

from gradbalance.balancers import DWA


def _run(balancer, *history):
    """λ of every call."""
    return [balancer.coefficients(torch.eye(2), torch.tensor(losses)).tolist() for losses in history]


def _expected(rates, temperature=2.0):
    powers = [math.exp(rate / temperature) for rate in rates]
    return pytest.approx([len(rates) * power / sum(powers) for power in powers])


def test_the_paper_s_formula():
    found = _run(DWA(period=1), [4.0, 2.0], [2.0, 2.0], [1.0, 1.0], [9.0, 9.0])
    assert found[:2] == [[1.0, 1.0], [1.0, 1.0]]  # no two periods yet
    assert found[2] == _expected([2 / 4, 2 / 2])
    assert found[3] == _expected([1 / 2, 1 / 2])


def test_losses_are_averaged_over_a_period():
    found = _run(DWA(period=2), [3.0, 2.0], [5.0, 2.0], [1.0, 3.0], [3.0, 1.0], [7.0, 7.0], [7.0, 7.0])
    assert found[:4] == [[1.0, 1.0]] * 4
    assert found[4] == found[5] == _expected([2 / 4, 2 / 2])


def test_temperature():
    history = [4.0, 2.0], [2.0, 2.0], [1.0, 1.0]
    assert _run(DWA(1, temperature=0.5), *history)[2] == _expected([0.5, 1.0], temperature=0.5)
    assert _run(DWA(1, temperature=1e6), *history)[2] == pytest.approx([1.0, 1.0], abs=1e-6)


def test_negative_losses_that_fall_lose_weight():
    improving, steady = _run(DWA(1), [-1.0, 3.0], [-2.0, 3.0], [0.0, 0.0])[2]
    assert [improving, steady] == _expected([0.0, 1.0])


def test_a_loss_that_was_zero_stays_finite():
    for start, end in ((0.0, 1.0), (0.0, -1.0), (0.0, 0.0)):
        found = _run(DWA(1), [start, 1.0], [end, 1.0], [1.0, 1.0])[2]
        assert all(map(math.isfinite, found))
    assert found == pytest.approx([1.0, 1.0])  # 0 to 0 is no change


def test_the_clock_of_an_absent_objective_stands_still():
    nan = math.nan
    found = _run(DWA(1), [4.0, 2.0], [2.0, nan], [1.0, 2.0], [1.0, 1.0])
    assert found[2] == _expected([2 / 4, 1.0])  # the second has seen one period, so it counts as steady
    assert found[3] == _expected([1 / 2, 2 / 2])


def test_bad_options():
    with pytest.raises(ValueError, match="period must be an integer ≥ 1, got 0"):
        DWA(period=0)
    with pytest.raises(ValueError, match=r"temperature must be a number in \(0, ∞\), got 0"):
        DWA(temperature=0)
