"""What every balancer keeps to, whatever its method; and finding one by name. Its promises are in the catalogue."""

import contextlib
import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance import balancers
from gradbalance.balancers import Balancer, available, get
from tests.gradbalance.balancers.catalogue import EVERY, coefficients, losses_of
from tests.gradbalance.gradient_zoo import FAMILIES, WELL_POSED, cosines, gramian, unit, zoo

every = pytest.mark.parametrize("name", EVERY)


def those(**promises):
    """The balancers with these properties in the catalogue."""
    kept = [name for name, e in EVERY.items() if all(getattr(e, key) == value for key, value in promises.items())]
    return pytest.mark.parametrize("name", kept)


def _update(name, gradients, balancer=None):
    return coefficients(name, gradients, balancer).numpy() @ gradients


@every
@settings(max_examples=50, deadline=None)
@given(gradients=zoo(spread=3))
def test_k_finite_numbers_in_float64(name, gradients):
    found = coefficients(name, gradients)
    assert found.dtype == torch.float64
    assert found.shape == (len(gradients),)
    assert torch.isfinite(found).all()
    assert (found >= 0).all() or not EVERY[name].nonnegative


@every
def test_every_number_of_objectives_in_several_calls(name):
    for k in range(1, 33):
        rng = np.random.default_rng(k)
        balancer = EVERY[name].make(k)
        for _ in range(3):
            assert torch.isfinite(coefficients(name, rng.standard_normal((k, 2 * k)), balancer)).all(), k


@every
@pytest.mark.parametrize("norm", [1e-6, 1.0, 1e6])
def test_one_objective(name, norm):
    entry = EVERY[name]
    found = entry.make(1).coefficients(torch.tensor([[norm**2]]), torch.ones(1)).item()
    assert found > 0
    if entry.one is not None:
        assert found == pytest.approx(entry.one * norm**entry.one_degree)


@every
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_no_gradient_at_all(name, k):
    balancer, losses = EVERY[name].make(k), torch.ones(k)
    found = balancer.coefficients(torch.zeros(k, k), losses)
    assert torch.isfinite(found).all()
    if EVERY[name].drops_zero and EVERY[name].solves:
        assert found.tolist() == [0.0] * k
    if balancer.simplex:
        assert EVERY[name].make(k).weights(torch.zeros(k, k), losses).sum().item() == pytest.approx(1)


@those(drops_zero=True)
@settings(max_examples=50, deadline=None)
@given(gradients=zoo(families=WELL_POSED, max_k=8), where=st.integers(0, 100), size=st.sampled_from([0.0, 1e-25]))
def test_an_objective_without_gradient_gets_0_and_changes_nothing(name, gradients, where, size):
    where %= len(gradients) + 1
    found = coefficients(name, np.insert(gradients, where, size * gradients[0], axis=0))
    assert found[where] == 0
    others = torch.cat([found[:where], found[where + 1 :]])
    torch.testing.assert_close(others, coefficients(name, gradients), rtol=1e-9, atol=1e-12)


@those(solves=True)
def test_an_objective_without_gradient_gets_0_and_does_not_freeze_the_others(name):
    gradients = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-0.5, 1.0, 0.0]])
    found = coefficients(name, gradients)
    assert found[1] == 0
    assert np.linalg.norm(found.numpy() @ gradients) > 0.1


@every
@settings(max_examples=25, deadline=None)
@given(gradients=zoo(families=WELL_POSED, max_k=8), where=st.integers(0, 100))
def test_an_absent_objective_spoils_nothing(name, gradients, where):
    """The optimizer hands in a row of zeros and a loss of NaN; afterwards the objective comes back."""
    where %= len(gradients)
    balancer = EVERY[name].make(len(gradients))
    for absent in (True, False, True, False):
        m, losses = gramian(gradients), losses_of(gradients)
        if absent:
            m[where], m[:, where], losses[where] = 0, 0, math.nan
        assert torch.isfinite(balancer.coefficients(m, losses)).all()


@every
@settings(max_examples=50, deadline=None)
@given(gradients=zoo(families=WELL_POSED, spread=2), exponent=st.integers(-40, 40))
def test_a_common_factor_of_all_losses_changes_the_coefficients_as_documented(name, gradients, exponent):
    degree = EVERY[name].degree
    if degree is None:
        one, other = coefficients(name, gradients), coefficients(name, gradients * 2.0**exponent)
        assert torch.isfinite(other).all()
        assert one.shape == other.shape
        return
    scaled = coefficients(name, gradients * 2.0**exponent) * 2.0 ** (-exponent * degree)
    torch.testing.assert_close(scaled, coefficients(name, gradients), rtol=1e-9, atol=1e-15)


