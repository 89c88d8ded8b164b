"""Arguments that make no sense: each is named with its value, and leaves nothing behind."""

import copy
import math

import pytest
import torch
from torch.optim import SGD

from gradbalance import MarbleOptimizer
from gradbalance.balancers import Marble, get
from gradbalance.state import KEY
from tests.gradbalance import by_hand
from tests.gradbalance.identical import identical
from tests.gradbalance.linear_problem import ACTIVE, Problem, both_modes, make, steps
from tests.gradbalance.models import OneTrunk, batches, flat_gradient


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preference": "ab"}, r"preference.*'ab'"),
        ({"preference": 2.0}, r"preference.*2\.0"),
        ({"preference": ["a", "b"]}, r"preference.*'a'"),
        ({"preference": [1.0, 0.0]}, r"preference.*0\.0"),
        ({"preference": [1.0, math.nan]}, r"preference.*nan"),
        ({"floor": "high"}, r"floor.*'high'"),
        ({"floor": math.nan}, r"floor.*nan"),
        ({"solver": "exakt"}, r"solver.*'exakt'"),
        ({"objective_names": 5}, r"objective_names.*5"),
        ({"objective_names": [["a"], ["b"]]}, r"objective_names.*\['a'\]"),
        ({"shared_parameters": ["w"]}, r"shared_parameters.*'?w'?"),
        ({"shared_parameters": 3}, r"shared_parameters.*3"),
        ({"refresh_every": 0}, r"refresh_every.*integer.*got 0"),
        ({"refresh_every": True}, r"refresh_every.*integer.*got True"),
        ({"refresh_every": 1.5}, r"refresh_every.*integer.*got 1\.5"),
        ({"refresh_micro_batches": 1.5}, r"refresh_micro_batches.*got 1\.5"),
        ({"ema_decay": "a"}, r"ema_decay.*'a'"),
        ({"ema_decay": math.nan}, r"ema_decay.*nan"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named_with_its_value(options, message):
    problem = Problem(ACTIVE)
    with pytest.raises((TypeError, ValueError), match=message):
        MarbleOptimizer(SGD([problem.x], lr=0.1), **options)


@pytest.mark.parametrize("regularize", [False, True])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(
    ("make_balancer", "message"),
    [
        (lambda: Marble(preference=[1.0, 2.0, 3.0]), "preference has 3 values, but there are 2 objectives"),
        (lambda: get("weighted_sum", weights=[1.0]), "weights has 1 values, but there are 2 objectives"),
        (lambda: Marble(floor=0.75), r"floor.*0\.75"),
        (lambda: get("mgda", normalize="loss"), "normalize='loss' needs losses > 0"),
    ],
    ids=["preference of the wrong length", "weights of the wrong length", "floor above 1/K", "losses that are not > 0"],
)
def test_a_balancer_that_refuses_leaves_no_gradient_behind(make_balancer, message, micro, regularize):
    problem, optimizer = make(ACTIVE, make_balancer())

    def backward(*, accumulate):
        losses = [loss - 1 for loss in problem.losses()]
        optimizer.backward(losses, regularizer=problem.x.sum() if regularize else None, accumulate=accumulate)

    for _ in range(micro - 1):
        backward(accumulate=True)
    with pytest.raises(ValueError, match=message):
        backward(accumulate=False)
    assert problem.x.grad is None
    optimizer.step()  # nothing is pending
    assert torch.equal(problem.x, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("regularize", [False, True])
def test_a_loss_whose_graph_is_gone_leaves_no_gradient_behind(regularize):
    problem, optimizer = make(ACTIVE)
    a, b = (loss.square() for loss in problem.losses())
    b.backward()
    problem.x.grad = None
    with pytest.raises(RuntimeError, match="second time"):
        optimizer.backward([a, b], regularizer=problem.x.sum() if regularize else None)
    assert problem.x.grad is None


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"state": {}},
        {"state": {}, "param_groups": []},
        {"param_groups": [{}], "state": {}},
        {"state": {}, "param_groups": 3},
        [],
        None,
        "checkpoint.pt",
    ],
    ids=str,
)
def test_loading_nonsense_is_explained_and_loads_nothing(state):
    problem, optimizer = make(ACTIVE, lr=0.5)
    steps(problem, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((TypeError, ValueError), match="state_dict"):
        optimizer.load_state_dict(state)
    assert identical(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("names", 5),
        ("coefficients", [1.0]),
        ("weights", ["a", "b"]),
        ("step", "two"),
        ("gramian", [[1.0]]),
        ("balancer", {"foreign": 1}),
    ],
)
def test_loading_a_damaged_balancing_state_is_explained_and_loads_nothing(key, value):
    """It would only be noticed steps later, or never."""
    problem, optimizer = make(ACTIVE, lr=0.5)
    steps(problem, optimizer, 2)
    damaged, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    damaged["param_groups"][0][KEY][key] = value
    with pytest.raises((TypeError, ValueError), match=key):
        optimizer.load_state_dict(damaged)
    assert identical(optimizer.state_dict(), before)


