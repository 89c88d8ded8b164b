"""Signal gradients: the inner balancer sees g_k − h, the update holds the g_k, the common part gets nothing."""

import math

import numpy as np
import pytest
import torch

from gradbalance import MarbleOptimizer
from gradbalance.balancers import CRMOGM, MGDA, CommonPart, Grouped, Marble, NashMTL
from gradbalance.optimizer import BalancedOptimizer
from tests.gradbalance.gradient_zoo import cosines, gramian
from tests.gradbalance.models import LinearLosses

SIGNALS = np.array([[1.0, 0.0, 0.0, 0.0], [-0.5, 3.0, 0.0, 0.0], [0.0, -0.2, 0.1, 0.0]])
COMMON = np.array([5.0, 4.0, 0.0, 2.0])
GRADIENTS = np.vstack([SIGNALS + COMMON, COMMON])


@pytest.mark.parametrize("inner", ["marble", "mgda", "nash_mtl", "upgrad", "config"])
def test_the_coefficients_are_those_of_the_signal_gradients(inner):
    balancer = CommonPart(inner)
    found = balancer.coefficients(gramian(GRADIENTS))
    assert found[-1] == 0
    np.testing.assert_allclose(found[:-1], balancer.balancer.coefficients(gramian(SIGNALS)), rtol=1e-9)


def test_a_conflict_that_the_common_part_hides():
    """All g_k have nearly one direction, and their sum goes against the first signal."""
    signals = np.array([[1.0, 0.0], [-0.9, 0.3], [-0.9, 0.4]])
    common = np.array([0.0, 30.0])
    rows = signals + common
    assert cosines(np.ones(3), rows).min() > 0.99
    assert cosines(np.ones(3), signals).min() < -0.5
    found = CommonPart().coefficients(gramian(np.vstack([rows, common])))[:-1]
    assert cosines(found, signals).min() > 0.1
    assert cosines(Marble().coefficients(gramian(rows)), signals).min() < 0


def test_without_a_common_part_it_is_the_inner_balancer():
    rows = np.vstack([SIGNALS, np.zeros(4)])
    np.testing.assert_allclose(
        CommonPart().coefficients(gramian(rows))[:-1], Marble().coefficients(gramian(SIGNALS)), rtol=1e-12
    )


def test_an_absent_objective_is_not_minus_the_common_part():
    rows = GRADIENTS.copy()
    rows[1] = 0.0
    losses = torch.tensor([1.0, math.nan, 1.0, 1.0])
    found = CommonPart().coefficients(gramian(rows), losses)
    assert found[1] == 0
    np.testing.assert_allclose(found[[0, 2]], Marble().coefficients(gramian(SIGNALS[[0, 2]])), rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e7])
def test_an_objective_that_is_nothing_but_the_common_part_gets_nothing(scale):
    rows = np.vstack([SIGNALS[:1] + COMMON, COMMON, COMMON]) * (0.1 * scale)
    weights = CommonPart().weights(gramian(rows))
    assert weights.tolist() == [1.0, 0.0, 0.0]
    assert CommonPart().coefficients(gramian(rows))[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("factor", [1e-14, 1.0, 1e14])
def test_the_scale_of_all_losses_changes_nothing(factor):
    np.testing.assert_allclose(
        CommonPart().coefficients(factor * gramian(GRADIENTS)), CommonPart().coefficients(gramian(GRADIENTS)), rtol=1e-9
    )


def test_losses_and_signal_are_handed_on_without_the_common_part():
    seen = []

    class Watching(Marble):
        def weights(self, gramian, losses=None, signal=None):
            seen.append((gramian, losses, signal))
            return super().weights(gramian, losses, signal)

    CommonPart(Watching()).coefficients(gramian(GRADIENTS), torch.arange(4.0), 2 * gramian(GRADIENTS))
    ((given, losses, signal),) = seen
    torch.testing.assert_close(given, gramian(SIGNALS))
    assert losses.tolist() == [0.0, 1.0, 2.0]
    torch.testing.assert_close(signal, 2 * gramian(SIGNALS))


def test_options_of_the_inner_balancer_leave_the_common_part_out():
    assert CommonPart(Marble([1, 2, 3])).coefficients(gramian(GRADIENTS))[-1] == 0
    with pytest.raises(ValueError, match="preference has 4 values, but there are 3 objectives"):
        CommonPart(Marble([1, 2, 3, 4])).coefficients(gramian(GRADIENTS))


def test_wraps_wrappers_and_keeps_their_state():
    balancer = CommonPart(CRMOGM(Grouped(Marble(), [[0, 1], [2]]), decay=0.5))
    balancer.coefficients(gramian(GRADIENTS))
    assert set(balancer.state_dict()) == {"balancer.average", "balancer.seen"}
    assert balancer.simplex
    assert not CommonPart(NashMTL()).simplex


def test_in_the_optimizer_the_update_is_that_of_the_signals_and_holds_the_common_part_once_weighted():
    problem = LinearLosses(GRADIENTS)
    optimizer = BalancedOptimizer(torch.optim.SGD([problem.x], lr=1.0), CommonPart(MGDA()), refresh_every=2)
    expected = MGDA().coefficients(gramian(SIGNALS)).numpy() @ GRADIENTS[:-1]
    for _ in range(4):  # refreshes and amortised steps
        optimizer.zero_grad()
        optimizer.backward(problem.losses())
        np.testing.assert_allclose(problem.x.grad, expected, rtol=1e-9)
        optimizer.step()
    assert optimizer.coefficients[-1] == 0


def test_averaged_weights_are_scaled_by_the_signals_norms():
    """Three orthogonal signals of any length have α = ⅓ each, averaged or not."""
    problem = LinearLosses(np.vstack([np.diag([1.0, 10.0, 100.0]) + 7.0, np.full(3, 7.0)]))
    inner = torch.optim.SGD([problem.x], lr=1.0)
    optimizer = BalancedOptimizer(inner, CommonPart(), ema_decay=0.7)
    optimizer.backward(problem.losses())
    torch.testing.assert_close(optimizer.coefficients, torch.tensor([37.0, 3.7, 0.37, 0.0], dtype=torch.float64) / 3)
    plain = MarbleOptimizer(torch.optim.SGD([problem.x], lr=1.0))
    plain.backward(problem.losses()[:-1])
    assert (plain.coefficients / optimizer.coefficients[:-1]).std() > 0.1  # the common part hides the lengths
