"""min_norm: known answers, independent oracles, and the optimality conditions on every kind of gradients."""

import math

import numpy as np
import pytest
import quadprog
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from gradbalance.solvers import kkt_residual, min_norm
from tests.gradbalance.gradient_zoo import FAMILIES, WELL_POSED, gramian, unit, zoo
from tests.gradbalance.solvers.min_norm_reference import exact_min_norm, square_norm


def _alpha(gradients, **options):
    return min_norm(gramian(gradients), **options).numpy()


def test_two_gradients_at_120_degrees():
    gradients = np.array([[1.0, 0.0], [-0.5, math.sqrt(3) / 2]])
    np.testing.assert_allclose(_alpha(gradients), [0.5, 0.5], atol=1e-15)


@pytest.mark.parametrize(
    ("first", "second", "cross", "expected"),
    [
        (1.0, 1.0, 0.0, 0.5),
        (4.0, 1.0, 0.0, 0.2),  # (g22 − g12) / (g11 + g22 − 2 g12)
        (4.0, 1.0, -1.0, 2 / 7),
        (4.0, 1.0, 1.5, 0.0),  # the shorter one alone
        (1.0, 4.0, 1.5, 1.0),
        (1.0, 1.0, 1.0, 0.5),  # equal
        (1.0, 1.0 + 2.3e-16, 1.0, 0.5),  # equal up to rounding
        (1.0, 1.0, -1.0, 0.5),  # opposite
        (1e12, 1e-12, 0.0, 1e-24),
    ],
)
def test_two_gradients_closed_form(first, second, cross, expected):
    m = torch.tensor([[first, cross], [cross, second]], dtype=torch.float64)
    np.testing.assert_allclose(min_norm(m), [expected, 1 - expected], rtol=1e-12, atol=1e-40)


def test_orthogonal_rows_weigh_inversely_to_their_square_norms():
    squares = np.array([1e-6, 0.3, 1.0, 40.0, 1e6])
    expected = (1 / squares) / (1 / squares).sum()
    np.testing.assert_allclose(min_norm(torch.diag(torch.from_numpy(squares))), expected, rtol=1e-12)


def test_one_gradient():
    assert min_norm(torch.tensor([[7.0]])).tolist() == [1.0]


def test_duplicates_share_equally():
    a, b = np.eye(2)
    np.testing.assert_allclose(_alpha(np.stack([a, b, a, a])), [1 / 6, 1 / 2, 1 / 6, 1 / 6], atol=1e-14)


@pytest.mark.parametrize("k", [2, 4, 6])
def test_opposite_gradients_cancel(k):
    gradients = unit(np.random.default_rng(0).standard_normal((k // 2, 20)))
    gradients = np.vstack([gradients, -gradients])
    np.testing.assert_allclose(_alpha(gradients), np.full(k, 1 / k), atol=1e-12)  # the least-norm of all answers


def test_zero_rows_leave_the_problem():
    gradients = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1e-21]])
    np.testing.assert_allclose(_alpha(gradients), [0, 0.2, 0, 0.8, 0], atol=1e-15)


def test_small_rows_do_not_leave_the_problem():
    gradients = np.diag([1.0, 1e-15])
    np.testing.assert_allclose(_alpha(gradients), [1e-30, 1.0], rtol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_all_rows_zero(k):
    assert min_norm(torch.zeros(k, k)).tolist() == [1 / k] * k


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [3, 5, 16, 64])
def test_optimality_on_the_unit_gramian(family, k):
    rng = np.random.default_rng(k)
    for _ in range(10 if k < 64 else 2):
        m = gramian(unit(FAMILIES[family](rng, k)))
        alpha = min_norm(m)
        assert alpha.min() >= 0
        assert abs(alpha.sum() - 1) < 1e-12
        assert kkt_residual(m, alpha) < 1e-10


@settings(max_examples=300, deadline=None)
@given(zoo(max_k=20, spread=6))
@example(np.diag([1e-6, 1e6, 1.0]))
def test_optimality_with_norms_over_twelve_decades(gradients):
    """On unit gradients to 1e-10; on the raw ones too, unless the large ones cancel by less than rounding can show."""
    raw, normalised = gramian(gradients), gramian(unit(gradients))
    assert kkt_residual(normalised, min_norm(normalised)) < 1e-10
    assert kkt_residual(raw, min_norm(raw)) < 1e-6