@those(invariant=True)
@settings(max_examples=50, deadline=None)
@given(gradients=zoo(families=WELL_POSED, max_k=12), seed=st.integers(0, 1000))
def test_the_direction_ignores_the_scale_of_each_objective(name, gradients, seed):
    factors = 10.0 ** np.random.default_rng(seed).uniform(-6, 6, (len(gradients), 1))
    one, other = _update(name, gradients), _update(name, gradients * factors)
    np.testing.assert_allclose(unit(one[None]), unit(other[None]), atol=1e-6)


@those(equivariant=True)
@settings(max_examples=50, deadline=None)
@given(gradients=zoo(families=tuple(f for f in FAMILIES if f != "nearly duplicated")), random=st.randoms())
def test_permutation_equivariant(name, gradients, random):
    """In three calls, so that what a balancer remembers takes part."""
    for plain, exchanged, order, _ in _exchanged(name, gradients, random):
        torch.testing.assert_close(exchanged, plain[order], rtol=1e-5, atol=1e-5)


@those(equivariant="update")
@settings(max_examples=50, deadline=None)
@given(gradients=zoo(families=tuple(f for f in FAMILIES if f != "nearly duplicated")), random=st.randoms())
def test_exchanging_objectives_leaves_the_update(name, gradients, random):
    for plain, exchanged, order, seen in _exchanged(name, gradients, random):
        np.testing.assert_allclose(exchanged.numpy() @ seen[order], plain.numpy() @ seen, atol=1e-5)


def _exchanged(name, gradients, random):
    gradients = unit(gradients)
    order = list(range(len(gradients)))
    random.shuffle(order)
    one, other = EVERY[name].make(len(order)), EVERY[name].make(len(order))
    for step in range(3):
        seen = gradients * (1 + 0.1 * step)
        m, losses = gramian(seen), losses_of(seen)
        yield one.coefficients(m, losses), other.coefficients(m[order][:, order], losses[order]), order, seen


@pytest.mark.parametrize("name", [name for name, entry in EVERY.items() if entry.no_conflict])
@settings(max_examples=100, deadline=None)
@given(gradients=zoo(families=WELL_POSED, spread=2))
def test_no_objective_conflicts_with_the_update(name, gradients):
    assert cosines(coefficients(name, gradients), gradients).min() > -1e-9


@those(no_conflict=True)
@settings(max_examples=100, deadline=None)
@given(gradients=zoo(families=("random", "duplicated", "opposite", "low rank", "integers")))
def test_no_conflict_up_to_rounding_where_the_update_may_vanish(name, gradients):
    gradients = unit(gradients)
    assert (gradients @ _update(name, gradients)).min() > -1e-6


@those(stationary=True)
@pytest.mark.parametrize("k", [2, 3, 5, 16])
def test_the_update_vanishes_at_a_pareto_stationary_point(name, k):
    rng = np.random.default_rng(k)
    gradients = unit(rng.standard_normal((k, 3 * k)))
    gradients[-1] = -rng.uniform(0.1, 1, k - 1) @ gradients[:-1]  # some convex combination of all is 0
    assert np.linalg.norm(_update(name, gradients)) < 1e-6


@every
def test_float32_and_other_input_types(name):
    gradients = unit(FAMILIES["many parameters"](np.random.default_rng(0), 4))
    m, losses = gramian(gradients), losses_of(gradients)
    expected = EVERY[name].make(4).coefficients(m, losses)
    for other in (m.float(), m.clone().requires_grad_(), m.T):
        result = EVERY[name].make(4).coefficients(other, losses.float())
        assert result.dtype == torch.float64
        assert not result.requires_grad
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@every
def test_the_inputs_are_left_as_they_are(name):
    gradients = FAMILIES["random"](np.random.default_rng(0), 5)
    m, losses = gramian(gradients), losses_of(gradients)
    before = m.clone(), losses.clone()
    balancer = EVERY[name].make(5)
    first = balancer.coefficients(m, losses)
    kept, state = first.clone(), copy.deepcopy(balancer.state_dict())
    assert torch.equal(m, before[0])
    assert torch.equal(losses, before[1])
    first.zero_()  # the result is the caller's
    assert balancer.state_dict() == state
    assert torch.isfinite(kept).all()


@every
def test_the_signal_is_accepted(name):
    m = torch.eye(3, dtype=torch.float64)
    assert EVERY[name].make(3).coefficients(m, torch.ones(3), m.clone()).shape == (3,)


@every
def test_losses_and_signals_of_another_number_of_objectives(name):
    m = torch.eye(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"signal must have the gramian's shape \(3, 3\), got \(5, 5\)"):
        EVERY[name].make(3).coefficients(m, torch.ones(3), torch.eye(5))
    with contextlib.suppress(ValueError):  # others do not look at them
        found = EVERY[name].make(3).coefficients(m, torch.ones(2))
        assert torch.equal(found, EVERY[name].make(3).coefficients(m, torch.ones(3)))


