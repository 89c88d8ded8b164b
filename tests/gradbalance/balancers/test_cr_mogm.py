"""CR-MOGM: the average, the inner balancer's state and promises, absent objectives."""

import math

import numpy as np
import pytest
import torch

from benchmarks.agreement.projecting import PAIRS
from gradbalance.balancers import CRMOGM, MGDA, Marble, PCGrad, WeightedSum
from tests.gradbalance.gradient_zoo import gramian

UNEVEN, EVEN = torch.diag(torch.tensor([1.0, 3.0])), torch.eye(2)  # MGDA: (¾, ¼) and (½, ½)


def test_average_by_hand():
    balancer = CRMOGM(MGDA(), decay=0.8)
    np.testing.assert_allclose(balancer.coefficients(UNEVEN), [0.75, 0.25])
    np.testing.assert_allclose(balancer.coefficients(EVEN), [0.7, 0.3])
    np.testing.assert_allclose(balancer.coefficients(EVEN), [0.66, 0.34])


def test_same_as_torchjd():
    assert PAIRS["cr_mogm", "torchjd"]() <= 1e-12


def test_no_decay_is_the_inner_balancer():
    rng = np.random.default_rng(0)
    own, other = CRMOGM(PCGrad(), decay=0.0), PCGrad()
    for _ in range(3):
        m = gramian(rng.standard_normal((4, 3)))
        assert torch.equal(own.coefficients(m), other.coefficients(m))


def test_what_is_averaged_is_scaled_by_the_present_norms():
    """Marble: α is ½, ½ both times, while the norms change."""
    balancer = CRMOGM(Marble())
    balancer.coefficients(UNEVEN)
    changed = torch.diag(torch.tensor([16.0, 4.0]))
    torch.testing.assert_close(balancer.coefficients(changed), Marble().coefficients(changed))


@pytest.mark.parametrize("name", ["marble", "mgda", "weighted_sum"])
def test_takes_the_promises_of_the_inner_balancer(name):
    balancer = CRMOGM(name)
    assert balancer.simplex == balancer.balancer.simplex
    assert balancer.uses_gradients == balancer.balancer.uses_gradients


def test_the_state_holds_both():
    balancer = CRMOGM(PCGrad(), decay=0.5)
    balancer.coefficients(EVEN)
    assert balancer.state_dict() == {"average": [1.0, 1.0], "seen": [1, 1], "balancer.calls": 1}


@pytest.mark.parametrize("broken", [{"balancer.calls": "1"}, {"average": "0"}])
def test_a_state_that_is_refused_changes_nothing(broken):
    balancer = CRMOGM(PCGrad())
    before = balancer.state_dict()
    other = {"average": [0.5, 0.5], "seen": [1, 1], "balancer.calls": 3}
    with pytest.raises(ValueError, match="state_dict of"):
        balancer.load_state_dict({**other, **broken})
    assert balancer.state_dict() == before


def test_an_absent_objective_keeps_its_average():
    balancer = CRMOGM(Marble(), decay=0.5)
    balancer.coefficients(torch.diag(torch.tensor([1.0, 1.0, 1.0])), torch.ones(3))
    absent = torch.tensor([1.0, math.nan, 1.0])
    m = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    weights = balancer.weights(m, absent)
    np.testing.assert_allclose(weights, [0.5, 0, 0.5])
    np.testing.assert_allclose(balancer.average, [(1 / 3 + 1 / 2) / 2, 1 / 3, (1 / 3 + 1 / 2) / 2])


def test_the_first_weights_of_an_objective_set_its_average():
    balancer = CRMOGM(WeightedSum([2.0, 4.0]), decay=0.5)
    assert balancer.coefficients(EVEN, torch.tensor([1.0, math.nan])).tolist() == [2.0, 0.0]
    assert balancer.coefficients(EVEN, torch.ones(2)).tolist() == [2.0, 4.0]


def test_another_number_of_objectives_later():
    balancer = CRMOGM()
    balancer.coefficients(EVEN)
    with pytest.raises(ValueError, match="average has 2 values, but there are 3 objectives"):
        balancer.coefficients(torch.eye(3))


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_bad_decay(decay):
    with pytest.raises(ValueError, match=r"decay must be a number in \[0, 1\), got"):
        CRMOGM(decay=decay)


def test_unknown_inner_balancer():
    with pytest.raises(ValueError, match="no balancer is called 'mdga'; did you mean 'mgda'"):
        CRMOGM("mdga")
    with pytest.raises(TypeError, match="balancer must be a name or a Balancer, got <class"):
        CRMOGM(MGDA)