@settings(max_examples=100, deadline=None)
@given(zoo(families=WELL_POSED, max_k=20, spread=6))
def test_optimality_with_norms_over_twelve_decades_of_independent_gradients(gradients):
    assert kkt_residual(gramian(gradients), min_norm(gramian(gradients))) < 1e-12


def _wide_integers(rng, k, p):
    """Gradients whose Gramian holds no rounding error: small integers times powers of two, norms over 2^±20."""
    gradients = rng.integers(-3, 4, (k, p)).astype(float) * 2.0 ** rng.integers(-20, 21, (k, 1))
    return gradients[np.abs(gradients).sum(1) > 0]


@settings(max_examples=100, deadline=None)
@given(k=st.integers(2, 5), extra=st.integers(0, 5), seed=st.integers(0, 2**32 - 1))
def test_raw_gradients_against_rational_arithmetic(k, extra, seed):
    gradients = _wide_integers(np.random.default_rng(seed), k, k + extra)
    m = gradients @ gradients.T
    assume(len(gradients) > 0 and np.linalg.matrix_rank(unit(gradients)) == len(gradients))
    best = square_norm(m, exact_min_norm(m))
    alpha = min_norm(torch.from_numpy(m)).numpy()
    alpha[alpha.argmax()] -= alpha.sum() - 1  # judge the norm, not the rounding of the sum
    assert best <= square_norm(m, alpha) * (1 + 1e-15)
    assert float(square_norm(m, alpha) / best - 1) < 1e-9


