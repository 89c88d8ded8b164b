"""What is and what is not accepted as a Gramian."""

import math

import numpy as np
import pytest
import torch

from gradbalance.solvers.checks import active_rows, check_gramian


def test_a_good_gramian_is_returned_in_float64_on_the_cpu():
    m = torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=torch.float16)
    checked = check_gramian(m)
    assert checked.dtype == torch.float64
    assert torch.equal(checked, m.double())
    assert check_gramian(checked) is checked  # nothing to change, nothing copied


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.eye(2), "must be a real floating-point tensor of shape .K, K., got ndarray"),
        (torch.eye(2, dtype=torch.int64), "got torch.int64"),
        (torch.eye(2, dtype=torch.complex64), "got torch.complex64"),
    ],
)
def test_not_a_real_tensor(bad, message):
    with pytest.raises(TypeError, match=message):
        check_gramian(bad)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 0), (2, 2, 2)])
def test_not_square(shape):
    with pytest.raises(ValueError, match=r"must be a square matrix .* got shape \(.*pass G @ G\.T"):
        check_gramian(torch.ones(shape))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_objective_that_is_not_finite_is_named(value):
    gradients = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    gradients[2, 3] = value
    with pytest.raises(ValueError, match=r"gramian has non-finite values in row 2:"):
        check_gramian(gradients @ gradients.T)


def test_a_single_entry_that_is_not_finite():
    m = torch.eye(3)
    m[0, 1] = math.nan
    with pytest.raises(ValueError, match="gramian has non-finite values in row 0:"):
        check_gramian(m)


def test_large_finite_values_pass():
    m = torch.eye(3, dtype=torch.float64) * 1e308  # the sum overflows
    assert torch.equal(check_gramian(m), m)


def test_a_negative_square_norm():
    with pytest.raises(ValueError, match=r"gramian\[1, 1\] is a squared norm and must be ≥ 0, got -0.5"):
        check_gramian(torch.diag(torch.tensor([1.0, -0.5])))


def test_a_jacobian_is_not_a_gramian():
    with pytest.raises(ValueError, match=r"must be symmetric, got 2\.0 at \[0, 1\] and 0\.0 at \[1, 0\]"):
        check_gramian(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))


def test_asymmetry_of_rounding_is_averaged():
    m = torch.tensor([[1.0, 0.5], [0.501, 1.0]], dtype=torch.float64)
    assert check_gramian(m).tolist() == [[1.0, 0.5005], [0.5005, 1.0]]
    assert m[0, 1] == 0.5


def test_activity_is_relative_to_the_largest_norm():
    for scale in (1e-30, 1.0, 1e30):
        norms = torch.tensor([1.0, 1e-19, 1e-20, 0.0], dtype=torch.float64) * scale
        assert active_rows(norms).tolist() == [True, True, False, False]
    assert active_rows(torch.zeros(3)).tolist() == [False] * 3
