"""Objectives that are zero, tiny, constant, absent, equal, opposite or broken; and arguments that make no sense.

Results are finite, an inactive objective stops nobody, a broken one is named, and what failed leaves nothing behind.
"""

import copy
import math

import pytest
import torch
from torch.optim import AdamW

from gradbalance import AffineLoss, BalancedOptimizer
from tests.gradbalance.linear_problem import (
    ACTIVE,
    both_modes,
    every_balancer,
    ignoring_inactive,
    make,
    of_degree_0,
    solving,
    steps,
    those,
)
from tests.gradbalance.models import OneTrunk, batches

# --- Objectives that do nothing ---------------------------------------------------------------------------------------

INACTIVE = {
    "zero gradient": lambda p: 0.0 * p.x.sum(),
    "zero gradient, other value": lambda p: 5.0 + 0.0 * p.x.sum(),
    "gradient relatively zero": lambda p: 1.0 + 1e-30 * p.x.sum(),
    "constant": lambda p: torch.tensor(3.0, dtype=torch.float64),
    "float32 constant": lambda p: torch.tensor(3.0),
    "detached": lambda p: p.x.sum().detach() + 1.0,
    "graph that does not reach the parameters": lambda p: torch.ones((), requires_grad=True) * 1.0,
}


@ignoring_inactive
@both_modes
@pytest.mark.parametrize("where", [0, 2], ids=["first", "last"])
@pytest.mark.parametrize("kind", INACTIVE)
def test_an_inactive_objective_changes_nothing_for_the_others(kind, where, refresh_every, balancer):
    problem, optimizer = make(ACTIVE, balancer, refresh_every=refresh_every)
    alone = steps(problem, optimizer)

    def losses(problem):
        given = problem.losses()
        given.insert(where, INACTIVE[kind](problem))
        return given

    problem, optimizer = make(ACTIVE, balancer, refresh_every=refresh_every)
    torch.testing.assert_close(steps(problem, optimizer, losses=losses), alone, rtol=1e-12, atol=1e-15)
    report = optimizer.report
    if kind != "gradient relatively zero":
        assert report.inactive == [f"objective_{where}"]
        assert report.update_cosines.isnan().nonzero().flatten().tolist() == [where]


@ignoring_inactive
@both_modes
def test_an_absent_objective_changes_no_direction(refresh_every, balancer):
    """The one that never came keeps its share of the simplex; nothing but the length can differ."""
    problem, optimizer = make(ACTIVE, balancer, refresh_every=refresh_every)
    alone = steps(problem, optimizer)
    problem, optimizer = make(ACTIVE, balancer, refresh_every=refresh_every)
    directions = steps(problem, optimizer, losses=lambda p: [None, *p.losses()])
    share = 1 - 1 / 3 if optimizer.balancer.simplex else 1.0
    torch.testing.assert_close(directions, share * alone, rtol=1e-12, atol=1e-15)
    assert optimizer.report.absent == ["objective_0"]
    assert optimizer.coefficients[0] == 0


@every_balancer
@pytest.mark.parametrize("kind", ["zero gradient", "constant", None], ids=str)
def test_nobody_is_frozen_when_an_objective_leaves_or_comes_back(kind, balancer):
    """With averaging: every third step is without objective 2, then it is gone for good, then it is back."""
    rows = [*ACTIVE, [0.3, -0.2, 2.0]]
    problem, optimizer = make(rows, balancer, ema_decay=0.7, refresh_every=2)
    norms = torch.tensor(rows).norm(dim=1)
    for t in range(18):
        gone = t % 3 == 0 if t < 9 else t < 15

        def losses(problem, gone=gone):
            given = problem.losses()
            return [*given[:2], given[2] if not gone else INACTIVE[kind](problem) if kind else None]

        (direction,) = steps(problem, optimizer, 1, losses)
        assert direction.isfinite().all()
        assert direction.norm() > 0.05 * norms.min()
        assert optimizer.coefficients.isfinite().all()
    assert optimizer.report.update_cosines.isfinite().all()


@solving
def test_all_gradients_zero(balancer):
    problem, optimizer = make(ACTIVE, balancer, ema_decay=0.5, refresh_every=2)
    steps(problem, optimizer, 3)
    before = optimizer.coefficients
    assert steps(problem, optimizer, 3, lambda p: [0 * loss for loss in p.losses()]).abs().max() == 0
    assert torch.equal(optimizer.coefficients, before)
    assert steps(problem, optimizer, 1).norm() > 0


# --- Tiny gradients, equal and opposite ones, one alone ---------------------------------------------------------------


