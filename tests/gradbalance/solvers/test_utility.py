"""The fair weights: their equation on every kind of gradients, and the form with a second matrix for the utility."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from gradbalance.solvers import utility
from tests.gradbalance.gradient_zoo import unit, zoo


@settings(max_examples=300, deadline=None)
@given(zoo(), st.sampled_from([0.1, 0.5, 1.0, 2.0, 10.0]), st.floats(0, 1))
def test_the_equation_holds_or_a_combination_vanishes(gradients, p, spread):
    gradients = unit(gradients[np.linalg.norm(gradients, axis=1) > 0])
    if not len(gradients):
        return
    m = gradients @ gradients.T
    w = 10.0 ** (spread * np.random.default_rng(0).uniform(-1, 1, len(m)))
    beta = utility.fair_weights(m, w, p)
    assert beta.min() >= 0
    if np.linalg.norm(beta @ gradients) > 1.1e-7 * beta.sum():
        wanted = w * beta**-p
        assert abs(m @ beta - wanted).max() <= 1e-12 * max(beta.sum(), wanted.max())


@settings(max_examples=200, deadline=None)
@given(zoo(families=("low rank", "nearly duplicated", "opposite")), st.sampled_from([0.1, 0.5, 1.0, 2.0, 10.0]))
def test_products_in_float32_that_are_not_quite_semidefinite(gradients, p):
    gradients = unit(gradients).astype(np.float32)
    m = (gradients @ gradients.T).astype(np.float64)
    norms = np.sqrt(m.diagonal())
    beta = utility.fair_weights((m + m.T) / (2 * norms[:, None] * norms), np.ones(len(m)), p)
    assert np.isfinite(beta).all()
    assert beta.min() >= 0


@pytest.mark.parametrize("q", [1.0, 2.0])
def test_noise_that_costs_length_but_brings_no_progress(q):
    """N is not the matrix that progress comes from: here against a general minimiser."""
    rng = np.random.default_rng(0)
    signal, noise = rng.standard_normal((4, 12)), rng.standard_normal((4, 12))
    u = signal @ signal.T
    n = u + noise @ noise.T
    v = rng.uniform(0.5, 2, 4)

    def loss(x):
        z = u @ x
        if z.min() <= 0:
            return np.inf
        utility_of = np.log(z) if q == 1.0 else z ** (1 - q) / (1 - q)
        return x @ n @ x / 2 - v @ utility_of

    start = np.linalg.solve(u, np.ones(4))
    expected = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-14, "maxiter": 10000}).x
    np.testing.assert_allclose(utility.maximise(n, u, v, q, start)[0], expected, rtol=1e-5)
