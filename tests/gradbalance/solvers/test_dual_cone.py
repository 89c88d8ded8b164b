"""Projections onto the dual cone: optimality conditions on every kind of gradients, and quadprog as an oracle."""

import numpy as np
import pytest
import quadprog
from hypothesis import given, settings

from gradbalance.solvers import dual_cone
from tests.gradbalance.gradient_zoo import unit, zoo


def _unit_gramian(gradients):
    gradients = unit(gradients[np.linalg.norm(gradients, axis=1) > 0])
    return gradients @ gradients.T


def _residual(m, vectors, projected):
    """Largest |min(y, s)|, relative to the largest y if that is above 1."""
    y = projected - vectors
    return abs(np.minimum(y, projected @ m)).max() / max(1.0, y.max())


@settings(max_examples=200, deadline=None)
@given(zoo(spread=2))
def test_optimality_conditions(gradients):
    m = _unit_gramian(gradients)
    if len(m):
        vectors = np.vstack([np.eye(len(m)), np.random.default_rng(0).standard_normal((3, len(m)))])
        assert _residual(m, vectors, dual_cone.project(m, vectors)) < 1e-9


@pytest.mark.parametrize("k", [2, 5, 16, 32])
def test_quadprog(k):
    gradients = unit(np.random.default_rng(k).standard_normal((k, 2 * k)))
    projected = dual_cone.project(gradients @ gradients.T, np.eye(k)) @ gradients
    for gradient, found in zip(gradients, projected, strict=True):
        expected = quadprog.solve_qp(np.eye(2 * k), gradient, gradients.T, np.zeros(k))[0]
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_projecting_twice_is_projecting_once():
    gradients = unit(np.random.default_rng(0).standard_normal((10, 20)))
    m = gradients @ gradients.T
    once = dual_cone.project(m, np.eye(10))
    np.testing.assert_allclose(dual_cone.project(m, once), once, atol=1e-12)


def test_duplicates_share_alike():
    m = _unit_gramian(np.array([[1.0, 0.0], [-1.0, 1.0], [-1.0, 1.0]]))
    found = dual_cone.project(m, np.eye(3))[0]
    np.testing.assert_allclose(found, [1.0, 0.5**1.5, 0.5**1.5], rtol=1e-7)


@settings(max_examples=50, deadline=None)
@given(zoo(families=("many parameters", "duplicated", "low rank"), max_k=12))
def test_where_block_pivoting_does_not_get_anywhere(gradients):
    m = _unit_gramian(gradients)
    vectors = np.eye(len(m))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dual_cone, "ROUNDS", 0)
        one_by_one = dual_cone.project(m, vectors)
    assert _residual(m, vectors, one_by_one) < 1e-9
    np.testing.assert_allclose(one_by_one @ m, dual_cone.project(m, vectors) @ m, atol=1e-6)
