"""The loss balance of IMTL."""

import math

import numpy as np
import pytest
import torch

from gradbalance.balancers import IMTLL, UncertaintyWeighting


def test_the_first_steps_by_hand():
    balancer = IMTLL(lr=0.2)
    assert balancer.coefficients(torch.eye(2), torch.tensor([3.0, 0.5])).tolist() == [1.0, 1.0]
    assert balancer.log_scales == pytest.approx([-0.2 * (3.0 - 1), -0.2 * (0.5 - 1)])
    found = balancer.coefficients(torch.eye(2), torch.ones(2))
    assert found.tolist() == pytest.approx([math.exp(-0.4), math.exp(0.1)])


def test_the_weighted_losses_become_1_each():
    balancer, losses = IMTLL(lr=0.2), torch.tensor([1e7, 3.0, 1e-7])
    for _ in range(500):
        found = balancer.coefficients(torch.eye(3), losses)
    assert (found * losses).tolist() == pytest.approx([1.0] * 3, rel=1e-5)


def test_twice_uncertainty_weighting_of_twice_the_learning_rate():
    rng = np.random.default_rng(0)
    one, other = IMTLL(lr=0.1), UncertaintyWeighting(lr=0.2)
    for _ in range(20):
        losses = torch.from_numpy(rng.uniform(0, 3, 4))
        found = one.coefficients(torch.eye(4), losses)
        torch.testing.assert_close(found, 2 * other.coefficients(torch.eye(4), losses))


def test_a_negative_loss_stays_finite():
    balancer = IMTLL(lr=1.0)
    for _ in range(300):
        found = balancer.coefficients(torch.eye(1), torch.tensor([-1.0]))
    assert found.item() == pytest.approx(math.exp(50))


def test_bad_lr():
    with pytest.raises(ValueError, match=r"lr must be a number in \(0, ∞\), got -1"):
        IMTLL(-1)
