"""min_norm with ceiling, constraints, preference and groups: known answers, quadprog, cvxpy and the conditions."""

import math

import numpy as np
import pytest
import quadprog
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradbalance.solvers import LinearConstraint, constrained, kkt_residual, min_norm
from gradbalance.solvers.polytope import simplex_with
from tests.gradbalance.gradient_zoo import FAMILIES, WELL_POSED, gramian, unit, zoo


@st.composite
def options(draw, k):
    """A floor, a ceiling and constraints that some α meets (the even one, or one near it)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chosen = {"floor": draw(st.sampled_from([0.0, 0.3])) / k}
    if draw(st.booleans()):
        chosen["ceiling"] = min(1.0, draw(st.floats(1.0, 3.0)) / k)
    rows = draw(st.integers(0 if "ceiling" in chosen else 1, 3))
    if rows:
        matrix = rng.standard_normal((rows, k))
        even = matrix.mean(axis=1)
        lower = even - rng.choice([0.0, 0.1], rows)
        upper = np.where(rng.random(rows) < 0.3, lower + rng.choice([0.0, 0.3], rows), np.inf)
        chosen["constraints"] = LinearConstraint(matrix, lower, np.maximum(upper, even))
    return chosen


def slack(alpha, floor=0.0, ceiling=1.0, constraints=None):
    """The least room that α leaves."""
    room = [alpha.min() - floor, ceiling - alpha.max(), -abs(alpha.sum() - 1)]
    if constraints is not None:
        value = constraints.matrix @ alpha
        room += [(value - constraints.lower).min(), (constraints.upper - value).min()]
    return min(room)


# --- Known answers ----------------------------------------------------------------------------------------------------


def test_ceiling():
    m = torch.diag(torch.tensor([1.0, 2.0, 4.0]))  # α ∝ (4, 2, 1) / 7 without a ceiling
    assert min_norm(m, ceiling=0.6).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert min_norm(m, ceiling=0.5).tolist() == pytest.approx([0.5, 1 / 3, 1 / 6])
    assert min_norm(m, ceiling=0.4).tolist() == pytest.approx([0.4, 0.4, 0.2])
    assert min_norm(m, ceiling=1 / 3).tolist() == pytest.approx([1 / 3] * 3)


def test_floor_and_ceiling():
    m = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    assert min_norm(m, floor=0.25, ceiling=0.4).tolist() == pytest.approx([0.4, 0.35, 0.25])


def test_an_equation():
    m = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    alpha = min_norm(m, constraints=LinearConstraint([1, -1, 0], 0, 0))
    assert alpha.tolist() == pytest.approx([8 / 19, 8 / 19, 3 / 19])  # min 3 t² + 4 (1 − 2 t)²


def test_preference_is_the_min_norm_point_of_the_scaled_gradients():
    gradients, p = np.random.default_rng(0).standard_normal((4, 9)), np.array([0.5, 1.0, 2.0, 3.0])
    found = min_norm(gramian(gradients), preference=p.tolist())
    np.testing.assert_allclose(found, min_norm(gramian(gradients / p[:, None])), atol=1e-14)
    assert torch.equal(found, min_norm(gramian(gradients), preference=torch.from_numpy(p)))


def test_groups_average_within_and_balance_between():
    gradients = np.random.default_rng(0).standard_normal((5, 9))
    groups = [[3], [0, 4], [1, 2]]
    means = np.stack([gradients[group].mean(axis=0) for group in groups])
    between = min_norm(gramian(means), floor=0.1, ceiling=0.5, preference=[1, 2, 3]).numpy()
    expected = np.array([between[1] / 2, between[2] / 2, between[2] / 2, between[0], between[1] / 2])
    found = min_norm(gramian(gradients), groups=groups, floor=0.1, ceiling=0.5, preference=[1, 2, 3])
    np.testing.assert_allclose(found, expected, atol=1e-14)


def test_a_member_without_gradient_does_not_count_in_its_group():
    m = torch.diag(torch.tensor([0.0, 2.0, 1.0]))
    assert min_norm(m, groups=[[0, 1], [2]]).tolist() == pytest.approx([0, 1 / 3, 2 / 3])


def test_a_group_whose_mean_is_zero_leaves_the_problem():
    gradients = np.array([[1.0, 0.3], [-1.0, -0.3], [0.0, 1.0], [1.0, 0.0]])
    assert min_norm(gramian(gradients), groups=[[0, 1], [2], [3]]).tolist() == pytest.approx([0, 0, 0.5, 0.5])


def test_zero_rows_get_nothing_if_that_can_be():
    m = torch.diag(torch.tensor([0.0, 2.0, 1.0, 1.0]))
    assert min_norm(m, ceiling=0.4).tolist() == pytest.approx([0, 0.2, 0.4, 0.4])
    assert min_norm(m, constraints=LinearConstraint([1, 1, 0, 0], 0.5)).tolist() == pytest.approx([0, 0.5, 0.25, 0.25])


def test_zero_rows_get_the_least_that_ceiling_and_constraints_allow():
    m = torch.diag(torch.tensor([0.0, 2.0, 1.0]))
    assert min_norm(m, constraints=LinearConstraint([1, 0, 0], 0.1)).tolist() == pytest.approx([0.1, 0.3, 0.6])
    assert min_norm(m, ceiling=0.45).tolist() == pytest.approx([0.1, 0.45, 0.45])
    two = torch.diag(torch.tensor([0.0, 2.0, 0.0]))
    assert min_norm(two, ceiling=0.5).tolist() == pytest.approx([0.25, 0.5, 0.25])


def test_all_rows_zero_gives_the_nearest_to_even():
    zero = torch.zeros(3, 3)
    assert min_norm(zero, ceiling=0.5).tolist() == pytest.approx([1 / 3] * 3)
    found = min_norm(zero, constraints=LinearConstraint([1, 0, 0], 0.5))
    assert found.tolist() == pytest.approx([0.5, 0.25, 0.25])


def test_duplicates_share_under_a_ceiling():
    a, b, c = np.eye(3)
    alpha = min_norm(gramian(np.stack([a, b, a, c])), ceiling=0.3)
    np.testing.assert_allclose(alpha, [0.2, 0.3, 0.2, 0.3], atol=1e-12)


@pytest.mark.parametrize("decades", [3, 6, 8, 12])
def test_norms_far_apart_never_lose_the_constraints(decades):
    for seed in range(100):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(2, 12))
        gradients = rng.standard_normal((size, 2 * size)) * 10.0 ** rng.uniform(-decades, 0, (size, 1))
        ceiling = min(1.0, 1.3 / size + 0.2)
        alpha = min_norm(gramian(gradients), ceiling=ceiling).numpy()
        assert alpha.sum() == pytest.approx(1, abs=1e-8)
        assert -1e-9 < alpha.min() <= alpha.max() < ceiling + 1e-9


@pytest.mark.parametrize("short", [1e-3, 1e-8, 1e-12])
def test_a_short_gradient_is_held_at_the_ceiling(short):
    m = torch.diag(torch.tensor([1.0, 1.0, short**2, 1.0], dtype=torch.float64))
    np.testing.assert_allclose(min_norm(m, ceiling=0.4), [0.2, 0.2, 0.4, 0.2], atol=1e-9)
    np.testing.assert_allclose(
        min_norm(m, constraints=LinearConstraint([0, 0, 1, 0], upper=0.4)), [0.2, 0.2, 0.4, 0.2], atol=1e-9
    )


def test_a_conic_solver_that_loses_the_constraints_says_so():
    m = torch.diag(torch.tensor([1.0, 1.0, 1e-14, 1.0], dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"solver='cvxpy' found no α .* use solver='exact'"):
        min_norm(m, ceiling=0.4, solver="cvxpy")


@pytest.mark.parametrize("alpha", [[0.3, 0.3, 0.4, 0.13], [0.1, 0.1, 0.7, 0.1], [0.25, 0.25, 0.25, 0.25]])
def test_the_residual_counts_what_is_missed(alpha):
    m = torch.diag(torch.tensor([1.0, 1.0, 1e-6, 1.0], dtype=torch.float64))
    assert kkt_residual(m, torch.tensor([0.2, 0.2, 0.4, 0.2], dtype=torch.float64), ceiling=0.4) < 1e-9
    assert kkt_residual(m, torch.tensor(alpha), ceiling=0.4) > 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_duplicates_share_alike_to_what_a_ridge_can_tell(seed):
    """Which of the optimal α is the shortest is found by a ridge of 1e-10, against rounding of 1e-16 and some."""
    gradients = unit(np.random.default_rng(seed).standard_normal((6, 60)) + 3 * np.ones(60))[[0, 1, 2, 2, 2, 2]]
    alpha = min_norm(gramian(gradients), ceiling=0.3).numpy()
    np.testing.assert_allclose(alpha[2:], alpha[2:].mean(), atol=1e-4)


# --- The conditions, and other solvers --------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(zoo(min_k=2, max_k=32), st.sampled_from([0.0, 0.3]), st.data())
def test_optimality_on_unit_gradients(gradients, out, data):
    gradients[np.random.default_rng(len(gradients)).random(len(gradients)) < out] = 0.0
    m = gramian(unit(gradients))
    chosen = data.draw(options(len(m)))
    alpha = min_norm(m, **chosen)
    idle = bool((m.diagonal() == 0).any())
    assert slack(alpha.numpy(), **{**chosen, "floor": 0.0 if idle else chosen["floor"]}) > -1e-10
    assert kkt_residual(m, alpha, **chosen) < 1e-9


@settings(max_examples=100, deadline=None)
@given(zoo(families=WELL_POSED, min_k=2, max_k=16, spread=2), st.data())
def test_optimality_on_raw_gradients(gradients, data):
    m = gramian(gradients)
    chosen = data.draw(options(len(m)))
    assert kkt_residual(m, min_norm(m, **chosen), **chosen) < 1e-8


def _quadprog(m, floor=0.0, ceiling=1.0, constraints=None):
    k = len(m)
    rows, least = [np.ones((1, k)), np.eye(k), -np.eye(k)], [[1.0], [floor] * k, [-ceiling] * k]
    if constraints is not None:
        for sign, bound in ((1, constraints.lower), (-1, -constraints.upper)):
            rows.append(sign * constraints.matrix[np.isfinite(bound)])
            least.append(bound[np.isfinite(bound)])
    return quadprog.solve_qp(m, np.zeros(k), np.vstack(rows).T, np.concatenate(least), meq=1)[0]


@settings(max_examples=100, deadline=None)
@given(zoo(families=WELL_POSED[:2], min_k=2, max_k=16), st.data())
def test_same_weights_as_quadprog(gradients, data):
    m = gramian(unit(gradients))
    chosen = data.draw(options(len(m)))
    try:
        expected = _quadprog(m.numpy(), **chosen)
    except ValueError:  # it finds no point where only one is left
        assume(False)
    np.testing.assert_allclose(min_norm(m, **chosen), expected, atol=1e-7)


@pytest.mark.parametrize("solver", ["cvxpy", "cvxpylayers"])
@settings(max_examples=20, deadline=None)
@given(gradients=zoo(families=WELL_POSED[:2], min_k=2, max_k=8), data=st.data())
def test_same_weights_as_the_conic_solvers(solver, gradients, data):
    m = gramian(unit(gradients))
    chosen = data.draw(options(len(m)))
    chosen["preference"] = np.linspace(1, 2, len(m)).tolist()
    np.testing.assert_allclose(min_norm(m, **chosen, solver=solver), min_norm(m, **chosen), atol=1e-4)


@pytest.mark.parametrize("solver", ["cvxpy", "cvxpylayers"])
def test_zero_rows_with_the_conic_solvers(solver):
    m = torch.diag(torch.tensor([0.0, 2.0, 1.0]))
    np.testing.assert_allclose(min_norm(m, ceiling=0.45, solver=solver), [0.1, 0.45, 0.45], atol=1e-6)
    np.testing.assert_allclose(min_norm(m, groups=[[0, 1], [2]], solver=solver), [0, 1 / 3, 2 / 3], atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(zoo(min_k=2, max_k=12, families=tuple(f for f in FAMILIES if f != "nearly duplicated")), st.randoms(), st.data())
def test_permutation_equivariant(gradients, random, data):
    m = gramian(unit(gradients))
    chosen = data.draw(options(len(m)))
    order = list(range(len(m)))
    random.shuffle(order)
    shuffled = dict(chosen)
    if "constraints" in chosen:
        known = chosen["constraints"]
        shuffled["constraints"] = LinearConstraint(known.matrix[:, order], known.lower, known.upper)
    np.testing.assert_allclose(min_norm(m[order][:, order], **shuffled), min_norm(m, **chosen)[order], atol=1e-4)


def test_both_ways_agree():
    """The guessed set against the descent, which is for the problems that the guess does not decide."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        k = int(rng.integers(3, 12))
        m = gramian(unit(FAMILIES["many parameters"](rng, k))).numpy()
        region = simplex_with(np.zeros(k), 1.3 / k, None)
        even = np.full(k, 1 / k)
        fast = constrained.guess_and_correct(m, np.zeros(k), region, even, unique=True)
        assert fast is not None
        slow = constrained._descend(m, np.zeros(k), region, even)
        np.testing.assert_allclose(slow, fast, atol=1e-12)


