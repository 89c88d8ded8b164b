"""FairGrad: the equation it solves, its place between the sum and max–min, and torchjd's solution of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchjd.aggregation import FairGradWeighting

from benchmarks.agreement.solving import PAIRS, gramians
from gradbalance.balancers import MGDA, FairGrad, NashMTL, WeightedSum
from tests.gradbalance.gradient_zoo import WELL_POSED, gramian, zoo


def _residual(m, coefficients, alpha):
    return ((m @ coefficients) * coefficients ** (1 / alpha) - 1).abs().max().item()


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_orthogonal_gradients(alpha):
    """‖g_k‖² λ_k = λ_k^{−1/α}, so λ_k = ‖g_k‖^{−2α / (1 + α)}."""
    norms = np.array([1.0, 10.0, 0.1])
    found = FairGrad(alpha).coefficients(gramian(np.diag(norms)))
    np.testing.assert_allclose(found, norms ** (-2 * alpha / (1 + alpha)), rtol=1e-12)


@settings(max_examples=100, deadline=None)
@given(zoo(families=WELL_POSED, spread=2), st.sampled_from([0.1, 0.3, 1.0, 2.0, 5.0, 10.0]))
def test_the_equation_holds(gradients, alpha):
    m = gramian(gradients)
    found = FairGrad(alpha).coefficients(m)
    rounding = 1e-12 * (m.abs() @ found)  # the terms of Mλ may cancel
    assert ((m @ found - found ** (-1 / alpha)).abs() <= rounding).all()


@settings(max_examples=50, deadline=None)
@given(zoo(families=WELL_POSED, spread=3))
def test_alpha_1_is_nash(gradients):
    m = gramian(gradients)
    np.testing.assert_allclose(FairGrad(1.0).coefficients(m), NashMTL().coefficients(m), rtol=1e-9)


def test_no_other_update_of_the_same_length_has_a_larger_utility():
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((4, 6))
    update = FairGrad(2.0).coefficients(gramian(gradients)).numpy() @ gradients
    best = -(1 / (gradients @ update)).sum()
    for _ in range(1000):
        other = update + 0.1 * rng.standard_normal(6)
        progress = gradients @ (other * np.linalg.norm(update) / np.linalg.norm(other))
        assert progress.min() <= 0 or -(1 / progress).sum() < best


def test_from_the_sum_to_max_min():
    gradients = np.random.default_rng(1).standard_normal((4, 40)) * np.array([[1.0], [2.0], [3.0], [4.0]])

    def direction(balancer):
        update = balancer.coefficients(gramian(gradients)).numpy() @ gradients
        return update / np.linalg.norm(update)

    directions = [direction(FairGrad(alpha)) for alpha in (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)]
    worst = [(gradients @ d).min() for d in directions]
    assert worst == sorted(worst)
    assert directions[0] @ direction(WeightedSum()) > 0.99
    assert directions[-1] @ direction(MGDA()) > 0.99


@pytest.mark.parametrize("size", [1.0, 1e4, 1e8, 1e12])
@pytest.mark.parametrize("angle", [1e-3, 3e-7, 1e-8])
def test_nearly_opposite_gradients_of_unlike_lengths_give_finite_numbers(size, angle):
    m = gramian(np.array([[1.0, 0.0], [-size, size * angle]]))
    found = FairGrad(10.0).coefficients(m)
    assert found.isfinite().all()
    assert (found >= 0).all()


@pytest.mark.parametrize("value", [0, 0.05, 11.0, "2"])
def test_a_bad_alpha(value):
    with pytest.raises(ValueError, match=r"alpha must be a number in \[0.1, 10\], got"):
        FairGrad(value)


@pytest.mark.parametrize("alpha", ["2", "1/2"])
def test_agrees_with_torchjd(alpha):
    assert PAIRS[f"fair_grad, α = {alpha}", "torchjd"]() < 1e-6


def test_what_difference_there_is_comes_from_their_solver():
    """Least squares from one start, at scipy's default accuracy."""
    own = [_residual(m, FairGrad(2.0).coefficients(m), 2.0) for m in gramians()]
    theirs = [_residual(m, FairGradWeighting(2.0)(m), 2.0) for m in gramians()]
    assert max(own) < 1e-12 < max(theirs)


def test_their_solver_stops_early_on_short_gradients():
    m = gramian(1e-4 * np.random.default_rng(0).standard_normal((3, 6)))
    assert _residual(m, FairGrad(2.0).coefficients(m), 2.0) < 1e-12
    assert _residual(m, FairGradWeighting(2.0)(m), 2.0) > 1e-3