@every
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gramian_that_is_not_finite_names_the_row(name, value):
    m = torch.eye(3)
    m[1, :] = m[:, 1] = value
    with pytest.raises(ValueError, match="non-finite values in row 1"):
        EVERY[name].make(3).coefficients(m, torch.ones(3))


@every
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_a_copy_goes_on_alike(name, copied):
    gradients = FAMILIES["random"](np.random.default_rng(0), 5)
    balancer = EVERY[name].make(5)
    coefficients(name, gradients, balancer)
    twin = copied(balancer)
    for step in range(3):
        seen = gradients * (1 + 0.1 * step)
        assert torch.equal(coefficients(name, seen, twin), coefficients(name, seen, balancer))


@every
def test_a_resumed_balancer_goes_on_bit_equal(name):
    gradients = FAMILIES["random"](np.random.default_rng(0), 5)
    balancer = EVERY[name].make(5)
    for step in range(3):
        coefficients(name, gradients / (1 + 0.1 * step), balancer)
    state = copy.deepcopy(balancer.state_dict())
    assert all(type(value) in (int, float, list) for value in state.values())
    twin = EVERY[name].make(5)
    twin.load_state_dict(state)
    for step in range(3):
        seen = gradients * (1 + 0.1 * step)
        assert torch.equal(coefficients(name, seen, twin), coefficients(name, seen, balancer))
    assert twin.state_dict() == balancer.state_dict()


@every
def test_a_state_once_read_stays_as_it_was(name):
    """An optimizer puts the balancer back to the last committed state when a step is dropped."""
    gradients = FAMILIES["random"](np.random.default_rng(0), 5)
    balancer = EVERY[name].make(5)
    coefficients(name, gradients, balancer)
    state = balancer.state_dict()
    before = copy.deepcopy(state)
    first = coefficients(name, 2 * gradients, balancer)
    assert state == before
    balancer.load_state_dict(state)
    assert torch.equal(coefficients(name, 2 * gradients, balancer), first)


@every
def test_the_state_of_another_balancer(name):
    with pytest.raises(ValueError, match=r"state_dict is not one of \w+: expected keys .*, got \['momentum'\]"):
        EVERY[name].make(3).load_state_dict({"momentum": 0.9})


@every
@pytest.mark.parametrize("spoilt", ["1.0", math.nan, math.inf, None, [1.0]])
def test_a_spoilt_state_is_refused_and_changes_nothing(name, spoilt):
    gradients = FAMILIES["random"](np.random.default_rng(0), 3)
    balancer = EVERY[name].make(3)
    coefficients(name, gradients, balancer)
    state = balancer.state_dict()
    for key, value in state.items():
        wrong = [*value[1:], spoilt] if isinstance(value, list) else spoilt
        with pytest.raises(ValueError, match=f"state_dict of .*: {key.split('.')[-1]} is "):
            balancer.load_state_dict({**state, key: wrong})
        assert balancer.state_dict() == state


@every
def test_repr_names_the_options(name):
    balancer = EVERY[name].make(2)
    assert repr(eval(repr(balancer), vars(balancers).copy())) == repr(balancer)


def test_every_balancer_is_in_the_catalogue():
    assert available() == sorted(name for name in EVERY if "," not in name)


def test_get_passes_options():
    assert get("marble", floor=0.1).floor == 0.1
    assert get("pcgrad", seed=3).seed == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("PCGrad", "no balancer is called 'PCGrad'; did you mean 'pcgrad'"),
        ("mdga", "did you mean 'mgda'"),
        ("weightedsum", "did you mean 'weighted_sum'"),
        ("quux", r"no balancer is called 'quux'; available: .*marble, mgda, .*weighted_sum"),
    ],
)
def test_unknown_name(name, message):
    with pytest.raises(ValueError, match=message):
        get(name)


def test_unknown_option():
    with pytest.raises(TypeError, match="'marble' has no option 'flor'; its options: preference, floor, solver"):
        get("marble", flor=0.1)


def test_missing_option():
    with pytest.raises(TypeError, match="'sequential' needs the option 'stages'; its options: stages"):
        get("sequential")


def test_a_balancer_of_ones_own_needs_weights_only():
    class Mean(Balancer):
        def weights(self, gramian, losses=None, signal=None):
            return torch.full((len(gramian),), 1 / len(gramian), dtype=torch.float64)

    balancer = Mean()
    assert balancer.coefficients(torch.eye(4)).tolist() == [0.25] * 4
    assert balancer.state_dict() == {}
    assert repr(balancer) == "Mean()"
