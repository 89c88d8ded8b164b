"""From an estimated matrix to one that is a Gramian: unit diagonal, no negative eigenvalue, close to where it was."""

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance.solvers.semidefinite import correlations

sizes = st.integers(1, 8)
seeds = st.integers(0, 10_000)
spreads = st.floats(0.0, 3.0)


def correlation(size, seed):
    """A valid one, singular for every other seed."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((size, max(1, size // 2) if seed % 2 else 2 * size))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    matrix = rows @ rows.T
    np.fill_diagonal(matrix, 1.0)
    return matrix


def spoilt(size, seed, spread):
    """A valid one with errors, such as noise leaves."""
    errors = spread * np.random.default_rng(seed + 1).standard_normal((size, size))
    matrix = correlation(size, seed) + (errors + errors.T) / 2
    np.fill_diagonal(matrix, 1.0)
    return matrix


@settings(max_examples=200, deadline=None)
@given(size=sizes, seed=seeds, spread=spreads)
def test_it_is_a_correlation_matrix(size, seed, spread):
    found = correlations(spoilt(size, seed, spread))
    assert (found.diagonal() == 1).all()
    assert (found == found.T).all()
    assert (abs(found) <= 1).all()
    assert np.linalg.eigvalsh(found)[0] >= -1e-12 * size


@settings(max_examples=100, deadline=None)
@given(size=sizes, seed=seeds)
def test_a_valid_one_is_returned_as_it_is(size, seed):
    matrix = correlation(size, seed).clip(-1, 1)
    assert (correlations(matrix) == matrix).all()


@settings(max_examples=100, deadline=None)
@given(size=sizes, seed=seeds, spread=spreads)
def test_what_it_returns_is_valid(size, seed, spread):
    found = correlations(spoilt(size, seed, spread))
    np.testing.assert_allclose(correlations(found), found, rtol=0, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(size=sizes, seed=seeds, spread=spreads)
def test_the_order_of_the_objectives_means_nothing(size, seed, spread):
    matrix, order = spoilt(size, seed, spread), np.random.default_rng(seed).permutation(size)
    pairs = np.ix_(order, order)
    np.testing.assert_allclose(correlations(matrix[pairs]), correlations(matrix)[pairs], atol=1e-10)


def closest(matrix, *, unit_diagonal):
    """The closest positive semidefinite (or correlation) matrix in the Frobenius norm, by a cone solver."""
    found = cp.Variable(matrix.shape, PSD=True)
    constraints = [cp.diag(found) == 1] if unit_diagonal else []
    cp.Problem(cp.Minimize(cp.norm(found - matrix, "fro")), constraints).solve(solver=cp.CLARABEL)
    return found.value


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_before_it_is_scaled_it_is_the_closest_positive_semidefinite_matrix(size, seed):
    matrix = spoilt(size, seed, 0.6).clip(-1, 1)
    found, expected = correlations(matrix), closest(matrix, unit_diagonal=False)
    lengths = np.sqrt(expected.diagonal())
    np.testing.assert_allclose(found, expected / np.outer(lengths, lengths), atol=1e-4)


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_it_is_about_as_close_as_a_correlation_matrix_can_be(size, spread):
    for seed in range(8):
        matrix = spoilt(size, seed, spread).clip(-1, 1)
        best = np.linalg.norm(closest(matrix, unit_diagonal=True) - matrix)
        assert np.linalg.norm(correlations(matrix) - matrix) <= 1.25 * best + 1e-6


def test_two_objectives_that_seem_more_than_parallel():
    assert correlations(np.array([[1.0, 3.0], [3.0, 1.0]])).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert correlations(np.array([[1.0, -3.0], [-3.0, 1.0]])).tolist() == [[1.0, -1.0], [-1.0, 1.0]]
