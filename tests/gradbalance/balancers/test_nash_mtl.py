"""Nash-MTL: the equation it solves, the bargain it stands for, and the cases without one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from benchmarks.agreement.solving import PAIRS
from gradbalance.balancers import NashMTL
from tests.gradbalance.gradient_zoo import WELL_POSED, gramian, zoo


def _update(gradients, **options):
    return NashMTL(**options).coefficients(gramian(gradients)).numpy() @ gradients


def test_orthogonal_gradients_get_the_inverse_of_their_norms():
    np.testing.assert_allclose(NashMTL().coefficients(gramian(np.diag([1.0, 10.0, 0.1]))), [1.0, 0.1, 10.0])


def test_two_unit_gradients_with_a_given_cosine():
    """By symmetry λ_1 = λ_2 = x with x (1 + cos) = 1 / x."""
    m = torch.tensor([[1.0, -0.5], [-0.5, 1.0]])
    np.testing.assert_allclose(NashMTL().coefficients(m), [math.sqrt(2)] * 2, rtol=1e-12)


@settings(max_examples=100, deadline=None)
@given(zoo(families=WELL_POSED, spread=3))
def test_every_objective_contributes_the_same(gradients):
    coefficients = NashMTL().coefficients(gramian(gradients)).numpy()
    update = coefficients @ gradients
    np.testing.assert_allclose(coefficients * (gradients @ update), 1.0, rtol=1e-9)
    assert np.linalg.norm(update) == pytest.approx(math.sqrt(len(gradients)))


def test_no_other_update_of_the_same_length_has_a_larger_product_of_progresses():
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((4, 6))
    update = _update(gradients)
    best = np.log(gradients @ update).sum()
    for _ in range(1000):
        other = update + 0.1 * rng.standard_normal(6)
        progress = gradients @ (other * np.linalg.norm(update) / np.linalg.norm(other))
        assert progress.min() <= 0 or np.log(progress).sum() < best


def test_the_length_does_not_follow_the_gradients():
    gradients = np.random.default_rng(0).standard_normal((3, 5))
    assert np.linalg.norm(_update(1e-6 * gradients)) == pytest.approx(math.sqrt(3))


@pytest.mark.parametrize(("max_norm", "length"), [(0.5, 0.5), (1.0, 1.0), (2.0, math.sqrt(3))])
def test_max_norm_shortens_longer_updates(max_norm, length):
    gradients = np.random.default_rng(0).standard_normal((3, 5))
    assert np.linalg.norm(_update(gradients, max_norm=max_norm)) == pytest.approx(length)


def test_opposite_gradients_leave_nothing_to_bargain_for():
    m = torch.tensor([[4.0, -2.0], [-2.0, 1.0]])
    np.testing.assert_allclose(NashMTL().coefficients(m), math.sqrt(2) * np.array([0.5 / 2, 0.5]))


@pytest.mark.parametrize("angle", [1e-2, 1e-4, 1e-6])
def test_nearly_opposite_gradients_have_a_bargain(angle):
    gradients = np.array([[1.0, 0.0], [-math.cos(angle), math.sin(angle)]])
    update = _update(gradients)
    assert np.linalg.norm(update) == pytest.approx(math.sqrt(2), rel=1e-3)
    assert (gradients @ update).min() > 0


@pytest.mark.parametrize("value", [0, -1.0, math.inf, "1", True])
def test_a_bad_max_norm(value):
    with pytest.raises(ValueError, match=r"max_norm must be a number in \(0, ∞\), got"):
        NashMTL(max_norm=value)


def test_agrees_with_cvxpy():
    """Not with torchjd's version: it needs ecos, and the loop it follows stops at a residual of 1e-3."""
    assert PAIRS["nash_mtl", "cvxpy"]() < 1e-6
