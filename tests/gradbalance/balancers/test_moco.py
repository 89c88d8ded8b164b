"""MoCo's tracked Gramian; what it shares with others of its kind is in test_simplex_descent."""

import numpy as np
import pytest
import torch

from gradbalance.balancers import MoCo, MoDo
from tests.gradbalance.gradient_zoo import gramian


def test_with_beta_1_it_is_modo():
    rng = np.random.default_rng(0)
    own, other = MoCo(beta=1.0, rho=0.2), MoDo(rho=0.2)
    for _ in range(5):
        m = gramian(rng.standard_normal((4, 6)))
        torch.testing.assert_close(own.coefficients(m), other.coefficients(m), rtol=1e-13, atol=0)


def test_the_gramian_is_tracked():
    """The first one sets it."""
    balancer = MoCo(beta=0.25, normalize=False)
    balancer.coefficients(torch.tensor([[4.0, 1.0], [1.0, 8.0]]))
    assert balancer.tracked == [4.0, 1.0, 1.0, 8.0]
    balancer.coefficients(torch.tensor([[8.0, -1.0], [-1.0, 4.0]]))
    assert balancer.tracked == [5.0, 0.5, 0.5, 7.0]


def test_the_step_is_on_the_tracked_gramian():
    balancer = MoCo(gamma=0.1, beta=0.5, normalize=False)
    balancer.coefficients(torch.diag(torch.tensor([1.0, 3.0])))
    found = balancer.coefficients(torch.diag(torch.tensor([3.0, 1.0])))  # on average both are 2
    np.testing.assert_allclose(found, np.array([0.55, 0.45]) - 0.1 * 2 * np.array([0.05, -0.05]))


def test_entries_of_an_absent_objective_stay():
    balancer = MoCo(beta=0.5, normalize=False)
    balancer.coefficients(torch.diag(torch.tensor([1.0, 0.0, 3.0])))  # objective 1 is not there yet
    assert balancer.seen == [1, 0, 1, 0, 0, 0, 1, 0, 1]
    balancer.coefficients(torch.diag(torch.tensor([0.0, 2.0, 1.0])))
    assert balancer.tracked == [1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 2.0]
    assert balancer.seen == [1, 0, 1, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("beta", [0, -0.5, 1.5])
def test_bad_beta(beta):
    with pytest.raises(ValueError, match=r"beta must be a number in \(0, 1\], got"):
        MoCo(beta=beta)
