"""Uncertainty weighting."""

import math

import pytest
import torch

from gradbalance.balancers import UncertaintyWeighting


def _after(balancer, losses, calls):
    for _ in range(calls):
        found = balancer.coefficients(torch.eye(len(losses)), torch.tensor(losses))
    return found


def test_the_first_steps_by_hand():
    balancer = UncertaintyWeighting(lr=0.2)
    assert _after(balancer, [3.0, 0.5], 1).tolist() == [0.5, 0.5]
    s = [0.2 * 0.5 * (3.0 - 1), 0.2 * 0.5 * (0.5 - 1)]
    assert balancer.log_variances == pytest.approx(s)
    assert _after(balancer, [1.0, 1.0], 1).tolist() == pytest.approx([0.5 * math.exp(-x) for x in s])


@pytest.mark.parametrize("losses", [[3.0, 0.5], [1e7, 1e-7]])
def test_the_weighted_losses_become_one_half_each(losses):
    found = _after(UncertaintyWeighting(lr=0.5), losses, 500)
    assert (found * torch.tensor(losses)).tolist() == pytest.approx([0.5, 0.5], rel=1e-5)


def test_one_huge_loss_is_not_long_remembered():
    """An unlimited step would put s at 25,000 and λ at 0 for 5,000 calls."""
    balancer = UncertaintyWeighting(lr=0.005)
    _after(balancer, [1e7], 1)
    assert balancer.log_variances == [1.0]


def test_a_negative_loss_stays_finite():
    found = _after(UncertaintyWeighting(lr=1.0), [-1.0, 1.0], 300)
    assert found.tolist() == pytest.approx([0.5 * math.exp(50), 0.5])


def test_bad_lr():
    with pytest.raises(ValueError, match=r"lr must be a number in \(0, ∞\), got 0"):
        UncertaintyWeighting(0)
