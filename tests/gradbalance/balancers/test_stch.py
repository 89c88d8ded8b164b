"""Smooth Tchebycheff scalarisation."""

import math

import pytest
import torch

from gradbalance.balancers import STCH


def _of(balancer, *losses):
    return balancer.coefficients(torch.eye(len(losses)), torch.tensor(losses)).tolist()


def test_by_hand():
    """p L / μ = (log 3, 0), so the softmax is (3/4, 1/4), times p = 1/2."""
    assert _of(STCH(mu=0.5), math.log(3), 0.0) == pytest.approx([3 / 8, 1 / 8])


def test_the_derivative_of_the_smooth_maximum():
    mu, p, z = 0.3, torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor([0.0, -1.0, 0.5])
    losses = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64, requires_grad=True)
    (mu * torch.logsumexp(p * (losses - z) / mu, 0)).backward()
    found = STCH(mu, 10 * p, z).coefficients(torch.eye(3), losses)
    torch.testing.assert_close(found, losses.grad)


def test_a_small_mu_sees_the_worst_only_and_a_large_one_all():
    assert _of(STCH(mu=1e-6), 1.0, 2.0) == pytest.approx([0.0, 0.5])
    assert _of(STCH(mu=1e6, preference=[1, 3]), 1.0, 2.0) == pytest.approx([0.25 / 2, 0.75 / 2], abs=1e-5)


def test_the_ideal_point_is_subtracted():
    assert _of(STCH(ideal=[1.0, 5.0]), 2.0, 6.0) == pytest.approx([0.25, 0.25])


def test_reaches_the_middle_of_a_concave_front():
    """On the front (cos t, sin t) the losses' sum has its minima at the ends, the smooth maximum in the middle."""

    def descend(weights_of, t=0.6):
        for _ in range(2000):
            losses = torch.tensor([math.cos(t), math.sin(t)], dtype=torch.float64)
            first, second = weights_of(losses)
            t -= 0.01 * (-first * math.sin(t) + second * math.cos(t))
            t = min(max(t, 0.0), math.pi / 2)
        return t

    assert descend(lambda losses: (0.5, 0.5)) == 0.0
    balancer = STCH(mu=0.1)
    middle = descend(lambda losses: balancer.coefficients(torch.eye(2), losses).tolist())
    assert middle == pytest.approx(math.pi / 4, abs=1e-3)


def test_huge_losses_do_not_overflow():
    assert _of(STCH(mu=1e-3), 1e30, -1e30) == [0.5, 0.0]


def test_bad_options():
    with pytest.raises(ValueError, match=r"mu must be a number in \(0, ∞\), got 0"):
        STCH(mu=0)
    with pytest.raises(ValueError, match="preference must hold one finite number > 0 per objective"):
        STCH(preference=[1.0, 0.0])
    with pytest.raises(ValueError, match="ideal has 3 values, but there are 2 objectives"):
        _of(STCH(ideal=[0.0, 0.0, 0.0]), 1.0, 1.0)