def test_many_inequalities_in_one_point():
    """Each constraint many times, all meeting in the answer."""
    rng = np.random.default_rng(0)
    for k in (3, 6, 10):
        m = gramian(unit(FAMILIES["shared direction"](rng, k)))
        rows = rng.standard_normal((5 * k, k))
        meet = LinearConstraint(np.vstack([rows, rows, np.eye(k)]), np.append(np.tile(rows.mean(1), 2), [1 / k] * k))
        alpha = min_norm(m, ceiling=1 / k, constraints=meet)
        np.testing.assert_allclose(alpha, np.full(k, 1 / k), atol=1e-12)


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["exact", "cvxpy", "cvxpylayers"])
def test_constraints_that_no_weights_meet(solver):
    with pytest.raises(ValueError, match=r"no α with sum 1 meets floor=0\.1, ceiling=0\.6 and the constraints"):
        min_norm(torch.eye(3), floor=0.1, ceiling=0.6, constraints=LinearConstraint([1, 1, 0], 0.95), solver=solver)


@pytest.mark.parametrize("ceiling", [0.0, 0.33, math.nan])
def test_ceiling_out_of_range(ceiling):
    with pytest.raises(ValueError, match=r"ceiling must be at least 1/K = 0\.333333 for K = 3, got"):
        min_norm(torch.eye(3), ceiling=ceiling)


