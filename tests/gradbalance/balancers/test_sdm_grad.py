"""SDMGrad's goal and options; what it shares with others of its kind is in test_simplex_descent."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torchjd.aggregation import SDMGradWeighting

from benchmarks.agreement.projecting import PAIRS
from gradbalance.balancers import SDMGrad
from gradbalance.solvers import min_norm
from tests.gradbalance.gradient_zoo import gramian, zoo


def test_one_step_by_hand():
    """w = (½, ½) + r p = (¾, ¾); M / tr M = diag(¼, ¾); then (w + r p) / (1 + r)."""
    balancer = SDMGrad(regularization=0.5, gamma=1.0, steps=1)
    w = np.array([0.5 - 0.75 / 4, 0.5 - 0.75 * 3 / 4])
    w += (1 - w.sum()) / 2
    np.testing.assert_allclose(balancer.coefficients(torch.diag(torch.tensor([1.0, 3.0]))), (w + 0.25) / 1.5)
    np.testing.assert_allclose(balancer.shares, w)


def test_momentum_carries_the_steps_on():
    m = torch.diag(torch.tensor([1.0, 3.0]))
    short, long = (SDMGrad(gamma=0.1, momentum=mu, steps=3).coefficients(m) for mu in (0.0, 0.5))
    assert long[0] > short[0] > 0.5


@settings(max_examples=20, deadline=None)
@given(zoo(families=("many parameters",), max_k=16))
def test_the_goal_is_the_min_norm_point_with_a_floor(gradients):
    m = gramian(gradients)
    balancer = SDMGrad(regularization=0.25, steps=400)
    expected = min_norm(m, floor=0.2 / len(m))
    torch.testing.assert_close(balancer.coefficients(m), expected, atol=1e-8, rtol=0)


def test_preference_is_a_floor_of_its_own():
    m = torch.diag(torch.tensor([1.0, 1e6]))
    found = SDMGrad(regularization=1.0, preference=[1, 3], steps=100).coefficients(m)
    np.testing.assert_allclose(found, [1 - 0.375, 0.375], atol=1e-6)


def test_much_regularization_is_the_preference():
    m = torch.diag(torch.tensor([1.0, 1e6]))
    np.testing.assert_allclose(SDMGrad(regularization=1e9, preference=[1, 3]).coefficients(m), [0.25, 0.75], atol=1e-8)


def test_same_as_torchjd_with_steps_that_converge():
    assert PAIRS["sdm_grad", "torchjd"]() <= 1e-10


def test_the_published_step_size_does_not_settle():
    """Why the default is another one: on one and the same Gramian the update stays far longer than it need be."""
    m = gramian(np.random.default_rng(0).standard_normal((5, 200)))
    own, other = SDMGrad(), SDMGradWeighting()
    for _ in range(20):
        found, published = own.coefficients(m), other(m)
    goal = min_norm(m, floor=0.3 / 1.3 / 5)
    assert found @ m @ found == pytest.approx((goal @ m @ goal).item())
    assert published @ m @ published > 1.5 * (goal @ m @ goal)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("regularization", -1, r"regularization must be a number in \[0, ∞\), got -1"),
        ("momentum", 1.0, r"momentum must be a number in \[0, 1\), got 1\.0"),
        ("steps", 0, "steps must be an integer ≥ 1, got 0"),
        ("preference", [1, math.nan], "preference must hold one finite number > 0 per objective"),
    ],
)
def test_bad_options(option, value, message):
    with pytest.raises(ValueError, match=message):
        SDMGrad(**{option: value})
