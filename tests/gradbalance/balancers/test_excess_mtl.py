"""ExcessMTL from the norms."""

import math

import pytest
import torch

from gradbalance.balancers import ExcessMTL


def _diagonal(*norms):
    return torch.diag(torch.tensor(norms, dtype=torch.float64) ** 2)


def test_by_hand():
    """Uniform at first. Then norms 3 → 4 and 1 → 0.5: E = 16/5 and .25/√1.25, relative to 3 and 1."""
    balancer = ExcessMTL(lr=0.5)
    assert balancer.coefficients(_diagonal(3.0, 1.0)).tolist() == [0.5, 0.5]
    found = balancer.coefficients(_diagonal(4.0, 0.5))
    first, second = math.exp(0.5 * 16 / 5 / 3), math.exp(0.5 * 0.25 / math.sqrt(1.25))
    assert found.tolist() == pytest.approx([first / (first + second), second / (first + second)])


def test_weight_goes_to_the_objective_whose_gradient_does_not_shrink():
    balancer = ExcessMTL(lr=0.1)
    shares = [balancer.coefficients(_diagonal(1.0, 0.9**step))[0].item() for step in range(50)]
    assert shares == sorted(shares)
    assert shares[-1] > 0.6


def test_the_level_of_a_loss_does_not_matter():
    """A noisy objective has a large loss and, once trained, a small gradient."""
    balancer = ExcessMTL()
    for step in range(5):
        found = balancer.coefficients(_diagonal(1.0, 0.5**step), torch.tensor([0.1, 100.0]))
    assert found[0] > found[1]


def test_an_objective_that_comes_back_has_the_weight_it_had():
    balancer = ExcessMTL()
    for step in range(4):
        last = balancer.coefficients(_diagonal(1.0, 0.8**step, 0.9**step))
    for _ in range(10):
        without = balancer.coefficients(_diagonal(1.0, 1.0, 0.0))
    assert without[2] == 0
    assert without.sum().item() == pytest.approx(1.0)
    powers = torch.tensor(balancer.logits, dtype=torch.float64).softmax(0)
    assert powers[2].item() == pytest.approx(last[2].item())


def test_bad_lr():
    with pytest.raises(ValueError, match=r"lr must be a number in \(0, ∞\), got 0"):
        ExcessMTL(0)
