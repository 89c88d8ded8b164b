"""Closures, and LBFGS, which evaluates them often: one coefficient vector serves a whole step."""

import copy
import math

import pytest
import torch
from torch.optim import LBFGS, SGD

from gradbalance import MarbleOptimizer, NonFiniteError
from gradbalance.state import KEY
from tests.gradbalance.identical import identical
from tests.gradbalance.models import OneTrunk, TwoHeads, batches, parameters_of

LINE_SEARCHES = [None, "strong_wolfe"]


def lbfgs(parameters, line_search=None, **options):
    return MarbleOptimizer(LBFGS(parameters, lr=0.5, max_iter=6, line_search_fn=line_search), **options)


@pytest.mark.parametrize("line_search", LINE_SEARCHES)
@pytest.mark.parametrize("refresh_every", [1, 2])
def test_lbfgs_minimises_the_weighted_sum_that_its_first_evaluation_chose(line_search, refresh_every):
    """The same as torch's LBFGS on Σ λ_k L_k with this λ as constants."""
    torch.manual_seed(0)
    model = OneTrunk()
    plain = copy.deepcopy(model)
    optimizer = lbfgs(model.parameters(), line_search, refresh_every=refresh_every)
    inner = LBFGS(plain.parameters(), lr=0.5, max_iter=6, line_search_fn=line_search)
    for x in batches(3):
        returned = optimizer.step(lambda x=x: model.losses(x))
        coefficients = optimizer.coefficients

        def closure(x=x, coefficients=coefficients):
            inner.zero_grad()
            loss = sum(c * loss for c, loss in zip(coefficients, plain.losses(x), strict=True))
            loss.backward()
            return loss

        torch.testing.assert_close(torch.as_tensor(returned), torch.as_tensor(inner.step(closure)))
        torch.testing.assert_close(parameters_of(model), parameters_of(plain), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("returned", [list, sum], ids=["returns the losses", "returns their sum"])
@pytest.mark.parametrize(
    "inner", [lambda p: SGD(p, lr=0.05), lambda p: LBFGS(p, lr=0.5, max_iter=6)], ids=["sgd", "lbfgs"]
)
@pytest.mark.parametrize("model", [OneTrunk, TwoHeads])
def test_a_closure_in_torchs_habit_calls_backward_itself(model, inner, returned):
    """``zero_grad``, ``backward``, ``return``: no second backward, and the steps of a closure that returns losses."""
    torch.manual_seed(0)
    one = model()
    two = copy.deepcopy(one)
    first = MarbleOptimizer(inner(one.parameters()), refresh_every=2)
    second = MarbleOptimizer(inner(two.parameters()), refresh_every=2)
    for x in batches(3):

        def closure(x=x):
            second.zero_grad()
            losses = two.losses(x)
            second.backward(losses)
            return returned(losses)

        first.step(lambda x=x: one.losses(x))
        second.step(closure)
        torch.testing.assert_close(parameters_of(one), parameters_of(two))
        assert torch.equal(first.coefficients, second.coefficients)
    assert second.param_groups[0][KEY]["step"] == 3


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("line_search", LINE_SEARCHES)
@pytest.mark.parametrize("step", [0, 1])
def test_a_nan_at_a_later_evaluation_of_lbfgs_undoes_the_step(line_search, nonfinite, step):
    torch.manual_seed(0)
    model = OneTrunk()
    optimizer = lbfgs(model.parameters(), line_search, nonfinite=nonfinite, objective_names=["a", "b", "c"])
    data, evaluations = batches(step + 2), 0
    for x in data[:step]:
        optimizer.step(lambda x=x: model.losses(x))
    parameters, before = parameters_of(model), copy.deepcopy(optimizer.state_dict())

    def closure():
        nonlocal evaluations
        evaluations += 1
        a, b, c = model.losses(data[step])
        return [a, b * (math.nan if evaluations == 3 else 1.0), c]

    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match="'b'"):
            optimizer.step(closure)
    else:
        optimizer.step(closure)
    assert evaluations >= 3
    assert torch.equal(parameters_of(model), parameters)
    assert identical(optimizer.state_dict(), before)
    optimizer.step(lambda: model.losses(data[-1]))  # and training goes on
    assert parameters_of(model).isfinite().all()
    assert not torch.equal(parameters_of(model), parameters)
