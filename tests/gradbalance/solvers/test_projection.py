"""Projection onto the simplex, against its optimality conditions and a general solver."""

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance.solvers.projection import onto_simplex


@pytest.mark.parametrize(
    ("point", "nearest"),
    [
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
        ([1.0, 1.0], [0.5, 0.5]),
        ([3.0, 0.0, -1.0], [1.0, 0.0, 0.0]),
        ([0.9, 0.5, -0.2], [0.7, 0.3, 0.0]),
        ([-7.0], [1.0]),
    ],
)
def test_by_hand(point, nearest):
    np.testing.assert_allclose(onto_simplex(np.array(point)), nearest, atol=1e-15)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 32), st.integers(-3, 14))
def test_optimality_conditions(seed, size, exponent):
    """v − w is one number θ where w > 0 and at most θ elsewhere, whatever the size of the numbers."""
    v = 10.0**exponent * np.random.default_rng(seed).standard_normal(size)
    w = onto_simplex(v)
    assert (w >= 0).all()
    assert w.sum() == pytest.approx(1, abs=1e-14)
    difference = v - w
    theta = difference[w > 0]
    scale = max(1.0, np.abs(v).max())
    assert np.ptp(theta) <= 1e-13 * scale
    assert difference.max() <= theta.max() + 1e-13 * scale


def test_same_as_a_general_solver():
    for seed in range(10):
        v = np.random.default_rng(seed).standard_normal(8)
        w = cp.Variable(8, nonneg=True)
        problem = cp.Problem(cp.Minimize(cp.sum_squares(w - v)), [cp.sum(w) == 1])
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13)
        np.testing.assert_allclose(onto_simplex(v), w.value, atol=1e-6)


def test_the_argument_is_left_as_it_is():
    v = np.array([3.0, 1.0, 2.0])
    onto_simplex(v)
    assert v.tolist() == [3.0, 1.0, 2.0]
