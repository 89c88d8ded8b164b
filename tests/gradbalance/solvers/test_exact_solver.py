"""The exact solver from inside: both linear algebras give one answer, and rounding cannot make it run for ever."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradbalance.solvers import exact
from tests.gradbalance.gradient_zoo import FAMILIES, WELL_POSED, unit, zoo


def _problem(gradients, seed):
    gradients = unit(gradients)
    c = 10.0 ** np.random.default_rng(seed).uniform(-3, 0, len(gradients))
    return gradients @ gradients.T, c / c.max()


@settings(max_examples=100, deadline=None)
@given(zoo(families=WELL_POSED, min_k=3), st.integers(0, 1000))
def test_both_linear_algebras_agree(gradients, seed):
    m, c = _problem(gradients, seed)
    fast = exact._well_conditioned(m, c)
    assume(fast is not None)
    np.testing.assert_allclose(fast, exact._degenerate(m, c), atol=1e-9)


@pytest.mark.parametrize("family", WELL_POSED[:2])
def test_the_fast_path_is_the_usual_one(family):
    rng = np.random.default_rng(0)
    for k in (3, 5, 16, 32):
        gradients = unit(FAMILIES[family](rng, k))
        assert exact._well_conditioned(gradients @ gradients.T, np.ones(k)) is not None


@settings(max_examples=200, deadline=None)
@given(zoo(min_k=3))
def test_an_ambiguous_answer_is_never_taken_from_the_fast_path(gradients):
    """Two equal rows that can both take part have no unique weights."""
    gradients = unit(np.vstack([gradients, gradients[:1]]))
    m = gradients @ gradients.T
    y = exact._well_conditioned(m, np.ones(len(m)))
    assert y is None or y[0] == y[-1] == 0


@settings(max_examples=200, deadline=None)
@given(zoo(min_k=1), st.integers(0, 1000))
def test_conditions_of_the_standard_form(gradients, seed):
    m, c = _problem(gradients, seed)
    beta = exact.solve(m, c)
    assert beta.min() >= 0
    assert c @ beta == pytest.approx(1, abs=1e-12)
    slack = m @ beta - (beta @ m @ beta) * c
    assert np.abs(np.minimum(beta, slack)).max() < 1e-8 * max(1.0, beta.sum())


def test_a_linear_algebra_that_lies_cannot_trap_the_active_set():
    """Solutions drawn at random, signs included: it stops, with a point that is not negative."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        y, _, _ = exact.active_set(lambda rows: rng.standard_normal(len(rows)) + 0.5, lambda y: -np.ones(6), 6)
        assert y.min() >= 0
        assert np.isfinite(y).all()


def test_more_vectors_than_dimensions():
    """64 vectors in the plane around the origin: the answer is the origin."""
    angles = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    gradients = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    beta = exact.solve(gradients @ gradients.T, np.ones(64))
    np.testing.assert_allclose(beta, np.full(64, 1 / 64), atol=1e-12)  # the least-norm one, by symmetry


@pytest.mark.parametrize("distance", [1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9])
def test_nearly_dependent_gradients(distance):
    """Distances at which the Gramian's small eigenvalues are above, about and below the ridge, and below rounding."""
    rng = np.random.default_rng(0)
    for k in (3, 4, 5, 8) * 10:
        copies = rng.standard_normal((2, 40))[rng.integers(0, 2, k)]
        gradients = unit(copies + distance * rng.standard_normal((k, 40)))
        m = gradients @ gradients.T
        beta = exact.solve(m, np.ones(k))
        assert np.abs(np.minimum(beta, m @ beta - beta @ m @ beta)).max() < 1e-12


def test_the_fast_path_keeps_all_digits_of_an_ill_conditioned_problem():
    rng = np.random.default_rng(0)
    for k in (3, 5, 16):
        gradients = unit(rng.standard_normal(60) + 1e-3 * rng.standard_normal((k, 60)))  # H has condition 1e6
        y = exact._well_conditioned(gradients @ gradients.T, np.ones(k))
        assert y is not None
        assert np.abs(np.minimum(y, gradients @ (gradients.T @ y) + y.sum() - 1)).max() < 1e-14


def test_an_entry_that_leaves_as_it_enters_ends_the_search():
    calls = []

    def solve_rows(rows):
        calls.append(rows)
        return np.where(rows == 2, -1.0, 1.0)  # the third never stays in

    y, _, free = exact.active_set(solve_rows, lambda y: np.array([0.0, 0.0, -1.0]), 3)
    assert y.tolist() == [1.0, 1.0, 0.0]
    assert free.tolist() == [True, True, True]
    assert len(calls) == 3
