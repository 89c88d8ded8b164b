"""Aligned-MTL: orthogonal gradients of one length, their mean, and the three scales."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.agreement.projecting import PAIRS
from gradbalance.balancers import AlignedMTL
from tests.gradbalance.gradient_zoo import cosines, gramian, zoo


@pytest.mark.parametrize(
    ("scale_mode", "length"), [("min", 1.0), ("median", 3.0), ("rmse", math.sqrt((1 + 9 + 25 + 81) / 4))]
)
def test_orthogonal_gradients_get_one_length(scale_mode, length):
    gradients = np.diag([3.0, 1.0, 9.0, 5.0])
    found = AlignedMTL(scale_mode=scale_mode).coefficients(gramian(gradients)).numpy() @ gradients
    np.testing.assert_allclose(found, [length / 4] * 4)


def test_preference_is_normalised():
    gradients = np.diag([3.0, 1.0])
    found = AlignedMTL([6, 2]).coefficients(gramian(gradients)).numpy() @ gradients
    np.testing.assert_allclose(found, [0.75, 0.25])


@settings(max_examples=50, deadline=None)
@given(zoo(families=("many parameters", "shared direction"), max_k=8), st.sampled_from(["min", "median", "rmse"]))
def test_aligned_gradients_are_orthogonal_of_one_length(gradients, scale_mode):
    """Preferring objective k alone, nearly, gives the k-th aligned gradient."""
    k = len(gradients)
    aligned = np.stack(
        [
            AlignedMTL([1.0 if i == j else 1e-12 for j in range(k)], scale_mode)
            .coefficients(gramian(gradients))
            .numpy()
            @ gradients
            for i in range(k)
        ]
    )
    square = np.linalg.eigvalsh(gradients @ gradients.T)
    wanted = {"min": square[0], "median": square[(k - 1) // 2], "rmse": square.mean()}[scale_mode]
    np.testing.assert_allclose(aligned @ aligned.T, wanted * np.eye(k), atol=1e-6 * wanted)


def test_same_as_torchjd():
    assert PAIRS["aligned_mtl", "torchjd"]() <= 1e-10


def test_dependent_gradients_use_the_directions_there_are():
    """g_2 = −g_1 and g_3 across: one direction for the first two, in which they cancel."""
    gradients = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    np.testing.assert_allclose(
        AlignedMTL().coefficients(gramian(gradients)).numpy() @ gradients, [0, 1 / 3], atol=1e-15
    )


def test_an_original_gradient_may_conflict():
    gradients = np.array([[1.0, 0.0, 0.0], [-3.0, 1.0, 0.0], [-3.0, 0.0, 1.0]])
    assert cosines(AlignedMTL().coefficients(gramian(gradients)), gradients).min() < -0.1


@pytest.mark.parametrize("scale_mode", ["mean", "max", None, ""])
def test_unknown_scale_mode(scale_mode):
    with pytest.raises(ValueError, match="scale_mode must be one of 'min', 'median', 'rmse', got"):
        AlignedMTL(scale_mode=scale_mode)


def test_bad_preference():
    with pytest.raises(ValueError, match="preference must hold one finite number > 0 per objective, got"):
        AlignedMTL([1.0, 0.0])


def test_preference_of_another_length():
    with pytest.raises(ValueError, match="preference has 2 values, but there are 3 objectives"):
        AlignedMTL([1, 2]).coefficients(torch.eye(3))
