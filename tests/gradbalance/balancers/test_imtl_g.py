"""IMTL-G: equal projections, its published convention, and where that fails."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

from benchmarks.agreement.projecting import PAIRS
from gradbalance.balancers import IMTLG, ConFIG
from tests.gradbalance.gradient_zoo import WELL_POSED, gramian, unit, zoo


def test_orthogonal_gradients():
    """α_k ∝ 1 / ‖g_k‖."""
    np.testing.assert_allclose(IMTLG().coefficients(gramian(np.diag([1.0, 3.0]))), [0.75, 0.25])


def test_two_gradients_by_hand():
    """α_2 = g_1·(ĝ_1 − ĝ_2) / ((g_1 − g_2)·(ĝ_1 − ĝ_2)), here 2 (1 − ½) / (3 (1 − ½))."""
    m = torch.tensor([[4.0, 1.0], [1.0, 1.0]])
    np.testing.assert_allclose(IMTLG().coefficients(m), [1 / 3, 2 / 3])


@settings(max_examples=50, deadline=None)
@given(zoo(families=WELL_POSED, max_k=16, spread=1))
def test_equal_projections_and_sum_1(gradients):
    alpha = IMTLG().coefficients(gramian(gradients)).numpy()
    assume(np.abs(alpha).sum() < 1e3)  # else the sum is all rounding
    assert alpha.sum() == pytest.approx(1)
    projections = unit(gradients) @ (alpha @ gradients)
    np.testing.assert_allclose(projections, projections[0], rtol=1e-6)


@pytest.mark.parametrize("oracle", ["torchjd", "conflictfree"])
def test_same_as_others(oracle):
    assert PAIRS["imtl_g", oracle]() <= 1e-10


def test_the_published_convention_may_go_up_every_loss():
    """A short gradient amid two others has a negative coefficient, and the sum is negative; ConFIG has no such case."""
    m = torch.tensor([[1.0, 0.065, 0.0], [0.065, 0.01, 0.065], [0.0, 0.065, 1.0]])
    assert (m @ IMTLG().coefficients(m).float()).max() < 0
    assert (m @ ConFIG().coefficients(m).float()).min() > 0


@pytest.mark.parametrize("factor", [1.0, 2.0, 1e3])
def test_opposite_gradients_have_no_equal_projections(factor):
    assert IMTLG().coefficients(gramian([[1.0, 0.0], [-factor, 0.0]])).tolist() == [0.0, 0.0]


def test_equal_gradients_share():
    np.testing.assert_allclose(IMTLG().coefficients(torch.ones(3, 3)), [1 / 3] * 3)


def test_the_line_of_dependent_gradients_ignores_the_losses_scales():
    """Which taking the pseudo-inverse of the raw Gramian, as torchjd does, does not."""
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((6, 3))
    factors = 10.0 ** rng.uniform(-1, 1, (6, 1))
    lines = []
    for seen in (gradients, gradients * factors):
        update = IMTLG().coefficients(gramian(seen)).numpy() @ seen
        lines.append(update / np.linalg.norm(update))
    assert abs(lines[0] @ lines[1]) == pytest.approx(1)
