"""GradNorm: its step, and the norms it comes to rest at."""

import math

import pytest
import torch

from gradbalance.balancers import GradNorm


def _diagonal(*norms):
    return torch.diag(torch.tensor(norms, dtype=torch.float64) ** 2)


def test_the_first_step_by_hand():
    """Norms 3 and 1, mean 2: both steps go to the mean, of lengths lr 3/2 and lr 1/2 in log w."""
    balancer = GradNorm(lr=0.1)
    assert balancer.coefficients(_diagonal(3.0, 1.0), torch.ones(2)).tolist() == [1.0, 1.0]
    down, up = math.exp(-0.15), math.exp(0.05)
    found = balancer.coefficients(_diagonal(3.0, 1.0), torch.ones(2))
    assert found.tolist() == pytest.approx([2 * down / (down + up), 2 * up / (down + up)])


def test_the_step_lowers_the_paper_s_loss():
    m, balancer = _diagonal(5.0, 1.0, 0.2), GradNorm(alpha=0)
    norms = m.diagonal().sqrt()
    spread = []
    for _ in range(50):
        lengths = balancer.coefficients(m, torch.ones(3)) * norms
        spread.append(((lengths - lengths.mean()).abs().sum() / lengths.mean()).item())
    assert spread == sorted(spread, reverse=True)


def test_equal_norms_for_alpha_0():
    balancer, m = GradNorm(alpha=0, lr=0.02), _diagonal(1e3, 1.0, 1e-3)
    for _ in range(3000):
        found = balancer.coefficients(m, torch.tensor([1.0, 5.0, 0.1]))
    lengths = found * m.diagonal().sqrt()
    assert (lengths / lengths.mean()).tolist() == pytest.approx([1.0] * 3, abs=0.05)
    assert found.sum().item() == pytest.approx(3.0)


@pytest.mark.parametrize("alpha", [0.5, 1.5])
def test_those_behind_get_longer_gradients(alpha):
    balancer, m = GradNorm(alpha, lr=0.005), _diagonal(1.0, 4.0)
    balancer.coefficients(m, torch.tensor([2.0, 10.0]))
    for _ in range(2000):
        found = balancer.coefficients(m, torch.tensor([2.0, 5.0]))  # relative to the first losses: 1 and ½
    lengths = found * m.diagonal().sqrt()
    r = torch.tensor([4 / 3, 2 / 3], dtype=torch.float64)
    # the targets Ḡ r^α need not have the mean Ḡ: where they cannot both be met, one is
    reached = (lengths / lengths.mean() / r**alpha - 1).abs()
    assert reached.min() < 0.02
    assert lengths[0] > lengths[1]


def test_a_loss_that_starts_at_zero_is_neither_ahead_nor_behind():
    balancer = GradNorm()
    for _ in range(3):
        found = balancer.coefficients(_diagonal(1.0, 1.0), torch.tensor([0.0, 1.0]))
    assert found.tolist() == [1.0, 1.0]
    assert balancer.initial == [0.0, 1.0]


def test_equal_norms_are_left_alone_in_spite_of_rounding():
    balancer, norms = GradNorm(), [0.1 * 3, 0.3, 0.1 + 0.2]
    for _ in range(3):
        found = balancer.coefficients(_diagonal(*norms), torch.ones(3))
    assert found.tolist() == pytest.approx([1.0] * 3, abs=1e-12)


def test_an_objective_without_gradient_keeps_its_weight_for_later():
    balancer = GradNorm(lr=0.1)
    balancer.coefficients(_diagonal(3.0, 1.0, 1.0), torch.ones(3))
    kept = balancer.factors[2]
    assert balancer.coefficients(_diagonal(3.0, 1.0, 0.0), torch.ones(3))[2] == 0
    assert balancer.factors[2] == kept
    assert sum(balancer.factors) == pytest.approx(3.0)


def test_bad_options():
    with pytest.raises(ValueError, match=r"alpha must be a number in \[0, 100\], got -1"):
        GradNorm(alpha=-1)
    with pytest.raises(ValueError, match=r"lr must be a number in \(0, 1\], got 2"):
        GradNorm(lr=2)
