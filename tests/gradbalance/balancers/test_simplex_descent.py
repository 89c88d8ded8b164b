"""What MoCo, MoDo and SDMGrad share: where they go, the scale of the step, the signal, objectives that come and go."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from gradbalance.balancers import MGDA, MoCo, MoDo, SDMGrad
from tests.gradbalance.gradient_zoo import WELL_POSED, gramian, unit, zoo

METHODS = {"moco": MoCo, "modo": MoDo, "sdm_grad": SDMGrad}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def _go(balancer, m, calls, signal=None):
    for _ in range(calls):
        found = balancer.coefficients(m, signal=signal)
    return found


def _steady(method):
    """With MGDA's point for its goal."""
    return SDMGrad(regularization=0.0, steps=50) if method is SDMGrad else method(gamma=1.0)


@each
def test_goes_to_the_min_norm_point(method):
    for seed in range(5):
        m = gramian(np.random.default_rng(seed).standard_normal((5, 30)))
        torch.testing.assert_close(_go(_steady(method), m, 300), MGDA().coefficients(m), atol=1e-7, rtol=0)


@each
@settings(max_examples=20, deadline=None)
@given(zoo(families=WELL_POSED, spread=1))
def test_no_step_makes_the_update_longer(method, gradients):
    """A step with γ ≤ 1, relative to the trace, is short enough; with no momentum and no noise."""
    m = gramian(unit(gradients))
    options = {"regularization": 0.0, "momentum": 0.0, "steps": 1} if method is SDMGrad else {}
    balancer = method(gamma=1.0, **options)
    last = m.mean()
    for _ in range(10):
        found = balancer.coefficients(m)
        assert found @ m @ found <= last * (1 + 1e-12)
        last = found @ m @ found


@each
@pytest.mark.parametrize("factor", [1e-7, 1e7])
def test_the_scale_of_the_losses_changes_nothing(method, factor):
    m = gramian(np.random.default_rng(0).standard_normal((4, 6)))
    torch.testing.assert_close(_go(method(), m * factor**2, 5), _go(method(), m, 5))


@each
def test_the_published_step_depends_on_it(method):
    """Too short to move anything, or a jump to the corner of the shortest gradient."""
    m = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    balancers = [method(normalize=False) for _ in range(2)]
    if method is SDMGrad:
        balancers = [SDMGrad(regularization=0.0, steps=1, normalize=False) for _ in range(2)]
    np.testing.assert_allclose(balancers[0].coefficients(m * 1e-14), [1 / 3] * 3, atol=1e-9)
    assert balancers[1].coefficients(m * 1e14).tolist() == [1.0, 0.0, 0.0]


@each
def test_the_signal_decides_where_it_is_given(method):
    """The second objective's gradient is mostly noise: its length counts without a signal, not with one."""
    noisy, signal = torch.diag(torch.tensor([1.0, 100.0])), torch.diag(torch.tensor([1.0, 1.0]))
    assert _go(method(), noisy, 100)[1] < 0.2
    np.testing.assert_allclose(_go(method(), noisy, 100, signal), [0.5, 0.5], atol=1e-12)


@each
def test_a_signal_need_not_be_positive(method):
    """An unbiased estimate may have a negative square norm."""
    found = _go(method(), torch.eye(2), 5, torch.tensor([[-0.1, 0.0], [0.0, 1.0]]))
    assert found[0] > 0.5
    assert found.sum() == pytest.approx(1)


@each
def test_an_absent_objective_keeps_its_share(method):
    m = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    balancer = method()
    balancer.coefficients(m)
    before = balancer.shares
    absent = m.clone()
    absent[1, 1] = 0
    found = _go(balancer, absent, 200)
    assert found[1] == 0
    assert found.sum() == pytest.approx(1)
    assert balancer.shares[1] == before[1]
    assert sum(balancer.shares) == pytest.approx(1)


@each
def test_those_left_by_an_objective_that_had_everything_start_evenly(method):
    balancer = method()
    balancer.coefficients(torch.eye(3))
    balancer.load_state_dict({**balancer.state_dict(), "shares": [1.0, 0.0, 0.0]})
    np.testing.assert_allclose(balancer.coefficients(torch.diag(torch.tensor([0.0, 1.0, 1.0]))), [0, 0.5, 0.5])


@each
def test_averaged_weights_of_an_objective_without_gradient_give_nothing(method):
    weights = torch.tensor([0.25, 0.75])
    assert method().scale(weights, torch.diag(torch.tensor([1.0, 0.0]))).tolist() == [0.25, 0.0]


@each
def test_another_number_of_objectives_later(method):
    balancer = method()
    balancer.coefficients(torch.eye(2))
    with pytest.raises(ValueError, match="shares has 2 values, but there are 3 objectives"):
        balancer.coefficients(torch.eye(3))


@each
@pytest.mark.parametrize("gamma", [0, -1.0, math.inf, math.nan])
def test_bad_gamma(method, gamma):
    with pytest.raises(ValueError, match=r"gamma must be a number in \(0, ∞\), got"):
        method(gamma=gamma)


@each
@pytest.mark.parametrize("normalize", ["trace", None, 1])
def test_bad_normalize(method, normalize):
    with pytest.raises(ValueError, match="normalize must be True or False, got"):
        method(normalize=normalize)
