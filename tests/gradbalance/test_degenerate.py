"""Objectives that are zero, tiny, constant, absent, equal, opposite or broken; and arguments that make no sense.

Results are finite, an inactive objective stops nobody, a broken one is named, and what failed leaves nothing behind.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from gradbalance import AffineLoss, BalancedOptimizer, MarbleOptimizer, NonFiniteError
from gradbalance.balancers import Marble, available, get
from gradbalance.state import KEY
from tests.gradbalance import by_hand
from tests.gradbalance.balancers.catalogue import EVERY
from tests.gradbalance.identical import identical, snapshot
from tests.gradbalance.models import LinearLosses, OneTrunk, TwoHeads, batches, flat_gradient


def those(promise=lambda entry: True):
    """The balancers that promise something; not those whose options say how many objectives there are, or whose last
    objective is of another kind."""
    names = [name for name in available() if name not in ("sequential", "grouped", "common_part")]
    return pytest.mark.parametrize("balancer", [name for name in names if promise(EVERY[name])])


every_balancer = those()
solving = those(lambda entry: entry.solves)
ignoring_inactive = those(lambda entry: entry.drops_zero)
of_degree_0 = those(lambda entry: entry.degree == 0 and entry.one == 1)  # one objective alone has λ = 1
both_modes = pytest.mark.parametrize("refresh_every", [1, 3], ids=["exact", "amortised"])


class Problem(LinearLosses):
    """Linear losses with value 1 at the start: some methods divide by the loss."""

    def losses(self):
        return [1.0 + loss for loss in super().losses()]


def make(rows, balancer="marble", *, dtype=torch.float64, lr=0.0, **options):
    problem = Problem(rows, dtype)
    return problem, BalancedOptimizer(SGD([problem.x], lr=lr), balancer, **options)


def steps(problem, optimizer, count=4, losses=None):
    """The update direction of each of ``count`` steps."""
    directions = []
    for _ in range(count):
        optimizer.zero_grad()
        optimizer.backward((losses or Problem.losses)(problem))
        directions.append(problem.x.grad.clone())
        optimizer.step()
    return torch.stack(directions)


ACTIVE = [[1.0, 0.0, 0.0], [-0.5, 4.0, 1.0]]

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


# --- NaN and infinity -------------------------------------------------------------------------------------------------


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


# --- Arguments that make no sense -------------------------------------------------------------------------------------


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