@settings(max_examples=100, deadline=None)
@given(k=st.integers(2, 5), p=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_dependent_unscaled_integers_against_rational_arithmetic(k, p, seed):
    gradients = np.random.default_rng(seed).integers(-2, 3, (k, p)).astype(float)
    gradients = gradients[np.abs(gradients).sum(1) > 0]
    assume(len(gradients) > 0)
    m = gradients @ gradients.T
    expected = np.array([float(a) for a in exact_min_norm(m)]) @ gradients
    np.testing.assert_allclose(_alpha(gradients) @ gradients, expected, atol=1e-7)


@settings(max_examples=100, deadline=None)
@given(zoo())
def test_same_point_as_scipy_nnls(gradients):
    gradients = unit(gradients)
    gradients = gradients[np.abs(gradients).sum(1) > 0]
    assume(len(gradients) > 0)
    # ‖[Gᵀ; 1ᵀ] y − e‖ over y ≥ 0, then divided by the sum, is the same problem.
    y, _ = nnls(np.vstack([gradients.T, np.ones(len(gradients))]), np.append(np.zeros(gradients.shape[1]), 1.0))
    np.testing.assert_allclose(_alpha(gradients) @ gradients, y / y.sum() @ gradients, atol=1e-7)


def _quadprog(m, floor=0.0):
    k = len(m)
    constraints = np.hstack([np.ones((k, 1)), np.eye(k)])
    return quadprog.solve_qp(m, np.zeros(k), constraints, np.append(1.0, np.full(k, floor)), meq=1)[0]


@settings(max_examples=100, deadline=None)
@given(zoo(families=WELL_POSED), st.floats(0, 0.99))
def test_same_weights_as_quadprog(gradients, share):
    m = gramian(unit(gradients))
    floor = share / len(m)
    np.testing.assert_allclose(min_norm(m), _quadprog(m.numpy()), atol=1e-7)
    np.testing.assert_allclose(min_norm(m, floor=floor), _quadprog(m.numpy(), floor), atol=1e-7)


@settings(max_examples=200, deadline=None)
@given(zoo(), st.floats(0, 1), st.booleans())
def test_floor(gradients, share, normalise):
    m = gramian(unit(gradients) if normalise else gradients)
    floor = share / len(m)
    alpha = min_norm(m, floor=floor)
    active = m.diagonal() > 0
    assert (alpha[active] >= floor * (1 - 1e-12)).all()
    assert (alpha[~active] == 0).all() or not active.any()
    assert abs(alpha.sum() - 1) < 1e-12
    assert kkt_residual(m, alpha, floor=floor) < 1e-9


def test_floor_of_one_over_k_is_uniform():
    assert _alpha(np.diag([1.0, 2.0, 3.0]), floor=1 / 3) == pytest.approx([1 / 3] * 3, abs=1e-15)


@settings(max_examples=200, deadline=None)
@given(zoo(families=tuple(f for f in FAMILIES if f != "nearly duplicated")), st.randoms())
def test_permutation_equivariant(gradients, random):
    m = gramian(unit(gradients))
    order = list(range(len(m)))
    random.shuffle(order)
    np.testing.assert_allclose(min_norm(m[order][:, order]), min_norm(m)[order], atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(zoo(spread=3), st.integers(-60, 60))
def test_a_common_factor_changes_nothing(gradients, exponent):
    m = gramian(gradients)
    assert torch.equal(min_norm(m * 4.0**exponent), min_norm(m))


def test_any_floating_dtype_in_float64_out():
    m = gramian(np.array([[2.0, 0.0], [0.0, 1.0]]))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        alpha = min_norm(m.to(dtype))
        assert alpha.dtype == torch.float64
        assert alpha.tolist() == pytest.approx([0.2, 0.8])


@settings(max_examples=100, deadline=None)
@given(zoo())
def test_rounding_of_float32_inner_products_is_no_obstacle(gradients):
    """Such a Gramian may have negative eigenvalues of size 1e-7: the answer is as good as the input."""
    m = gramian(unit(gradients).astype(np.float32))
    alpha = min_norm(m)
    assert abs(alpha.sum() - 1) < 1e-12
    assert kkt_residual(m.double(), alpha) < 1e-5


def test_the_input_is_not_changed():
    m = gramian(unit(FAMILIES["random"](np.random.default_rng(0), 8)))
    before = m.clone()
    min_norm(m, floor=0.1)
    assert torch.equal(m, before)


@pytest.mark.parametrize("floor", [-0.1, 0.51, math.nan])
def test_floor_out_of_range(floor):
    with pytest.raises(ValueError, match=r"floor must be in \[0, 1/K\] = \[0, 0\.5\] for K = 2, got"):
        min_norm(torch.eye(2), floor=floor)


def test_unknown_solver():
    with pytest.raises(ValueError, match="one of 'exact', 'cvxpy', 'cvxpylayers', 'enumeration', got 'slsqp'"):
        min_norm(torch.eye(2), solver="slsqp")


def test_kkt_residual_of_known_points():
    m = torch.eye(2, dtype=torch.float64)
    assert kkt_residual(m, torch.tensor([0.5, 0.5])) == pytest.approx(0, abs=1e-15)
    # d = (.75, .25), ⟨g, d⟩ − ‖d‖² = (.125, −.375)
    assert kkt_residual(m, torch.tensor([0.75, 0.25])) == pytest.approx(0.375)
    assert kkt_residual(m, torch.tensor([0.75, 0.25]), floor=0.25) == pytest.approx(0.5)
    assert kkt_residual(m, torch.tensor([0.4, 0.4])) == pytest.approx(0.2)  # does not sum to 1
    assert kkt_residual(m, torch.tensor([0.5, 0.5]), floor=0.5) == 0


@settings(max_examples=50, deadline=None)
@given(zoo(families=("many parameters",), min_k=2), st.integers(0, 10**6), st.floats(1e-4, 0.1))
def test_kkt_residual_sees_any_other_point(gradients, index, size):
    m = gramian(unit(gradients))
    alpha = min_norm(m)
    corner = torch.nn.functional.one_hot(torch.tensor(index % len(m)), len(m)).to(torch.float64)
    moved = alpha + size * (corner - alpha)
    if (moved - alpha).abs().max() > 1e-6:
        assert kkt_residual(m, moved) > 1e-9


def test_two_nearly_parallel_gradients_that_differ_in_length_only():
    """‖g_1 − g_2‖² is below rounding, but which one is shorter is not."""
    m = torch.tensor([[1.0, 1.0 + 1e-9], [1.0 + 1e-9, 1.0 + 2e-9]], dtype=torch.float64)
    assert min_norm(m).tolist() == [1.0, 0.0]
    assert min_norm(m.flip(0, 1)).tolist() == [0.0, 1.0]


def test_floor_where_the_mapped_vectors_vanish():
    gradients = np.array([[1.0, 2.0], [-1.0, -2.0], [3.0, 0.0], [-3.0, 0.0]])
    assert _alpha(gradients, floor=0.25).tolist() == [0.25] * 4
    assert _alpha(gradients, floor=0.2) == pytest.approx([0.25] * 4, abs=0.05)
    np.testing.assert_allclose(_alpha(gradients, floor=0.2) @ gradients, 0, atol=1e-12)
