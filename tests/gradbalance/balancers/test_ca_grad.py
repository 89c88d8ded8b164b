"""CAGrad: golden values, a certificate of optimality, and what happens where the paper's formula divides by zero."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torchjd.aggregation import CAGradWeighting

from benchmarks.agreement.solving import PAIRS, gramians
from gradbalance.balancers import MGDA, CAGrad, DualProj
from tests.gradbalance.gradient_zoo import FAMILIES, WELL_POSED, gramian, unit, zoo


def _update(c, gradients):
    return CAGrad(c).coefficients(gramian(gradients)).numpy() @ gradients


def test_two_orthogonal_gradients_of_one_length():
    """w is uniform, so g_w = g_0 and d = (1 + c) g_0."""
    np.testing.assert_allclose(CAGrad(0.4).coefficients(torch.eye(2)), [0.7, 0.7])


def test_the_shorter_of_two_parallel_gradients_gets_all_the_weight():
    """It is the worst served whatever d is: λ_2 = 1/2 + c ‖g_0‖ / ‖g_2‖."""
    np.testing.assert_allclose(CAGrad(0.4).coefficients(gramian([[3.0], [1.0]])), [0.5, 0.5 + 0.4 * 2.0])


@settings(max_examples=200, deadline=None)
@given(zoo(families=(*WELL_POSED, "random", "low rank"), spread=2), st.sampled_from([0.1, 0.5, 0.99, 1.0, 3.0]))
def test_no_update_in_the_ball_serves_the_worst_better(gradients, c):
    """For every d in the ball and w on the simplex min_k ⟨g_k, d⟩ ≤ ⟨g_w, d⟩ ≤ ⟨g_w, g_0⟩ + c ‖g_0‖ ‖g_w‖."""
    mean, norms = gradients.mean(0), np.linalg.norm(gradients, axis=1)
    assume(np.linalg.norm(mean) > 1e-6 * norms.mean())
    update = _update(c, gradients)
    radius = c * np.linalg.norm(mean)
    distance = np.linalg.norm(update - mean)
    assert distance <= radius * (1 + 1e-9)
    w = CAGrad(c).coefficients(gramian(gradients)).numpy() - 1 / len(gradients)
    assert w.min() >= -1e-9
    accuracy = 1e-9
    if distance < radius * (1 - 1e-9):  # the bound is 0, by a combination of the gradients that vanishes to rounding
        accuracy = 1e-6
        w = MGDA().coefficients(gramian(gradients)).numpy()
    w /= w.sum()
    combined = w @ gradients
    bound = combined @ mean + radius * np.linalg.norm(combined)
    assert (gradients @ update).min() >= bound - accuracy * (w @ norms) * (np.linalg.norm(mean) + radius)


def test_c_0_is_the_mean():
    gradients = np.random.default_rng(0).standard_normal((4, 7))
    np.testing.assert_allclose(CAGrad(0.0).coefficients(gramian(gradients)), [0.25] * 4)


def test_a_large_c_goes_to_mgda():
    gradients = np.random.default_rng(0).standard_normal((4, 7))
    one, other = _update(1e6, gradients), MGDA().coefficients(gramian(gradients)).numpy() @ gradients
    np.testing.assert_allclose(one / np.linalg.norm(one), other / np.linalg.norm(other), atol=1e-5)


@pytest.mark.parametrize("c", [0.5, 1.0, 2.0])
def test_opposite_gradients_and_a_third(c):
    """Only the third can gain, by nothing that helps the worst: the nearest to the mean without conflict is taken."""
    gradients = np.array([[1.0, 0.0], [-1.0, 0.0], [0.3, 1.0]])
    expected = DualProj().coefficients(gramian(gradients)).numpy() @ gradients
    np.testing.assert_allclose(_update(c, gradients), expected, atol=1e-12)
    np.testing.assert_allclose(expected, [0.0, 1 / 3], atol=1e-12)


@pytest.mark.parametrize("seed", [675, 896, 1420, 1800])
def test_a_pair_that_cancels_exactly_gets_no_large_coefficients(seed):
    """λ → ∞ on both would be right on paper; the update would be lost in the rounding of float32 gradients."""
    one, other = np.random.default_rng(seed).standard_normal((2, 3))
    assert CAGrad(0.5).coefficients(gramian(unit(np.stack([one, other, -one])))).max() < 10


def test_that_choice_is_the_limit():
    near = np.array([[1.0, 0.0], [-1.0, 1e-5], [0.3, 1.0]])
    far = np.array([[1.0, 0.0], [-1.0, 0.0], [0.3, 1.0]])
    for c in (0.5, 2.0):
        assert abs(_update(c, near) - _update(c, far))[0] < 1e-4


def test_at_a_stationary_point_a_small_ball_keeps_to_the_mean():
    """For c < 1 the method goes on to a minimum of the mean loss, as the paper proves; for c ≥ 1 it stops."""
    gradients = np.array([[1.0, 0.0], [-2.0, 0.0]])
    assert np.linalg.norm(_update(0.5, gradients)) > 0.1
    np.testing.assert_allclose(_update(1.0, gradients), 0, atol=1e-12)


def test_a_mean_of_zero_gives_no_update():
    assert CAGrad(0.5).coefficients(gramian([[1.0, 0.0], [-1.0, 0.0]])).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("value", [-0.1, math.nan, None])
def test_a_bad_c(value):
    with pytest.raises(ValueError, match=r"c must be a number in \[0, ∞\), got"):
        CAGrad(value)


def test_agrees_with_cvxpy():
    assert PAIRS["ca_grad", "cvxpy"]() < 1e-6


def test_agrees_with_torchjd_up_to_the_accuracy_of_its_solver():
    """The objective is flat around the best w, so a general solver at default accuracy leaves an error of some 1e-4."""
    assert PAIRS["ca_grad", "torchjd"]() < 1e-3
    own = [(m @ CAGrad(0.5).coefficients(m)).min() for m in gramians()]
    theirs = [(m @ CAGradWeighting(0.5, norm_eps=0.0)(m)).min() for m in gramians()]
    assert all(ours > other - 1e-12 for ours, other in zip(own, theirs, strict=True))


def test_short_gradients_do_not_freeze_the_update():
    """torchjd's does below an absolute norm."""
    m = gramian(1e-3 * unit(FAMILIES["many parameters"](np.random.default_rng(0), 3)))
    assert CAGradWeighting(0.5)(m * 1e-6).tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(CAGrad(0.5).coefficients(m * 1e-6), CAGrad(0.5).coefficients(m))
