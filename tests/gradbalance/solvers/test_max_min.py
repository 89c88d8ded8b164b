"""The cheapest progress for all: both ways agree, the conditions hold, and the fast one answers only what it proves."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from gradbalance.solvers import exact, max_min
from gradbalance.solvers.semidefinite import correlations, positive_part
from tests.gradbalance.gradient_zoo import unit, zoo


@st.composite
def problems(draw, families):
    """N, A = ÛR and w, with a point that serves all."""
    signals = unit(draw(zoo(families=families, max_k=12)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    k = len(signals)
    noise = rng.standard_normal((k, 2 * k + 3)) * 10.0 ** rng.uniform(-1, 1, (k, 1)) / math.sqrt(2 * k + 3)
    n = signals @ signals.T + noise @ noise.T
    norms = np.sqrt(n.diagonal())
    w = rng.uniform(0.3, 3, k)
    mu = exact.solve(signals @ signals.T, w / w.max())
    return n / np.outer(norms, norms), signals @ signals.T / norms, w, mu * norms


def violation(n, a, w, x):
    """How far Nx is from the cone that the conditions ask for, relative to its length."""
    x = x * (w / (a @ x)).max()
    held, zero = a @ x - w <= 1e-9 * w.max(), x <= 1e-12 * x.max()
    cone = np.hstack([a[held].T, np.eye(len(x))[:, zero]])
    return nnls(cone, n @ x)[1] / np.linalg.norm(n @ x)


@settings(max_examples=200, deadline=None)
@given(problems(("many parameters", "shared direction", "clusters", "duplicated, shared direction")))
def test_the_conditions_hold_both_ways(problem):
    n, a, w, start = problem
    slow = max_min.descend(n, a, w, start)
    assert slow.min() >= 0
    assert violation(n, a, w, slow) < 1e-9
    fast = max_min.pivot(n, a, w)
    if fast is not None:
        assert fast.min() >= 0
        assert violation(n, a, w, fast) < 1e-9
        np.testing.assert_allclose(fast / fast.max(), slow / slow.max(), atol=1e-8)


def test_the_fast_way_is_the_rule():
    """Of 200 problems with signals in a third of the norm, K = 5."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(200):
        signals, noise = rng.standard_normal((5, 100)), 3 * rng.standard_normal((5, 100))
        u = signals @ signals.T
        n = u + noise @ noise.T
        norms, lengths = np.sqrt(n.diagonal()), np.sqrt(u.diagonal())
        found += max_min.pivot(n / np.outer(norms, norms), u / np.outer(lengths, norms), np.ones(5)) is not None
    assert found > 190


def test_the_fast_way_leaves_what_it_cannot_decide():
    """Two objectives with one signal: only one of the constraints is needed, and which is anyone's guess."""
    assert max_min.pivot(np.diag([1.0, 2.0]), np.ones((2, 2)), np.ones(2)) is None
    assert max_min.pivot(np.eye(2), np.array([[1.0, -1.0], [-1.0, 1.0]]), np.ones(2)) is None
    found = max_min.descend(np.diag([1.0, 2.0]), np.ones((2, 2)), np.ones(2), np.ones(2))
    np.testing.assert_allclose(found / found.sum(), [2 / 3, 1 / 3])


@pytest.mark.parametrize("seed", range(5))
def test_the_positive_part_is_the_nearest(seed):
    m = np.random.default_rng(seed).standard_normal((6, 6))
    m += m.T
    found = positive_part(m)
    negative = m - found
    assert np.linalg.eigvalsh(found).min() > -1e-12
    assert np.linalg.eigvalsh(negative).max() < 1e-12
    assert abs((found * negative).sum()) < 1e-12  # so that it is the projection


@settings(max_examples=100, deadline=None)
@given(zoo(), st.floats(0, 2))
def test_correlations_are_those_of_vectors_and_those_of_vectors_stay(gradients, size):
    gradients = unit(gradients[np.linalg.norm(gradients, axis=1) > 0])
    if not len(gradients):
        return
    m = gradients @ gradients.T
    np.testing.assert_allclose(correlations(m), m, atol=1e-14)
    spoilt = m + size * np.random.default_rng(0).standard_normal(m.shape)
    spoilt = (spoilt + spoilt.T) / 2
    np.fill_diagonal(spoilt, 1.0)
    found = correlations(spoilt)
    assert np.linalg.eigvalsh(found).min() > -1e-13
    np.testing.assert_allclose(found.diagonal(), 1)
