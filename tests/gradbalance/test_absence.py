"""Objectives and parameters that come late, leave, return, freeze and thaw: nobody is left behind."""

import copy

import pytest
import torch
from torch import nn

from gradbalance import BalancedOptimizer, MarbleOptimizer, NonFiniteError
from gradbalance.balancers import Grouped, Marble
from gradbalance.solvers import LinearConstraint
from gradbalance.state import KEY
from tests.gradbalance.models import LinearLosses


def make(rows, **options):
    problem = LinearLosses(rows)
    return problem, MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.0), **options)


def step(optimizer, losses):
    optimizer.zero_grad()
    report = optimizer.backward(losses)
    optimizer.step()
    return report


ORTHOGONAL = [[1.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 2.0]]


def test_a_first_step_alone_decides_nothing_for_the_others():
    problem, optimizer = make(ORTHOGONAL[:2])
    report = step(optimizer, {"a": problem.losses()[0], "b": None})
    assert problem.x.grad.tolist() == [1.0, 0.0, 0.0]
    assert report.absent == ["b"]
    for _ in range(3):  # the first real solve sets the average
        report = step(optimizer, dict(zip("ab", problem.losses(), strict=True)))
        assert report.weights.tolist() == pytest.approx([0.5, 0.5])
        assert report.coefficients.tolist() == pytest.approx([1.25, 0.3125])


def test_an_absent_objective_cannot_bring_the_others_to_a_stop():
    problem, optimizer = make(ORTHOGONAL[:2])
    a, b = problem.losses()
    report = step(optimizer, {"a": a, "b": b * 0})
    assert report.weights.tolist() == [1.0, 0.0]
    for _ in range(4):
        step(optimizer, {"b": problem.losses()[1]})
        assert problem.x.grad.norm() > 0.5


def test_a_refresh_waits_for_objectives_that_no_solve_has_seen():
    """a is only in the first micro-batch, b only in the second: one measured micro-batch would never see b."""
    problem, optimizer = make(ORTHOGONAL[:2], refresh_micro_batches=1, ema_decay=0.0)
    optimizer.backward([problem.losses()[0], None], accumulate=True)
    report = optimizer.backward([None, problem.losses()[1]])
    assert report.weights.tolist() == pytest.approx([0.5, 0.5])
    torch.testing.assert_close(problem.x.grad, torch.tensor([1.25, 1.25, 0.0], dtype=torch.float64))


def test_the_first_micro_batch_may_be_empty():
    problem, optimizer = make(ORTHOGONAL[:2])
    optimizer.backward([None, None], accumulate=True)
    report = optimizer.backward(problem.losses())
    assert report.refreshed
    torch.testing.assert_close(problem.x.grad, torch.tensor([1.25, 1.25, 0.0], dtype=torch.float64))


def test_a_new_objective_in_a_later_micro_batch_of_an_amortised_step_is_measured():
    problem, optimizer = make(ORTHOGONAL, refresh_every=100, objective_names=["a", "b", "c"])
    a, _, c = problem.losses()
    step(optimizer, {"a": a, "c": c})
    a, _, c = problem.losses()
    optimizer.zero_grad()
    optimizer.backward({"a": a, "c": c}, accumulate=True)
    report = optimizer.backward({"b": problem.losses()[1]})
    assert report.refreshed
    assert problem.x.grad[1] > 0


def test_a_thawed_parameter_is_balanced_at_once():
    w, v = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = MarbleOptimizer(torch.optim.SGD([w, v], lr=0.0), refresh_every=100)
    for t in range(4):
        v.requires_grad_(t >= 2)
        report = step(optimizer, [(w + v)[0], 1000 * (w + v)[1]])
        assert report.refreshed is (t in (0, 2))
        if t >= 2:
            torch.testing.assert_close(v.grad, w.grad)


def test_amortised_reports_leave_out_who_is_absent():
    problem, optimizer = make([[1.0, 0.0], [-0.6, 0.8]], refresh_every=100)
    step(optimizer, problem.losses())
    report = step(optimizer, [problem.losses()[0], None])
    assert report.update_cosines.isnan().tolist() == [False, True]
    assert report.min_cosine == pytest.approx(1.0)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("amortised", [False, True])
def test_a_nonfinite_gradient_cannot_be_applied_by_a_second_step(nonfinite, amortised):
    problem = LinearLosses(ORTHOGONAL[:2])
    optimizer = MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.1), nonfinite=nonfinite, refresh_every=100)
    if amortised:
        step(optimizer, problem.losses())
    optimizer.zero_grad()
    before = problem.x.detach().clone()
    a, b = problem.losses()

    def attempt():
        optimizer.backward([a * float("nan"), b])
        optimizer.step()

    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match="objective_0"):
            attempt()
    else:
        attempt()
    optimizer.step()
    assert torch.equal(problem.x, before)


