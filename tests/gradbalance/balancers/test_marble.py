"""Marble: the published example, equal or preferred progress, floors, and what goes wrong without the norms."""

import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.agreement.projecting import PAIRS
from gradbalance import MarbleOptimizer
from gradbalance.balancers import Marble
from gradbalance.solvers import LinearConstraint, min_norm
from tests.gradbalance.gradient_zoo import WELL_POSED, cosines, gramian, unit, zoo


def test_two_gradients_at_120_degrees_with_norms_10_and_1():
    gradients = np.array([[10.0, 0.0], [-0.5, math.sqrt(3) / 2]])
    balancer = Marble()
    alpha = balancer.weights(gramian(gradients))
    coefficients = balancer.coefficients(gramian(gradients))
    np.testing.assert_allclose(alpha, [0.5, 0.5], atol=1e-14)
    np.testing.assert_allclose(coefficients, [0.5 * 5.5 / 10, 0.5 * 5.5 / 1], atol=1e-13)
    np.testing.assert_allclose(cosines(coefficients, gradients), [0.5, 0.5], atol=1e-14)
    np.testing.assert_allclose(cosines(alpha, gradients), [0.996, -0.419], atol=1e-3)  # α on raw gradients: a conflict


def test_log_normal_norms_give_no_conflict_but_alpha_on_raw_gradients_does():
    """1,000 draws of K = 5 random gradients with 100 parameters: 28 to 30 % conflict when α is applied as it is.

    (57 to 61 % with 20 parameters and 6 to 7 % with 1,000, where random gradients are nearly orthogonal.)
    """
    rng = np.random.default_rng(0)
    conflicts = {"coefficients": 0, "alpha": 0}
    for _ in range(1000):
        gradients = rng.standard_normal((5, 100)) * np.exp(rng.standard_normal((5, 1)))
        balancer = Marble()
        alpha = balancer.weights(gramian(gradients))
        coefficients = balancer.scale(alpha, gramian(gradients))
        conflicts["alpha"] += cosines(alpha, gradients).min() < -1e-6
        conflicts["coefficients"] += cosines(coefficients, gradients).min() < -1e-6
    assert conflicts["coefficients"] == 0
    assert 250 < conflicts["alpha"] < 350


@settings(max_examples=100, deadline=None)
@given(zoo(families=WELL_POSED, spread=3))
def test_equal_progress_where_weighed_and_no_less_elsewhere(gradients):
    """⟨ĝ_k, d⟩ = ‖d‖² / n̄ where α_k > 0, at least that elsewhere."""
    balancer = Marble()
    alpha = balancer.weights(gramian(gradients)).numpy()
    update = balancer.coefficients(gramian(gradients)).numpy() @ gradients
    norms = np.linalg.norm(gradients, axis=1)
    progress = unit(gradients) @ update / (update @ update / norms.mean())
    np.testing.assert_allclose(progress[alpha > 1e-6], 1, atol=1e-7)
    assert progress.min() > 1 - 1e-7


@settings(max_examples=100, deadline=None)
@given(zoo(families=("many parameters", "clusters"), min_k=2, spread=3), st.integers(0, 1000))
def test_progress_is_proportional_to_the_preference(gradients, seed):
    preference = np.random.default_rng(seed).uniform(0.2, 5, len(gradients))
    balancer = Marble(preference=preference.tolist())
    alpha = balancer.weights(gramian(gradients)).numpy()
    update = balancer.coefficients(gramian(gradients)).numpy() @ gradients
    progress = unit(gradients) @ update / preference
    weighed = alpha > 1e-6
    assert weighed.any()
    np.testing.assert_allclose(progress[weighed], progress.min(), rtol=1e-6)
    assert progress.min() > 0


def test_preference_two_to_one_on_orthogonal_gradients():
    gradients = np.diag([3.0, 5.0])
    update = Marble(preference=[2, 1]).coefficients(gramian(gradients)).numpy() @ gradients
    assert update[0] / update[1] == pytest.approx(2)


@settings(max_examples=30, deadline=None)
@given(zoo(families=WELL_POSED, min_k=1, max_k=8, spread=2), st.floats(0.01, 100))
def test_equal_preference_is_no_preference(gradients, value):
    equal = Marble(preference=[value] * len(gradients)).coefficients(gramian(gradients))
    torch.testing.assert_close(equal, Marble().coefficients(gramian(gradients)), rtol=1e-6, atol=1e-9)


def test_the_preference_may_be_a_tensor():
    m = torch.eye(2)
    assert torch.equal(
        Marble(preference=torch.tensor([2.0, 1.0])).coefficients(m), Marble(preference=[2, 1]).coefficients(m)
    )


def test_floor():
    """A gradient amid the others' direction would get 0."""
    gradients = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert Marble().weights(gramian(gradients))[2] == pytest.approx(0, abs=1e-12)
    alpha = Marble(floor=0.1).weights(gramian(gradients))
    np.testing.assert_allclose(alpha, [0.45, 0.45, 0.1, 0], atol=1e-12)