@pytest.mark.parametrize(
    "preference", ["abc", 2.0, [1, 2], [1, 2, 0], [1, 2, math.inf], [1, 2, None], torch.tensor([1.0, -1.0, 2.0])]
)
def test_bad_preference(preference):
    with pytest.raises(ValueError, match="preference must hold 3 finite numbers > 0, got"):
        min_norm(torch.eye(3), preference=preference)


@pytest.mark.parametrize(
    "groups", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2], []], [[0], [1], [3]], [0, 1, 2], [[0.0], [1], [2]], "abc", []]
)
def test_bad_groups(groups):
    with pytest.raises(ValueError, match=r"groups must be non-empty lists, .* that hold each of 0 … 2 once, got"):
        min_norm(torch.eye(3), groups=groups)


def test_kkt_residual_sees_what_is_wrong():
    m = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    right = torch.tensor([0.4, 0.4, 0.2])
    assert kkt_residual(m, right, ceiling=0.4) < 1e-7
    assert kkt_residual(m, torch.tensor([0.4, 0.35, 0.25]), ceiling=0.4) > 0.01
    assert kkt_residual(m, torch.tensor([4 / 7, 2 / 7, 1 / 7]), ceiling=0.4) > 0.01  # breaks the ceiling
    assert kkt_residual(m, right, groups=[[0, 2], [1]]) > 0.01  # a group whose members differ
    idle = torch.diag(torch.tensor([0.0, 1.0]))
    assert kkt_residual(idle, torch.tensor([0.0, 1.0]), constraints=LinearConstraint([1, 0], 0.2)) == math.inf
