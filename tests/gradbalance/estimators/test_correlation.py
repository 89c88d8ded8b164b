"""The diagonal of an estimated Gramian, and its correlations under another one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance.estimators.correlation import floored, with_norms

sizes = st.integers(1, 8)
seeds = st.integers(0, 10_000)


def test_the_diagonal_is_floored_relative_to_the_noisy_one_and_capped_by_it():
    noisy = np.array([1.0, 1e14, 1e-14, 4.0])
    found = floored(np.array([-3.0, 1e10, 0.5e-14, 5.0]), noisy, 0.05)
    assert found.tolist() == [0.05, 0.05 * 1e14, 0.5e-14, 4.0]


@settings(max_examples=100, deadline=None)
@given(size=sizes, seed=seeds, exponent=st.integers(-7, 7))
def test_a_gramian_keeps_its_correlations_under_a_new_diagonal(size, seed, exponent):
    rng = np.random.default_rng(seed)
    rows = 10.0**exponent * np.exp(2 * rng.standard_normal((size, 1))) * rng.standard_normal((size, 2 * size))
    matrix = rows @ rows.T
    squares = matrix.diagonal() * np.exp(rng.standard_normal(size)).clip(min=1)
    found = with_norms(matrix, squares)
    assert (found.diagonal() == squares).all()
    off = ~np.eye(size, dtype=bool)
    np.testing.assert_allclose(found[off], matrix[off], rtol=1e-12)
