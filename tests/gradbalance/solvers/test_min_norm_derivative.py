"""The derivative of the exact solver: finite differences, and cvxpylayers' own."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradbalance.solvers import min_norm
from tests.gradbalance.gradient_zoo import WELL_POSED, gramian, unit, zoo


def _vector_jacobian(m, direction, **options):
    leaf = m.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(min_norm(leaf, **options) @ direction, leaf)
    return gradient


def _direction(k, seed):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(k))


def _far_from_a_kink(m, alpha, floor=0.0):
    slack = m @ alpha - (m @ alpha)[alpha > floor].min()
    return ((alpha - floor > 1e-3) | (slack > 1e-3)).all()


@settings(max_examples=40, deadline=None)
@given(zoo(families=WELL_POSED, min_k=1, max_k=8), st.integers(0, 1000), st.sampled_from([0.0, 0.5]))
def test_finite_differences(gradients, seed, share):
    m = gramian(unit(gradients))
    k = len(m)
    floor = share / k
    assume(_far_from_a_kink(m, min_norm(m, floor=floor), floor))
    assume(torch.linalg.eigvalsh(m)[0] > 1e-2)  # or the second derivative spoils the difference
    direction = _direction(k, seed)
    gradient = _vector_jacobian(m, direction, floor=floor)
    change = torch.from_numpy(np.random.default_rng(seed + 1).standard_normal((k, k)))
    change = change + change.T
    step = 1e-7
    difference = min_norm(m + step * change, floor=floor) - min_norm(m - step * change, floor=floor)
    expected = difference @ direction / (2 * step)
    assert float((gradient * change).sum()) == pytest.approx(float(expected), rel=1e-3, abs=1e-6)


def test_gradcheck():
    gradients = np.random.default_rng(0).standard_normal((5, 30))
    leaf = gramian(gradients).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: min_norm((m + m.T) / 2), leaf)
    assert torch.autograd.gradcheck(lambda m: min_norm((m + m.T) / 2, floor=0.1), leaf)


def test_through_the_gradients_with_some_objectives_out():
    """A short gradient amid long ones in its direction: only it is in the set, and α does not move."""
    gradients = torch.tensor([[1.0, 0.0], [3.0, 0.1], [4.0, -0.1], [0.0, 0.0]], dtype=torch.float64).requires_grad_()
    alpha = min_norm(gradients @ gradients.T)
    assert alpha.tolist() == [1, 0, 0, 0]
    (alpha @ torch.arange(4.0, dtype=torch.float64)).backward()
    assert gradients.grad.abs().max() < 1e-15


def test_norms_over_three_decades():
    """Two orthogonal gradients: α_1 = m22 / (m11 + m22), so dα_1/dm11 = −m22 / (m11 + m22)²."""
    first, second = 1e-3, 1e3
    m = torch.tensor([[first, 0.0], [0.0, second]], dtype=torch.float64)
    gradient = _vector_jacobian(m, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert float(gradient[0, 0]) == pytest.approx(-second / (first + second) ** 2, rel=1e-9)
    assert float(gradient[1, 1]) == pytest.approx(first / (first + second) ** 2, rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(zoo(families=WELL_POSED, min_k=2, max_k=6), st.integers(0, 1000), st.sampled_from([0.0, 0.5]))
def test_same_as_cvxpylayers(gradients, seed, share):
    m = gramian(unit(gradients))
    floor = share / len(m)
    assume(_far_from_a_kink(m, min_norm(m, floor=floor), floor))
    assume(torch.linalg.eigvalsh(m)[0] > 1e-2)  # cvxpylayers differentiates iteratively
    direction = _direction(len(m), seed)
    own = _vector_jacobian(m, direction, floor=floor)
    other = _vector_jacobian(m, direction, floor=floor, solver="cvxpylayers")
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(zoo(min_k=1, max_k=12, spread=3), st.integers(0, 1000))
def test_always_finite(gradients, seed):
    m = gramian(gradients)
    assert torch.isfinite(_vector_jacobian(m, _direction(len(m), seed))).all()


def test_duplicates_get_one_and_the_same_derivative():
    a, b = np.eye(2)
    m = gramian(np.stack([a, a, 2 * b]))
    gradient = _vector_jacobian(m, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(gradient[0], gradient[1])


def test_float32_gramian_gets_a_float32_gradient():
    leaf = torch.eye(3, requires_grad=True)
    min_norm(leaf)[0].backward()
    assert leaf.grad.dtype == torch.float32
    assert leaf.grad.abs().sum() > 0


def test_no_graph_unless_asked_for():
    m = gramian(np.eye(3))
    assert not min_norm(m).requires_grad
    leaf = m.clone().requires_grad_()
    assert min_norm(leaf).requires_grad
    with torch.no_grad():
        assert not min_norm(leaf).requires_grad
    assert not min_norm(leaf, solver="cvxpy").requires_grad


@pytest.mark.parametrize("solver", ["exact", "cvxpylayers"])
def test_a_second_derivative_is_refused_not_left_out(solver):
    gradients = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    alpha = min_norm(gradients @ gradients.T, solver=solver)
    (first,) = torch.autograd.grad(alpha[0], gradients, create_graph=True)
    with pytest.raises(RuntimeError, match="min_norm can be differentiated once; solver='enumeration'"):
        torch.autograd.grad(first.square().sum(), gradients)
