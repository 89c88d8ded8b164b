"""GradVac: the paper's steps on real vectors, its targets, and PCGrad as the special case."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

from benchmarks.agreement.projecting import PAIRS
from gradbalance.balancers import GradVac, PCGrad
from gradbalance.balancers.grad_vac import LARGEST_TARGET
from gradbalance.balancers.orders import random_orders
from tests.gradbalance.gradient_zoo import WELL_POSED, gramian, zoo


def _vaccinate(gradients, orders, targets, beta):
    """The paper's algorithm, on the vectors; moves the targets in place."""
    total = np.zeros(gradients.shape[1])
    for k, order in enumerate(orders):
        v = gradients[k].copy()
        for other in order:
            g = gradients[other]
            cosine = v @ g / (np.linalg.norm(v) * np.linalg.norm(g))
            target = targets[k, other]
            if cosine < target:
                turn = target * math.sqrt(1 - cosine**2) - cosine * math.sqrt(1 - target**2)
                v = v + np.linalg.norm(v) * turn / (np.linalg.norm(g) * math.sqrt(1 - target**2)) * g
            targets[k, other] = (1 - beta) * target + beta * cosine
        total += v
    return total


@settings(max_examples=50, deadline=None)
@given(zoo(families=WELL_POSED, min_k=2, max_k=10, spread=1))
def test_same_as_turning_vectors(gradients):
    balancer, targets = GradVac(beta=0.4, seed=3), np.zeros((len(gradients),) * 2)
    for call in range(3):
        seen = gradients + call * np.roll(gradients, 1, axis=1)
        expected = _vaccinate(seen, random_orders(3, call, len(seen)), targets, 0.4)
        found = balancer.coefficients(gramian(seen)).numpy() @ seen
        np.testing.assert_allclose(found, expected, atol=1e-9 * np.linalg.norm(seen))
        np.testing.assert_allclose(balancer.targets, targets.ravel(), atol=1e-9)


def test_by_hand():
    """Target ½, cosine 0, norms 2 and 1: w = 2 (½ · 1 − 0) / (1 · √¾) for the first, ½ of ½ / √¾ for the second."""
    balancer = GradVac(beta=0.5)
    balancer.load_state_dict({"calls": 0, "targets": [0.0, 0.5, 0.5, 0.0]})
    found = balancer.coefficients(torch.diag(torch.tensor([4.0, 1.0])))
    np.testing.assert_allclose(found, [1 + 0.25 / math.sqrt(0.75), 1 + 1 / math.sqrt(0.75)])
    assert balancer.targets == [0.0, 0.25, 0.25, 0.0]


@settings(max_examples=50, deadline=None)
@given(zoo(families=WELL_POSED, min_k=2, max_k=2))
def test_two_gradients_reach_their_target(gradients):
    """v_1 is g_1 and a multiple of g_2, found from λ_2 = 1 + w."""
    m = gramian(gradients)
    target = 0.5 * (1 + (m[0, 1] / (m[0, 0] * m[1, 1]).sqrt()).item())
    balancer = GradVac()
    balancer.load_state_dict({"calls": 0, "targets": [0.0, target, target, 0.0]})
    multiple = balancer.coefficients(m)[1].item() - 1
    v = gradients[0] + multiple * gradients[1]
    assert v @ gradients[1] / np.linalg.norm(v) / np.linalg.norm(gradients[1]) == pytest.approx(target)


@settings(max_examples=50, deadline=None)
@given(zoo(min_k=1, max_k=10, spread=1))
def test_without_beta_it_is_pcgrad(gradients):
    assume(np.abs(gradients).sum(axis=1).all())
    m = gramian(gradients)
    own, other = GradVac(beta=0.0, seed=5).coefficients(m).numpy(), PCGrad(seed=5).coefficients(m).numpy()
    np.testing.assert_allclose(own @ gradients, other @ gradients, atol=1e-5 * np.linalg.norm(gradients))


def test_same_as_torchjd_in_its_order():
    assert PAIRS["grad_vac", "torchjd"]() <= 1e-12


def test_targets_follow_the_cosines():
    m = torch.tensor([[1.0, 0.6], [0.6, 1.0]])
    balancer = GradVac(beta=0.1)
    for call in range(1, 4):
        assert balancer.coefficients(m).tolist() == [1.0, 1.0]  # the cosine is above its own average
        np.testing.assert_allclose(balancer.targets, [0, *[0.6 * (1 - 0.9**call)] * 2, 0], rtol=1e-6)


def test_an_objective_without_gradient_keeps_its_targets():
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((3, 8))
    balancer = GradVac(beta=0.5)
    balancer.coefficients(gramian(gradients))
    before = np.reshape(balancer.targets, (3, 3))
    gradients[1] = 0
    found = balancer.coefficients(gramian(gradients))
    after = np.reshape(balancer.targets, (3, 3))
    assert found[1] == 0
    assert (after[1] == before[1]).all()
    assert (after[:, 1] == before[:, 1]).all()
    assert after[0, 2] != before[0, 2]


def test_agreement_that_breaks_down_costs_much_but_not_everything():
    """After many equal gradients the target is 1, which no multiple of the other gradient reaches."""
    balancer = GradVac(beta=0.5)
    for _ in range(100):
        balancer.coefficients(torch.ones(2, 2))
    assert balancer.targets[1] > LARGEST_TARGET
    found = balancer.coefficients(torch.eye(2))
    assert found.tolist() == pytest.approx([1 + 1 / math.sqrt(2e-6)] * 2, rel=1e-3)


def test_opposite_gradients_cancel():
    m = torch.tensor([[1.0, -2.0, 0.0], [-2.0, 4.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    found = GradVac(beta=0.5).coefficients(m)
    assert (found @ m @ found).item() == pytest.approx(1)  # the third alone is left


def test_another_number_of_objectives_later():
    balancer = GradVac()
    balancer.coefficients(torch.eye(2))
    with pytest.raises(ValueError, match="targets has 4 values, but there are 9"):
        balancer.coefficients(torch.eye(3))


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan, "0.1", True])
def test_bad_beta(beta):
    with pytest.raises(ValueError, match=r"beta must be a number in \[0, 1\], got"):
        GradVac(beta)


def test_bad_seed():
    with pytest.raises(ValueError, match="seed must be an integer ≥ 0, got -1"):
        GradVac(seed=-1)
