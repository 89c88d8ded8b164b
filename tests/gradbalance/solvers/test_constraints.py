"""The forms in which constraints are written: all lead to the same arrays."""

import cvxpy as cp
import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch

from gradbalance.solvers import LinearConstraint, min_norm
from gradbalance.solvers.constraints import as_arrays

EYE = torch.eye(3)


def test_arrays_numbers_and_one_row():
    one = LinearConstraint([1, -2, 0], 0)
    assert one.matrix.tolist() == [[1, -2, 0]]
    assert (one.lower.tolist(), one.upper.tolist()) == ([0], [np.inf])
    two = LinearConstraint(np.eye(3)[:2], upper=0.4)
    assert (two.lower.tolist(), two.upper.tolist()) == ([-np.inf] * 2, [0.4, 0.4])


@pytest.mark.parametrize(
    "constraints",
    [
        LinearConstraint([[1, -2, 0], [0, 0, 1]], [0, -np.inf], [np.inf, 0.3]),
        [LinearConstraint([1, -2, 0], 0), LinearConstraint([0, 0, 1], upper=0.3)],
        scipy.optimize.LinearConstraint([[1, -2, 0], [0, 0, 1]], [0, -np.inf], [np.inf, 0.3]),
        scipy.optimize.LinearConstraint(
            scipy.sparse.csr_array([[1.0, -2.0, 0.0], [0.0, 0.0, 1.0]]), [0, -np.inf], [np.inf, 0.3]
        ),
        lambda alpha: [alpha[0] >= 2 * alpha[1], alpha[2] <= 0.3],
        lambda alpha: cp.hstack([2 * alpha[1] - alpha[0], alpha[2] - 0.3]) <= 0,
    ],
    ids=["arrays", "sequence", "scipy", "scipy, sparse", "cvxpy", "one constraint of cvxpy"],
)
def test_every_form_says_the_same(constraints):
    np.testing.assert_allclose(min_norm(EYE, constraints=constraints), [7 / 15, 7 / 30, 3 / 10], atol=1e-14)


@pytest.mark.parametrize(
    ("function", "lower", "upper"),
    [
        (lambda a: a[0] - a[1] == 0.1, 0.1, 0.1),
        (lambda a: a[0] - a[1] <= 0.1, -np.inf, 0.1),
        (lambda a: a[0] - a[1] >= 0.1, -np.inf, -0.1),  # cvxpy turns it round
        (lambda a: cp.NonNeg(a[0] - a[1] - 0.1), 0.1, np.inf),
        (lambda a: cp.Zero(a[0] - a[1] - 0.1), 0.1, 0.1),
    ],
)
def test_kinds_of_cvxpy_constraints(function, lower, upper):
    found = as_arrays(function, 2)
    np.testing.assert_allclose(np.abs(found.matrix), [[1, 1]])
    np.testing.assert_allclose((*found.lower, *found.upper), (lower, upper), atol=1e-15)


def test_what_is_not_affine_names_the_solvers_for_it():
    with pytest.raises(ValueError, match="is not affine in α alone: use solver='cvxpy' or, to differentiate"):
        min_norm(EYE, constraints=lambda alpha: [cp.norm(alpha) <= 0.6])
    with pytest.raises(ValueError, match="is not affine in α alone"):
        min_norm(EYE, constraints=lambda alpha: [alpha[0] >= cp.Variable()])


@pytest.mark.parametrize("solver", ["cvxpy", "cvxpylayers"])
def test_what_is_not_affine_is_for_the_conic_solvers(solver):
    """Within a ball around 1/3: α − 1/3 is as long as it may be, in the direction of −(1, 2, 4) less its mean."""
    m = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    alpha = min_norm(m, constraints=lambda alpha: [cp.norm(alpha - 1 / 3) <= 0.1], solver=solver)
    assert np.linalg.norm(alpha - 1 / 3) == pytest.approx(0.1, abs=1e-6)
    assert alpha[0] > alpha[1] > alpha[2]
    with pytest.raises(ValueError, match="no α with sum 1 meets floor=0, ceiling=1 and the constraints"):
        min_norm(m, constraints=lambda alpha: [cp.norm(alpha) <= 0.1], solver=solver)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LinearConstraint([1, np.nan]), ValueError, "must be finite and of shape"),
        (lambda: LinearConstraint(np.zeros((2, 2, 2))), ValueError, "must be finite and of shape"),
        (
            lambda: LinearConstraint([1, 2], [0, 0]),
            ValueError,
            r"must be numbers or have shape \(1,\)",
        ),
        (lambda: LinearConstraint([1, 2], 1, 0), ValueError, "no α can meet"),
        (lambda: LinearConstraint([1, 2], np.nan), ValueError, "no α can meet"),
        (lambda: min_norm(EYE, constraints=LinearConstraint([1, 2])), ValueError, "on 2 weights, but there are 3"),
        (lambda: min_norm(EYE, constraints=0.5), TypeError, "constraints must be a LinearConstraint, a sequence"),
        (
            lambda: min_norm(EYE, constraints="α_0 ≥ 0.5"),
            TypeError,
            "constraints must be a LinearConstraint, a sequence",
        ),
        (lambda: LinearConstraint([1, 2], np.inf), ValueError, "no α can meet"),
        (lambda: LinearConstraint([1, 2], upper=-np.inf), ValueError, "no α can meet"),
        (lambda: LinearConstraint("abc"), TypeError, "matrix of a constraint must be made of numbers, got 'abc'"),
        (lambda: LinearConstraint([1, 2], "abc"), TypeError, "lower of a constraint must be made of numbers"),
        (lambda: min_norm(EYE, ceiling="a"), TypeError, "ceiling must be a number, got 'a'"),
        (lambda: min_norm(EYE, constraints=lambda alpha: [True]), TypeError, "must return cvxpy constraints, got True"),
    ],
)
def test_bad_constraints(make, error, message):
    with pytest.raises(error, match=message):
        make()
