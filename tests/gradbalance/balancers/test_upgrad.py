"""UPGrad and DualProj: projections onto the cone without conflict, against quadprog and torchjd."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torchjd.aggregation import UPGradWeighting

from benchmarks.agreement.solving import PAIRS
from gradbalance.balancers import DualProj, UPGrad
from tests.gradbalance.gradient_zoo import gramian, unit, zoo

CONFLICT = np.array([[1.0, 0.0], [-1.0, 1.0]])


def test_upgrad_of_two_conflicting_gradients():
    """g_1 loses its part along g_2: (½, ½) = g_1 + ½ g_2. g_2 loses its part along g_1: (0, 1) = g_1 + g_2."""
    np.testing.assert_allclose(UPGrad().coefficients(gramian(CONFLICT)), [(1 + 1) / 2, (0.5 + 1) / 2])


def test_dual_proj_of_two_conflicting_gradients():
    """The mean, (0, ½), is in conflict with neither; three parts of g_1 to one of g_2, (½, ¼), go to (⅜, ⅜)."""
    np.testing.assert_allclose(DualProj().coefficients(gramian(CONFLICT)), [0.5, 0.5])
    preferred = DualProj(preference=[1.5, 0.5]).coefficients(gramian(CONFLICT)).numpy()
    np.testing.assert_allclose(preferred @ CONFLICT, [0.375, 0.375])
    np.testing.assert_allclose(preferred, [0.75, 0.375])


@pytest.mark.parametrize("method", [UPGrad, DualProj])
def test_without_conflict_it_is_the_mean(method):
    gradients = np.array([[1.0, 0.0], [1.0, 2.0]])
    np.testing.assert_allclose(method().coefficients(gramian(gradients)), [0.5, 0.5])
    np.testing.assert_allclose(method(preference=[3.0, 1.0]).coefficients(gramian(gradients)), [0.75, 0.25])
    np.testing.assert_allclose(method(preference=[1.0, 1.0]).coefficients(gramian(gradients)), [0.5, 0.5])


def test_preference_weighs_the_projections():
    m = gramian(CONFLICT)
    np.testing.assert_allclose(UPGrad([3.0, 1.0]).coefficients(m), [(3 * 1 + 1) / 4, (3 * 0.5 + 1) / 4])


@settings(max_examples=50, deadline=None)
@given(zoo(families=("many parameters",), max_k=6))
def test_multiplying_a_loss_multiplies_its_projection(gradients):
    """Linear under scaling, in the paper's words: d(c_1 g_1, …, c_K g_K) is linear in every c_k."""
    factors = np.ones((len(gradients), 1))
    updates = []
    for factor in (1.0, 2.0, 3.0):
        factors[0] = factor
        scaled = factors * gradients
        updates.append(UPGrad().coefficients(gramian(scaled)).numpy() @ scaled)
    np.testing.assert_allclose(updates[2] - updates[1], updates[1] - updates[0], atol=1e-9)


def test_opposite_gradients_cancel_and_the_third_remains():
    gradients = np.array([[1.0, 0.0], [-2.0, 0.0], [0.3, 1.0]])
    for method in (UPGrad, DualProj):
        update = method().coefficients(gramian(gradients)).numpy() @ gradients
        np.testing.assert_allclose(update, [0.0, 1 / 3], atol=1e-12)


def test_duplicates_share_alike():
    gradients = np.array([[1.0, 0.0], [-1.0, 1.0], [-1.0, 1.0]])
    for method in (UPGrad, DualProj):
        found = method().coefficients(gramian(gradients))
        assert found[1].item() == pytest.approx(found[2].item())


@pytest.mark.parametrize("method", [UPGrad, DualProj])
def test_a_preference_of_another_length(method):
    with pytest.raises(ValueError, match="preference has 2 values, but there are 3 objectives"):
        method(preference=[1.0, 2.0]).coefficients(torch.eye(3))


@pytest.mark.parametrize("method", [UPGrad, DualProj])
def test_a_preference_that_is_not_positive(method):
    with pytest.raises(ValueError, match="preference must hold one finite number > 0 per objective"):
        method(preference=[1.0, 0.0])


@pytest.mark.parametrize("method", ["upgrad", "dual_proj"])
def test_agrees_with_torchjd(method):
    assert PAIRS[method, "torchjd"]() < 1e-6


def test_short_gradients_are_projected_too():
    """torchjd's default constants turn UPGrad into the mean of gradients below an absolute norm."""
    m = 1e-12 * gramian(unit(CONFLICT))
    torch.testing.assert_close(UPGradWeighting()(m), torch.full((2,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(UPGrad().coefficients(m), UPGrad().coefficients(1e12 * m))
