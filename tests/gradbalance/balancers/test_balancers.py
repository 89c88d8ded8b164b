"""What every balancer keeps to, whatever its method; and finding one by name."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance.balancers import MGDA, Balancer, Marble, PCGrad, WeightedSum, available, get
from tests.gradbalance.gradient_zoo import FAMILIES, WELL_POSED, cosines, gramian, unit, zoo

EVERY = {
    "marble": lambda k: Marble(),
    "marble, preference": lambda k: Marble(preference=[1.0 + i for i in range(k)]),
    "marble, floor": lambda k: Marble(floor=0.5 / k),
    "mgda": lambda k: MGDA(),
    "mgda, l2": lambda k: MGDA("l2"),
    "mgda, loss": lambda k: MGDA("loss"),
    "mgda, loss+": lambda k: MGDA("loss+"),
    "pcgrad": lambda k: PCGrad(),
    "weighted sum": lambda k: WeightedSum(),
    "weighted sum, weights": lambda k: WeightedSum([1.0 + i for i in range(k)]),
}
every = pytest.mark.parametrize("name", EVERY)
solving = pytest.mark.parametrize("name", [name for name in EVERY if not name.startswith("weighted")])


def _losses(k):
    return 1.0 + torch.arange(k, dtype=torch.float64)


def _coefficients(name, gradients, balancer=None):
    k = len(gradients)
    return (balancer or EVERY[name](k)).coefficients(gramian(gradients), _losses(k))


@every
@settings(max_examples=50, deadline=None)
@given(gradients=zoo(spread=3))
def test_k_finite_numbers_in_float64(name, gradients):
    coefficients = _coefficients(name, gradients)
    assert coefficients.dtype == torch.float64
    assert coefficients.shape == (len(gradients),)
    assert torch.isfinite(coefficients).all()
    assert (coefficients >= 0).all()


@every
def test_one_objective(name):
    for norm in (1e-6, 1.0, 1e6):
        assert _coefficients(name, np.array([[norm, 0.0]])).tolist() == pytest.approx([1.0])


@every
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_no_gradient_at_all(name, k):
    balancer = EVERY[name](k)
    coefficients = balancer.coefficients(torch.zeros(k, k), _losses(k))
    expected = balancer.weights(torch.zeros(k, k), _losses(k)) if name.startswith("weighted") else torch.zeros(k)
    assert torch.equal(coefficients, expected.double())
    if balancer.simplex:
        assert balancer.weights(torch.zeros(k, k)).tolist() == pytest.approx([1 / k] * k)


@pytest.mark.parametrize("name", ["marble", "mgda", "mgda, l2"])
@settings(max_examples=50, deadline=None)
@given(gradients=zoo(families=WELL_POSED, max_k=8), where=st.integers(0, 100), size=st.sampled_from([0.0, 1e-25]))
def test_an_objective_without_gradient_gets_0_and_changes_nothing(name, gradients, where, size):
    where %= len(gradients) + 1
    more = np.insert(gradients, where, size * gradients[0], axis=0)
    coefficients = _coefficients(name, more)
    assert coefficients[where] == 0
    others = torch.cat([coefficients[:where], coefficients[where + 1 :]])
    torch.testing.assert_close(others, _coefficients(name, gradients), rtol=1e-9, atol=1e-12)


@solving
def test_an_objective_without_gradient_gets_0_and_does_not_freeze_the_others(name):
    gradients = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-0.5, 1.0, 0.0]])
    coefficients = _coefficients(name, gradients)
    assert coefficients[1] == 0
    assert np.linalg.norm(coefficients.numpy() @ gradients) > 0.1


@every
@settings(max_examples=50, deadline=None)
@given(gradients=zoo(families=WELL_POSED, spread=2), exponent=st.integers(-40, 40))
def test_a_common_factor_of_all_gradients_changes_nothing(name, gradients, exponent):
    scaled = _coefficients(name, gradients * 2.0**exponent)
    torch.testing.assert_close(scaled, _coefficients(name, gradients), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", ["marble", "marble, preference", "marble, floor", "mgda, l2"])
@settings(max_examples=50, deadline=None)
@given(gradients=zoo(families=WELL_POSED, max_k=12), seed=st.integers(0, 1000))
def test_the_direction_ignores_the_scale_of_each_objective(name, gradients, seed):
    factors = 10.0 ** np.random.default_rng(seed).uniform(-6, 6, (len(gradients), 1))
    one = unit((_coefficients(name, gradients).numpy() @ gradients)[None])
    other = unit((_coefficients(name, gradients * factors).numpy() @ (gradients * factors))[None])
    np.testing.assert_allclose(one, other, atol=1e-6)


EQUIVARIANT = ["marble", "marble, floor", "mgda", "mgda, l2", "weighted sum"]


@pytest.mark.parametrize("name", EQUIVARIANT)
@settings(max_examples=50, deadline=None)
@given(gradients=zoo(families=tuple(f for f in FAMILIES if f != "nearly duplicated")), random=st.randoms())
def test_permutation_equivariant(name, gradients, random):
    gradients = unit(gradients)
    order = list(range(len(gradients)))
    random.shuffle(order)
    m = gramian(gradients)
    balancer = EVERY[name](len(m))
    torch.testing.assert_close(
        balancer.coefficients(m[order][:, order]), balancer.coefficients(m)[order], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", ["marble", "marble, preference", "mgda", "mgda, l2", "mgda, loss", "mgda, loss+"])
@settings(max_examples=100, deadline=None)
@given(gradients=zoo(families=WELL_POSED, spread=2))
def test_no_objective_conflicts_with_the_update(name, gradients):
    assert cosines(_coefficients(name, gradients), gradients).min() > -1e-9


@pytest.mark.parametrize("name", ["marble", "marble, preference", "mgda", "mgda, l2", "mgda, loss", "mgda, loss+"])
@settings(max_examples=100, deadline=None)
@given(gradients=zoo(families=("random", "duplicated", "opposite", "low rank", "integers")))
def test_no_conflict_up_to_rounding_where_the_update_may_vanish(name, gradients):
    gradients = unit(gradients)
    assert (gradients @ (_coefficients(name, gradients).numpy() @ gradients)).min() > -1e-6


@pytest.mark.parametrize("name", ["marble", "mgda", "mgda, l2", "mgda, loss"])
@pytest.mark.parametrize("k", [2, 3, 5, 16])
def test_the_update_vanishes_at_a_pareto_stationary_point(name, k):
    rng = np.random.default_rng(k)
    gradients = unit(rng.standard_normal((k, 3 * k)))
    gradients[-1] = -rng.uniform(0.1, 1, k - 1) @ gradients[:-1]  # some convex combination of all is 0
    update = _coefficients(name, gradients).numpy() @ gradients
    assert np.linalg.norm(update) < 1e-6


@every
def test_float32_and_other_input_types(name):
    gradients = unit(FAMILIES["many parameters"](np.random.default_rng(0), 4))
    m = gramian(gradients)
    expected = EVERY[name](4).coefficients(m, _losses(4))
    for other in (m.float(), m.clone().requires_grad_(), m.T):
        result = EVERY[name](4).coefficients(other, _losses(4).float())
        assert result.dtype == torch.float64
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@every
def test_the_signal_is_accepted(name):
    m = torch.eye(3, dtype=torch.float64)
    given_signal = EVERY[name](3).coefficients(m, _losses(3), 2 * m)
    assert torch.equal(given_signal, EVERY[name](3).coefficients(m, _losses(3), None))


@every
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gramian_that_is_not_finite_names_the_row(name, value):
    m = torch.eye(3)
    m[1, :] = m[:, 1] = value
    with pytest.raises(ValueError, match="non-finite values in row 1"):
        EVERY[name](3).coefficients(m, _losses(3))


@every
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_a_copy_goes_on_alike(name, copied):
    gradients = FAMILIES["random"](np.random.default_rng(0), 5)
    balancer = EVERY[name](5)
    _coefficients(name, gradients, balancer)
    twin = copied(balancer)
    for _ in range(3):
        assert torch.equal(_coefficients(name, gradients, twin), _coefficients(name, gradients, balancer))


@every
def test_a_resumed_balancer_goes_on_bit_equal(name):
    gradients = FAMILIES["random"](np.random.default_rng(0), 5)
    balancer = EVERY[name](5)
    for _ in range(3):
        _coefficients(name, gradients, balancer)
    state = balancer.state_dict()
    assert all(type(value) in (int, float, list) for value in state.values())
    twin = EVERY[name](5)
    twin.load_state_dict(state)
    for _ in range(3):
        assert torch.equal(_coefficients(name, gradients, twin), _coefficients(name, gradients, balancer))
    assert twin.state_dict() == balancer.state_dict()


@every
def test_the_state_of_another_balancer(name):
    with pytest.raises(ValueError, match=r"state_dict is not one of \w+: expected keys .*, got \['momentum'\]"):
        EVERY[name](3).load_state_dict({"momentum": 0.9})


@every
def test_repr_names_the_options(name):
    balancer = EVERY[name](2)
    namespace = {"Marble": Marble, "MGDA": MGDA, "PCGrad": PCGrad, "WeightedSum": WeightedSum}
    assert repr(eval(repr(balancer), namespace)) == repr(balancer)


def test_available():
    assert available() == ["marble", "mgda", "pcgrad", "weighted_sum"]
    assert all(isinstance(get(name), Balancer) for name in available())


def test_get_passes_options():
    assert get("marble", floor=0.1).floor == 0.1
    assert get("pcgrad", seed=3).seed == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("PCGrad", "no balancer is called 'PCGrad'; did you mean 'pcgrad'"),
        ("mdga", "did you mean 'mgda'"),
        ("weightedsum", "did you mean 'weighted_sum'"),
        ("quux", r"no balancer is called 'quux'; available: marble, mgda, pcgrad, weighted_sum"),
    ],
)
def test_unknown_name(name, message):
    with pytest.raises(ValueError, match=message):
        get(name)


def test_unknown_option():
    with pytest.raises(TypeError, match="'marble' has no option 'flor'; its options: preference, floor, solver"):
        get("marble", flor=0.1)


def test_a_balancer_of_ones_own_needs_weights_only():
    class Mean(Balancer):
        def weights(self, gramian, losses=None, signal=None):
            return torch.full((len(gramian),), 1 / len(gramian), dtype=torch.float64)

    balancer = Mean()
    assert balancer.coefficients(torch.eye(4)).tolist() == [0.25] * 4
    assert balancer.state_dict() == {}
    assert repr(balancer) == "Mean()"
