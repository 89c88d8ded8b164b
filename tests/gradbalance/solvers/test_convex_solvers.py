"""cvxpy and cvxpylayers against the exact solver."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance.solvers import min_norm
from tests.gradbalance.gradient_zoo import WELL_POSED, gramian, unit, zoo

CONIC = pytest.mark.parametrize("solver", ["cvxpy", "cvxpylayers"])


@CONIC
@settings(max_examples=25, deadline=None)
@given(gradients=zoo(families=WELL_POSED, max_k=16), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_same_weights_where_they_are_unique(solver, gradients, share):
    m = gramian(unit(gradients))
    floor = share / len(m)
    # A general solver stops when the objective is good to ~1e-9; the weights are good to the root of that.
    np.testing.assert_allclose(min_norm(m, floor=floor, solver=solver), min_norm(m, floor=floor), atol=1e-4)


@CONIC
@settings(max_examples=25, deadline=None)
@given(gradients=zoo(families=("duplicated", "opposite", "low rank", "integers"), max_k=12))
def test_same_point_where_the_weights_are_not_unique(solver, gradients):
    gradients = unit(gradients)
    m = gramian(gradients)
    np.testing.assert_allclose(
        min_norm(m, solver=solver).numpy() @ gradients, min_norm(m).numpy() @ gradients, atol=1e-6
    )


@CONIC
@settings(max_examples=25, deadline=None)
@given(gradients=zoo(families=WELL_POSED, max_k=8, spread=1.5))
def test_raw_gradients(solver, gradients):
    m = gramian(gradients)
    np.testing.assert_allclose(min_norm(m, solver=solver), min_norm(m), atol=1e-6)


@CONIC
def test_zero_rows(solver):
    alpha = min_norm(gramian(np.diag([0.0, 2.0, 1.0])), solver=solver)
    np.testing.assert_allclose(alpha, [0, 0.2, 0.8], atol=1e-6)
    assert alpha[0] == 0
    assert min_norm(torch.zeros(3, 3), solver=solver).tolist() == [1 / 3] * 3


@CONIC
def test_a_missing_package_is_named_with_the_way_out(solver, monkeypatch):
    monkeypatch.setitem(sys.modules, solver, None)
    monkeypatch.setitem(sys.modules, "cvxpylayers.torch", None)
    with pytest.raises(ImportError, match=rf"solver='{solver}' .* pip install gradbalance\[solvers\]"):
        min_norm(torch.eye(3), solver=solver)


def test_the_derivative_of_the_root_at_repeated_eigenvalues():
    """M = 4 I has no unique eigenvectors, but its root 2 I has a derivative: dF = dM / 4."""
    from gradbalance.solvers.convex import _Root

    leaf = (4 * torch.eye(3, dtype=torch.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad(_Root.apply(leaf)[0, 1], leaf)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0, 1] = expected[1, 0] = 1 / 8
    torch.testing.assert_close(gradient, expected)