def test_ceiling():
    """Of three orthogonal gradients and the second's opposite, the pair would get all."""
    gradients = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, -2.0, 0.0], [0.0, 0.0, 3.0]])
    np.testing.assert_allclose(Marble().weights(gramian(gradients)), [0, 0.5, 0.5, 0], atol=1e-12)
    np.testing.assert_allclose(Marble(ceiling=0.4).weights(gramian(gradients)), [0.1, 0.4, 0.4, 0.1], atol=1e-12)


def test_constraints_are_on_the_weights_of_the_unit_gradients():
    m = torch.diag(torch.tensor([1e-6, 1.0, 1e6]))
    at_least_twice = LinearConstraint([1, -2, 0], 0)
    np.testing.assert_allclose(Marble(constraints=at_least_twice).weights(m), [6 / 14, 3 / 14, 5 / 14], atol=1e-12)


def test_a_parameter_of_a_constraint_may_change_between_steps():
    least = cp.Parameter(value=0.5)
    balancer = Marble(constraints=lambda alpha: [alpha[0] >= least])
    np.testing.assert_allclose(balancer.weights(torch.eye(3)), [0.5, 0.25, 0.25], atol=1e-12)
    least.value = 0.8
    np.testing.assert_allclose(balancer.weights(torch.eye(3)), [0.8, 0.1, 0.1], atol=1e-12)


def test_an_objective_without_gradient_gets_none_of_the_update_even_where_it_must_have_weight():
    balancer = Marble(constraints=LinearConstraint([1, 0, 0], 0.2))
    m = torch.diag(torch.tensor([0.0, 4.0, 4.0]))
    np.testing.assert_allclose(balancer.weights(m), [0.2, 0.4, 0.4], atol=1e-12)
    np.testing.assert_allclose(balancer.coefficients(m), [0, 0.4, 0.4], atol=1e-12)


@pytest.mark.parametrize("ceiling", [0.0, 1.5, math.nan])
def test_bad_ceiling(ceiling):
    with pytest.raises(ValueError, match=r"ceiling must be a number in \(0, 1\], got"):
        Marble(ceiling=ceiling)


def test_through_the_optimizer():
    w = torch.nn.Parameter(torch.zeros(3))
    optimizer = MarbleOptimizer(
        torch.optim.SGD([w], lr=1.0), ceiling=0.5, constraints=LinearConstraint([1, 0, 0], 0.45)
    )
    report = optimizer.backward(list(w))
    np.testing.assert_allclose(report.weights, [0.45, 0.275, 0.275], atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(zoo(spread=3))
def test_weights_are_the_min_norm_point_of_unit_gradients(gradients):
    alpha = Marble().weights(gramian(gradients))
    assert (alpha >= 0).all()
    assert alpha.sum() == pytest.approx(1)
    found, expected = alpha.numpy() @ unit(gradients), min_norm(gramian(unit(gradients))).numpy() @ unit(gradients)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_scale_uses_the_mean_norm_of_the_objectives_with_gradient():
    alpha = torch.tensor([0.25, 0.5, 0.25])
    coefficients = Marble().scale(alpha, torch.diag(torch.tensor([16.0, 4.0, 0.0])))
    assert coefficients.tolist() == [3 * 0.25 / 4, 3 * 0.5 / 2, 0.0]


def test_same_as_a_general_solver():
    assert PAIRS["marble", "cvxpy"]() <= 1e-8


@pytest.mark.parametrize("solver", ["cvxpy", "cvxpylayers"])
def test_other_solvers(solver):
    gradients = np.random.default_rng(0).standard_normal((4, 10))
    found = Marble(solver=solver).coefficients(gramian(gradients))
    torch.testing.assert_close(found, Marble().coefficients(gramian(gradients)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preference", [[1.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [math.inf, 1.0], [], [[1.0]]])
def test_bad_preference(preference):
    with pytest.raises(ValueError, match="preference must hold one finite number > 0 per objective, got"):
        Marble(preference=preference)


def test_preference_of_another_length():
    with pytest.raises(ValueError, match="preference has 2 values, but there are 3 objectives"):
        Marble(preference=[1, 2]).coefficients(torch.eye(3))


@pytest.mark.parametrize("floor", [-0.1, 1.1, math.nan])
def test_bad_floor(floor):
    with pytest.raises(ValueError, match=r"floor must be a number in \[0, 1\], got"):
        Marble(floor=floor)


def test_a_floor_too_high_for_the_number_of_objectives():
    with pytest.raises(ValueError, match=r"floor must be in \[0, 1/K\] = \[0, 0\.25\] for K = 4, got 0\.3"):
        Marble(floor=0.3).coefficients(torch.eye(4))


def test_unknown_solver():
    with pytest.raises(ValueError, match="solver must be one of 'exact', 'cvxpy', 'cvxpylayers', got 'qp'"):
        Marble(solver="qp")