def test_a_plain_states_mistakes_are_torchs_own_errors():
    _, optimizer = make(ACTIVE)
    other = SGD([torch.zeros(1), torch.zeros(1)], lr=0.1)
    with pytest.raises(ValueError, match="parameter group that doesn't match the size"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("losses", "error", "message"),
    [
        (lambda a, b: [a * (1 + 0j), b], (TypeError, ValueError), r"loss of 'a'.*complex.*real"),
        (lambda a, b: torch.stack([a, b]) * (1 + 0j), (TypeError, ValueError), r"complex.*real"),
        (
            lambda a, b: [a, b.reshape(1, 1).expand(2, 1)],
            ValueError,
            r"loss of 'b' must be a scalar, got shape \(2, 1\)",
        ),
        (lambda a, b: [a, 2.0], TypeError, "loss of 'b' must be a tensor or None, got float"),
        (lambda a, b: (loss for loss in (a, b)), TypeError, "losses must be a list, a dict.*got generator"),
        (lambda a, b: {"a": a, "z": b}, ValueError, r"unknown objective\(s\) \['z'\].*objective_names"),
        (lambda a, b: [a], ValueError, r"got 1 losses.*2 objectives.*None"),
    ],
    ids=["complex", "complex tensor", "not a scalar", "float", "generator", "unknown name", "too few"],
)
def test_wrong_losses_are_named_and_leave_nothing_behind(losses, error, message):
    problem, optimizer = make(ACTIVE, objective_names=["a", "b"])
    with pytest.raises(error, match=message):
        optimizer.backward(losses(*problem.losses()), regularizer=problem.x.sum())
    assert problem.x.grad is None
    assert optimizer.coefficients.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("regularizer", "error"),
    [(1.0, (TypeError, ValueError)), (torch.ones(2), ValueError), (torch.tensor(1j), (TypeError, ValueError))],
    ids=["float", "not a scalar", "complex"],
)
def test_a_wrong_regularizer_is_named(regularizer, error):
    problem, optimizer = make(ACTIVE)
    with pytest.raises(error, match="regularizer"):
        optimizer.backward(problem.losses(), regularizer=regularizer)
    assert problem.x.grad is None


@both_modes
def test_losses_of_float32_and_float64_mix(refresh_every):
    """Not a mistake: a loss computed in another precision is a loss."""
    torch.manual_seed(0)
    model = OneTrunk()
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.01), refresh_every=refresh_every)
    for x in batches(4):
        twin = copy.deepcopy(model)
        optimizer.zero_grad()
        a, b, c = model.losses(x)
        report = optimizer.backward([a, b.float(), c.bfloat16()], regularizer=model.net[0].bias.sum().float() * 0)
        assert report.losses.dtype == torch.float64
        assert report.losses[0] == a.item()  # not rounded to the others' precision
        rows = by_hand.gradients(twin.parameters(), twin.losses(x))
        expected = by_hand.combine(rows, report.coefficients)
        tolerance = 1e-9 if report.refreshed else 0.01  # λ is rounded to the loss's own precision
        error = flat_gradient(model.parameters()) - torch.cat([e.reshape(-1) for e in expected])
        assert error.norm() <= tolerance * flat_gradient(model.parameters()).norm()
        optimizer.step()