def test_an_infinite_gradient_of_a_finite_regularizer_is_named():
    problem, optimizer = make(ORTHOGONAL[:2])
    with pytest.raises(NonFiniteError, match="'regularizer'"):
        optimizer.backward(problem.losses(), regularizer=problem.x.square().sum().sqrt())


def test_another_methods_checkpoint_is_refused_and_loads_nothing():
    problem, optimizer = make(ORTHOGONAL[:2])
    step(optimizer, problem.losses())
    other = BalancedOptimizer(torch.optim.SGD([problem.x], lr=0.5), "mgda")
    with pytest.raises(ValueError, match="checkpoint's balancer is Marble, this optimizer's is MGDA"):
        other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.5


def test_wrapping_an_inner_optimizer_that_was_resumed_keeps_its_balancing_state():
    problem, optimizer = make(ORTHOGONAL[:2], refresh_every=100)
    step(optimizer, problem.losses())
    inner = torch.optim.SGD([problem.x], lr=0.0)
    inner.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = MarbleOptimizer(inner, refresh_every=100)
    assert torch.equal(again.coefficients, optimizer.coefficients)
    assert not step(again, problem.losses()).refreshed
    fresh = BalancedOptimizer(inner, "pcgrad")
    assert fresh.param_groups[0][KEY]["step"] == 0


@pytest.mark.parametrize("form", [list, torch.stack])
def test_a_head_that_starts_at_zero_does_not_take_the_trunk_out_of_balance(form):
    """Its loss has a zero gradient for the trunk in the first step only; the next refresh is far away."""
    torch.manual_seed(0)
    trunk, policy, value = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
    nn.init.zeros_(value.weight)
    parameters = [*trunk.parameters(), *policy.parameters(), *value.parameters()]
    optimizer = MarbleOptimizer(torch.optim.SGD(parameters, lr=1e-3), refresh_every=10)
    x = torch.randn(16, 4)
    for _ in range(3):
        features = torch.tanh(trunk(x))
        losses = [policy(features).square().mean(), (value(features) - 1000 * x[:, :1]).square().mean()]
        expected = torch.autograd.grad(losses[0], trunk.weight, retain_graph=True)[0]
        optimizer.zero_grad()
        optimizer.backward(form(losses))
        optimizer.step()
        assert optimizer.coefficients.tolist() == [1.0, 0.0]
        torch.testing.assert_close(trunk.weight.grad, expected)


@pytest.mark.parametrize("how", ["added", "unfrozen"])
def test_parameters_that_come_between_micro_batches_are_refused(how):
    w, v = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=how == "added")
    optimizer = MarbleOptimizer(torch.optim.SGD([w] if how == "added" else [w, v], lr=0.1))
    optimizer.backward([w[0], w[1]], accumulate=True)
    if how == "added":
        optimizer.add_param_group({"params": [v]})
    v.requires_grad_()
    with pytest.raises(RuntimeError, match=r"added or unfrozen between the micro-batches.*zero_grad"):
        optimizer.backward([(w + v)[0], (w + v)[1]])
    optimizer.zero_grad()
    optimizer.backward([(w + v)[0], (w + v)[1]])
    torch.testing.assert_close(v.grad, w.grad)


@pytest.mark.parametrize("ema_decay", [0.0, 0.7])
@pytest.mark.parametrize(
    "balancer",
    [Grouped("marble", [[0, 1], [2]]), Marble(ceiling=0.4), Marble(constraints=LinearConstraint([1, 0, 0], 0.2))],
    ids=["grouped", "ceiling", "constraint"],
)
def test_what_a_solve_leaves_to_absent_objectives_goes_to_the_present_ones(balancer, ema_decay):
    """Weights on the simplex stay there, so that no step is shorter for an absence."""
    x = torch.zeros(3, requires_grad=True)
    optimizer = BalancedOptimizer(torch.optim.SGD([x], lr=0.0), balancer, ema_decay=ema_decay)
    for absent in ({}, {0}, {1}, {}, {2}):
        optimizer.zero_grad()
        optimizer.backward([None if k in absent else (x[k] - 1).square() for k in range(3)])
        optimizer.step()
        weights = optimizer.param_groups[0][KEY]["weights"]
        assert sum(weights) == pytest.approx(1.0)
