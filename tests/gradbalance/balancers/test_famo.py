"""FAMO: the weights of one call, what is learned from the next, and the equal rates it is made for."""

import math

import numpy as np
import pytest
import torch

from gradbalance.balancers import FAMO


def _run(balancer, *history):
    """λ of every call."""
    return [balancer.coefficients(torch.eye(2), torch.tensor(losses)).tolist() for losses in history]


def test_at_first_inverse_to_the_losses():
    assert _run(FAMO(), [1.0, 3.0]) == [pytest.approx([0.75, 0.25])]
    assert _run(FAMO(min_losses=[0.0, 2.0]), [1.0, 3.0]) == [pytest.approx([0.5, 0.5])]


def test_the_first_step_of_the_logits_has_the_length_lr():
    """As Adam's always has; the first objective improved and loses weight."""
    balancer = FAMO(lr=0.1)
    _run(balancer, [2.0, 1.0], [1.0, 1.0])
    assert balancer.logits == pytest.approx([-0.1, 0.1], rel=1e-6)


def test_the_second_step_by_hand():
    balancer = FAMO(gamma=0.0, lr=0.1)
    _run(balancer, [2.0, 1.0], [1.0, 1.0], [1.0, 0.5])
    z = 1 / (1 + math.exp(0.2))  # softmax of (−.1, .1)
    first, second = 0.25 * math.log(2), -z * (1 - z) * math.log(2)  # z_1 (δ_1 − z·δ)
    mean = (0.9 * 0.1 * first + 0.1 * second) / (1 - 0.9**2)
    square = (0.999 * 0.001 * first**2 + 0.001 * second**2) / (1 - 0.999**2)
    assert balancer.logits[0] == pytest.approx(-0.1 - 0.1 * mean / math.sqrt(square), rel=1e-6)


def test_gamma_draws_the_logits_back():
    still = [[1.0, 1.0]] * 300
    free, drawn = FAMO(gamma=0.0), FAMO(gamma=0.1)
    for balancer in (free, drawn):
        _run(balancer, [2.0, 1.0], *still)
    assert abs(drawn.logits[0]) < 0.1 * abs(free.logits[0])


def test_all_losses_fall_at_one_relative_rate():
    """Losses c x² in separate parameters, curvatures 1 to 100: the plain mean is 60 times faster in one."""
    curvature = np.array([1.0, 10.0, 100.0])

    def rates(balancer, steps=3000, lr=1e-4):
        x, logs = np.ones(3), []
        for _ in range(steps):
            losses = curvature * x**2
            logs.append(np.log(losses))
            weights = np.full(3, 1 / 3)
            if balancer:
                weights = balancer.coefficients(torch.eye(3), torch.from_numpy(losses)).numpy()
            x = x - lr * weights * 2 * curvature * x
        return logs[-500] - logs[-1]

    plain, famo = rates(None), rates(FAMO(gamma=0.0))
    assert plain.max() / plain.min() > 50
    assert famo.max() / famo.min() < 1.1


def test_a_loss_at_its_bound_has_nothing_to_gain():
    balancer = FAMO()
    assert _run(balancer, [2.0, 1.0], [0.0, 1.0], [1.0, 1.0])[1] == [0.0, 1.0]
    assert balancer.previous == [1.0, 1.0]


def test_a_loss_below_its_bound():
    with pytest.raises(ValueError, match=r"FAMO: losses − min_losses must be ≥ 0, got -1\.0 for objective 0"):
        FAMO(min_losses=[2.0, 0.0]).coefficients(torch.eye(2), torch.ones(2))


def test_an_absent_objective_is_compared_with_its_own_last_loss():
    nan = math.nan
    gap, none = FAMO(), FAMO()
    _run(gap, [2.0, 1.0], [nan, 1.0], [1.0, 1.0])
    _run(none, [2.0, 1.0], [1.0, 1.0])
    assert gap.logits[0] == pytest.approx(none.logits[0])


def test_bad_options():
    with pytest.raises(ValueError, match=r"gamma must be a number in \[0, ∞\), got -1"):
        FAMO(gamma=-1)
    with pytest.raises(ValueError, match=r"lr must be a number in \(0, ∞\), got 0"):
        FAMO(lr=0)
    with pytest.raises(ValueError, match="min_losses has 1 values, but there are 2 objectives"):
        FAMO(min_losses=[0.0]).coefficients(torch.eye(2), torch.ones(2))
