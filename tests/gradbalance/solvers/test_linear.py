"""Linear programs over the simplex: known answers, and scipy's HiGHS as an oracle."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from gradbalance.solvers import linear


def test_without_constraints_it_is_the_best_corner():
    np.testing.assert_array_equal(linear.maximise(np.array([1.0, 3.0, 2.0]), np.empty((0, 3)), np.empty(0)), [0, 1, 0])


def test_a_constraint_is_met_with_equality():
    """max α_2 with α_1 ≥ 0.3."""
    found = linear.maximise(np.array([0.0, 1.0]), np.array([[1.0, 0.0]]), np.array([0.3]))
    np.testing.assert_allclose(found, [0.3, 0.7])


def test_no_feasible_point():
    assert linear.maximise(np.array([0.0, 1.0]), np.array([[1.0, 1.0]]), np.array([2.0])) is None


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(0, 20), st.booleans())
def test_scipy(seed, size, count, ties):
    rng = np.random.default_rng(seed)
    f, a, b = rng.standard_normal(size), rng.standard_normal((count, size)), 0.3 * rng.standard_normal(count) - 0.3
    if ties:  # many corners with the same value, many constraints through the same corner
        f, a, b = np.round(f), np.round(a), np.zeros(count)
    found = linear.maximise(f, a, b)
    expected = linprog(-f, -a if count else None, -b if count else None, np.ones((1, size)), [1.0], method="highs")
    if expected.status == 2:
        assert found is None
        return
    assert found.min() >= 0
    np.testing.assert_allclose(found.sum(), 1)
    assert (a @ found >= b - 1e-9).all()
    np.testing.assert_allclose(f @ found, -expected.fun, atol=1e-7)