@those(lambda entry: entry.degree == 0)
@both_modes
@pytest.mark.parametrize(
    ("size", "dtype"), [(1e-12, torch.float32), (1e-12, torch.float64), (1e-30, torch.float64), (1e12, torch.float32)]
)
def test_the_size_of_all_gradients_together_scales_the_update(size, dtype, refresh_every, balancer):
    rows = torch.tensor([*ACTIVE, [-0.3, -0.2, 2.0]], dtype=torch.float64)
    expected = steps(*make(rows, balancer, refresh_every=refresh_every))
    directions = steps(*make(rows * size, balancer, refresh_every=refresh_every, dtype=dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(directions.double() / size, expected, rtol=tolerance, atol=tolerance)


@both_modes
@pytest.mark.parametrize(("size", "dtype"), [(1e-12, torch.float32), (1e-12, torch.float64), (1e-19, torch.float64)])
def test_marble_serves_one_tiny_gradient_as_it_serves_a_large_one(size, dtype, refresh_every):
    rows = torch.tensor([*ACTIVE, [-0.3, -0.2, 2.0]], dtype=torch.float64)
    tiny = rows * torch.tensor([[1.0], [size], [1.0]], dtype=torch.float64)
    expected = steps(*make(rows, refresh_every=refresh_every))
    problem, optimizer = make(tiny, refresh_every=refresh_every, dtype=dtype)
    directions = steps(problem, optimizer).double()
    cosines = torch.nn.functional.cosine_similarity(directions, expected, dim=1)
    assert cosines.min() > 1 - 1e-6
    assert optimizer.report.inactive == []
    assert optimizer.report.conflicts == 0


@every_balancer
@pytest.mark.parametrize("size", [1e-12, 1e-30])
def test_one_tiny_gradient_keeps_everything_finite(size, balancer):
    problem, optimizer = make([[1.0, 0.5], [-0.5 * size, size]], balancer, ema_decay=0.5, refresh_every=2)
    assert steps(problem, optimizer).isfinite().all()
    assert optimizer.coefficients.isfinite().all()
    assert all(math.isfinite(value) for value in optimizer.report.as_dict().values())


@of_degree_0
@both_modes
def test_one_objective_is_the_inner_optimizer(refresh_every, balancer):
    torch.manual_seed(0)
    model = OneTrunk()
    plain = copy.deepcopy(model)
    optimizer = BalancedOptimizer(AdamW(model.parameters(), lr=0.01), balancer, refresh_every=refresh_every)
    inner = AdamW(plain.parameters(), lr=0.01)
    for x in batches(4):
        optimizer.zero_grad()
        optimizer.backward([sum(model.losses(x))])
        optimizer.step()
        inner.zero_grad()
        sum(plain.losses(x)).backward()
        inner.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@of_degree_0
@both_modes
@pytest.mark.parametrize("copies", [2, 5])
def test_duplicates_agree(copies, refresh_every, balancer):
    row = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    problem, optimizer = make(row.expand(copies, 3), balancer, refresh_every=refresh_every)
    directions = steps(problem, optimizer)
    torch.testing.assert_close(torch.nn.functional.normalize(directions), (row / row.norm()).expand(4, 3))
    assert directions.norm(dim=1).min() > 0.99 * row.norm()
    assert optimizer.report.min_cosine == pytest.approx(1.0)


@solving
@both_modes
def test_a_duplicate_does_not_turn_the_common_direction_of_two_that_agree(refresh_every, balancer):
    """A pair that is served equally is served equally when one comes twice: no conflict appears."""
    problem, optimizer = make([*ACTIVE, ACTIVE[1]], balancer, refresh_every=refresh_every)
    directions = steps(problem, optimizer)
    assert directions.isfinite().all()
    assert (directions @ problem.rows.T).min() > -1e-12


@every_balancer
@both_modes
@pytest.mark.parametrize("ratio", [1.0, 3.0, 1e6])
def test_exact_opposites(ratio, balancer, refresh_every):
    """There is no common direction: the methods that promise no conflict stand still, and nothing is NaN."""
    problem, optimizer = make([[1.0, 2.0], [-ratio, -2 * ratio]], balancer, refresh_every=refresh_every)
    directions = steps(problem, optimizer)
    assert directions.isfinite().all()
    assert optimizer.coefficients.isfinite().all()
    report = optimizer.report
    assert all(math.isfinite(value) for value in report.as_dict().values())
    if balancer in ("marble", "mgda"):
        assert directions.norm(dim=1).max() < 1e-9 * ratio
        assert (report.min_cosine, report.conflicts) == (0.0, 0)


@both_modes
def test_training_leaves_a_standstill_when_the_gradients_turn(refresh_every):
    problem, optimizer = make([[1.0, 2.0], [-1.0, -2.0]], refresh_every=refresh_every, ema_decay=0.7)
    steps(problem, optimizer, 3)
    problem.rows = torch.tensor([[1.0, 2.0], [-1.0, 2.0]], dtype=torch.float64)
    assert steps(problem, optimizer, 3)[-1].norm() > 0.5


@both_modes
def test_a_loss_that_needs_no_grad_is_no_error_in_any_form(refresh_every):
    for given in (
        lambda a, b: [a, torch.tensor(2.0), b],
        lambda a, b: {"a": a, "c": torch.tensor(2), "b": b},
        lambda a, b: AffineLoss(torch.stack([a, b, a.detach()]), torch.eye(3, dtype=torch.float64)[[0, 2, 1]]),
        lambda a, b: torch.stack([a, b.new_tensor(2.0), b]),
    ):
        problem, optimizer = make(ACTIVE, refresh_every=refresh_every)
        directions = steps(problem, optimizer, losses=lambda p, given=given: given(*p.losses()))
        torch.testing.assert_close(directions, steps(*make(ACTIVE, refresh_every=refresh_every)))
        assert optimizer.report.losses.tolist()[1] in (1.0, 2.0)
        assert len(optimizer.report.inactive) == 1


# --- One summed loss by mistake ---------------------------------------------------------------------------------------


@of_degree_0
@pytest.mark.parametrize("names", [None, ["a", "b"]])
def test_a_sum_is_refused_and_a_list_of_one_is_not(names, balancer):
    problem, optimizer = make(ACTIVE, balancer, objective_names=names)
    with pytest.raises(ValueError, match=r"got one scalar loss.*\[loss_a, loss_b\].*can no longer be balanced"):
        optimizer.backward(sum(problem.losses()))
    assert problem.x.grad is None
    problem, optimizer = make(ACTIVE, balancer)
    optimizer.backward([sum(problem.losses())])
    torch.testing.assert_close(problem.x.grad, problem.rows.sum(0))
