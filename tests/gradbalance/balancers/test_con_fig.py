"""ConFIG: equal cosines, the length, and dependent gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.agreement.projecting import PAIRS
from gradbalance.balancers import ConFIG, Marble
from tests.gradbalance.gradient_zoo import WELL_POSED, cosines, gramian, zoo


def test_orthogonal_gradients():
    """û = (1, 1) / √2 and ℓ = (3 + 5) / √2: d = (4, 4)."""
    gradients = np.diag([3.0, 5.0])
    np.testing.assert_allclose(ConFIG().coefficients(gramian(gradients)).numpy() @ gradients, [4, 4])


def test_preference_by_hand():
    """û = (2, 1) / √5 and ℓ = (2 · 3 + 5) / √5."""
    gradients = np.diag([3.0, 5.0])
    found = ConFIG([2, 1]).coefficients(gramian(gradients)).numpy() @ gradients
    np.testing.assert_allclose(found, [22 / 5, 11 / 5])


@settings(max_examples=100, deadline=None)
@given(zoo(families=WELL_POSED, max_k=16, spread=3), st.integers(0, 1000))
def test_cosines_are_in_the_ratio_of_the_preference(gradients, seed):
    preference = np.random.default_rng(seed).uniform(0.5, 2, len(gradients))
    found = cosines(ConFIG(preference.tolist()).coefficients(gramian(gradients)), gradients) / preference
    np.testing.assert_allclose(found, found[0], rtol=1e-6)
    assert found[0] > 0


@settings(max_examples=50, deadline=None)
@given(zoo(families=WELL_POSED, max_k=16))
def test_the_length_is_the_sum_of_the_projections(gradients):
    update = ConFIG().coefficients(gramian(gradients)).numpy() @ gradients
    length = np.linalg.norm(update)
    assert (gradients @ update).sum() / length == pytest.approx(length)


@pytest.mark.parametrize("oracle", ["torchjd", "conflictfree"])
def test_same_as_others(oracle):
    assert PAIRS["config", oracle]() <= 1e-12


def test_where_no_objective_would_leave_marble_has_the_same_direction():
    """If the min-norm point of the unit gradients weighs all, its inner products are equal too."""
    gradients = np.diag([1.0, 2.0, 3.0]) + 0.1
    own, other = (b.coefficients(gramian(gradients)).numpy() @ gradients for b in (ConFIG(), Marble()))
    np.testing.assert_allclose(own / np.linalg.norm(own), other / np.linalg.norm(other))


@pytest.mark.parametrize("factor", [1.0, 2.0, 1e3])
def test_opposite_gradients_give_no_update(factor):
    assert ConFIG().coefficients(gramian([[0.3, 0.1], [-0.3 * factor, -0.1 * factor]])).tolist() == [0.0, 0.0]


def test_dependent_gradients_may_conflict():
    """Three against one: no direction suits all, the one nearest in least squares is that of the three."""
    gradients = np.array([[1.0, 0.0], [1.0, 0.2], [1.0, -0.2], [-1.0, 0.0]])
    np.testing.assert_allclose(cosines(ConFIG().coefficients(gramian(gradients)), gradients)[[0, 3]], [1, -1])


@pytest.mark.parametrize("preference", [[1.0, 0.0], [1.0, -1.0], [math.nan, 1.0], []])
def test_bad_preference(preference):
    with pytest.raises(ValueError, match="preference must hold one finite number > 0 per objective, got"):
        ConFIG(preference)


def test_preference_of_another_length():
    with pytest.raises(ValueError, match="preference has 2 values, but there are 3 objectives"):
        ConFIG([1, 2]).coefficients(torch.eye(3))
