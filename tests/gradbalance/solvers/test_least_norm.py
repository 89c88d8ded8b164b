"""The least-norm solution, well-conditioned and singular, against the pseudo-inverse of the gradients."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance.solvers.least_norm import least_norm
from tests.gradbalance.gradient_zoo import FAMILIES, unit, zoo


@settings(max_examples=100, deadline=None)
@given(zoo(families=tuple(f for f in FAMILIES if f != "nearly duplicated")), st.integers(0, 1000))
def test_same_direction_as_the_pseudo_inverse_of_the_gradients(gradients, seed):
    """Ĝᵀ M̂⁺ t = Ĝ⁺ t; taking the inverse of Ĝ itself keeps twice the digits."""
    gradients = unit(gradients)
    gradients = gradients[np.abs(gradients).sum(1) > 0]
    if len(gradients) == 0:
        return
    target = np.random.default_rng(seed).uniform(0.5, 2, len(gradients))
    found = least_norm(gradients @ gradients.T, target) @ gradients
    np.testing.assert_allclose(found, np.linalg.pinv(gradients, rcond=1e-6) @ target, atol=1e-6, rtol=1e-6)


def test_least_norm_of_many_solutions():
    np.testing.assert_allclose(least_norm(np.ones((3, 3)), np.ones(3)), [1 / 3] * 3)


@pytest.mark.parametrize("noise", [0.0, 1e-16, -1e-16])
def test_no_solution(noise):
    """Two opposite vectors; (1, 1) is orthogonal to all that they can give."""
    found = least_norm(np.array([[1.0, noise - 1.0], [noise - 1.0, 1.0]]), np.ones(2))
    np.testing.assert_allclose(found, 0, atol=1e-15)
