"""NaN and infinity: the objective is named, nothing moves, and training goes on."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from gradbalance import AffineLoss, MarbleOptimizer, NonFiniteError
from gradbalance.state import KEY
from tests.gradbalance.identical import identical, snapshot
from tests.gradbalance.linear_problem import ACTIVE, every_balancer, make, steps
from tests.gradbalance.models import TwoHeads, batches


class Fragile(nn.Module):
    """A trunk, heads, and a spot for each whose gradient is infinite while the loss stays finite: the root at 0."""

    def __init__(self):
        super().__init__()
        self.model = TwoHeads()
        self.at = None

    def broken(self, parameter):
        return (0.0 * parameter.sum()).sqrt()

    def losses(self, x):
        losses = self.model.losses(x)
        if self.at == "loss is NaN":
            losses[1] = losses[1] * math.nan
        elif self.at == "loss is infinite":
            losses[1] = losses[1] + math.inf
        elif self.at == "gradient":
            losses[1] = losses[1] + self.broken(self.model.trunk[0].weight)
        elif self.at == "gradient of a head":
            losses[1] = losses[1] + self.broken(self.model.heads[1].weight)
        return dict(zip("abc", losses, strict=True))

    def regularizer(self):
        weight = self.model.trunk[0].weight
        return {
            "regularizer is NaN": weight.sum() * math.nan,
            "gradient of the regularizer": self.broken(weight),
        }.get(self.at)


BROKEN = {
    "loss is NaN": "b",
    "loss is infinite": "b",
    "gradient": "b",
    "gradient of a head": "b",
    "regularizer is NaN": "regularizer",
    "gradient of the regularizer": "regularizer",
}


def balanced_step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for i, x in enumerate(micro_batches):
        optimizer.backward(model.losses(x), regularizer=model.regularizer(), accumulate=i + 1 < len(micro_batches))
    optimizer.step()


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize(
    "inner", [lambda p: SGD(p, lr=0.01, momentum=0.9), lambda p: AdamW(p, lr=0.01)], ids=["sgd", "adamw"]
)
@pytest.mark.parametrize("micro", [1, 2], ids=["one batch", "accumulated"])
@pytest.mark.parametrize("phase", ["first step", "refresh", "amortised"])
@pytest.mark.parametrize("at", BROKEN)
def test_what_is_not_finite_is_named_and_moves_nothing(at, phase, micro, inner, nonfinite):
    """A finite loss with an infinite gradient can on amortised steps be seen only in the combined gradient.

    The error then says which losses were in the sum; else it names the one. Training goes on as if nothing had been.
    """
    torch.manual_seed(0)
    model = Fragile()
    clean = copy.deepcopy(model)
    optimizer = MarbleOptimizer(inner(model.parameters()), refresh_every=2, nonfinite=nonfinite)
    other = MarbleOptimizer(inner(clean.parameters()), refresh_every=2)
    data = [batches(micro, seed=t) for t in range(6)]
    start = {"first step": 0, "refresh": 2, "amortised": 3}[phase]
    for micro_batches in data[:start]:
        balanced_step(model, optimizer, micro_batches)
        balanced_step(clean, other, micro_batches)
    before = snapshot(model, optimizer)
    model.at = at
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError) as caught:
            balanced_step(model, optimizer, data[start])
        message = str(caught.value)
        assert f"'{BROKEN[at]}'" in message
        if phase != "amortised" or not at.startswith("gradient"):
            assert not any(f"'{name}'" in message for name in {"a", "b", "c"} - {BROKEN[at]})
        elif at == "gradient":
            assert all(f"'{name}'" in message for name in "abc")
    else:
        balanced_step(model, optimizer, data[start])
    optimizer.step()  # and what was dropped cannot be applied by a second step
    model.at = None
    assert identical(snapshot(model, optimizer), before)
    for micro_batches in data[start:]:
        balanced_step(model, optimizer, micro_batches)
        balanced_step(clean, other, micro_batches)
    assert identical(list(model.parameters()), list(clean.parameters()))


@every_balancer
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_balancer_names_the_broken_objective(value, balancer):
    problem, optimizer = make(ACTIVE, balancer, objective_names=["a", "b"], ema_decay=0.5)
    steps(problem, optimizer, 1)
    before = copy.deepcopy(optimizer.param_groups[0][KEY])
    optimizer.zero_grad()
    with pytest.raises(NonFiniteError, match="'b'"):
        optimizer.backward([problem.losses()[0], problem.losses()[1] * value])
    assert problem.x.grad is None
    assert optimizer.param_groups[0][KEY] == before
    expected = steps(*make(ACTIVE, balancer, ema_decay=0.5), 2)[-1:]
    torch.testing.assert_close(steps(problem, optimizer, 1), expected, rtol=1e-12, atol=1e-15)


def test_all_broken_objectives_are_named():
    problem, optimizer = make([*ACTIVE, [0.0, 1.0, 0.0]], objective_names=["a", "b", "c"])
    a, b, c = problem.losses()
    with pytest.raises(NonFiniteError, match=r"'a', 'c'") as caught:
        optimizer.backward([a * math.nan, b, c * math.inf], regularizer=problem.x.sum() * math.nan)
    assert "'regularizer'" in str(caught.value)
    assert "'b'" not in str(caught.value)


def test_an_infinity_in_an_affine_losss_terms_is_named():
    problem, optimizer = make(ACTIVE)
    terms = torch.stack([p * s for p, s in zip(problem.losses(), (1.0, math.inf), strict=True)])
    with pytest.raises(NonFiniteError, match="'second'"):
        optimizer.backward(AffineLoss(terms, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), names=["first", "second"]))
