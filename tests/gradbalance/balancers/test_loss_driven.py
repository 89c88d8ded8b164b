"""What the balancers that look at losses, chance, time or norms alone have in common."""

import math

import numpy as np
import pytest
import torch

from tests.gradbalance.balancers.catalogue import EVERY, LOSS_DRIVEN, NORM_DRIVEN
from tests.gradbalance.gradient_zoo import gramian

NAMES = [*LOSS_DRIVEN, *NORM_DRIVEN]
NEED_LOSSES = [
    name for name in NAMES if name.split(",")[0] not in ("uniform", "specialist", "sequential", "rlw", "excess_mtl")
]
INDEPENDENT = [name for name in NAMES if EVERY[name].equivariant and name != "stch"]  # whose p_k is a share among all K

every = pytest.mark.parametrize("name", NAMES)


def _history(k, calls=6, seed=0):
    """Gramians and positive losses of several calls."""
    rng = np.random.default_rng(seed)
    return [
        (gramian(rng.standard_normal((k, 2 * k))), torch.from_numpy(rng.uniform(0.5, 2.0, k))) for _ in range(calls)
    ]


def _without(where, m, losses):
    m, losses = m.clone(), losses.clone()
    m[where], m[:, where], losses[where] = 0.0, 0.0, math.nan
    return m, losses


def _of(where, state):
    """What is remembered of one objective, K being 5."""
    return {name: values[where] for name, values in state.items() if isinstance(values, list) and len(values) == 5}


@every
def test_what_is_remembered_of_an_absent_objective_stays(name):
    balancer = EVERY[name].make(5)
    history = _history(5)
    for m, losses in history[:3]:
        balancer.coefficients(m, losses)
    before = _of(2, balancer.state_dict())
    for m, losses in history[3:]:
        balancer.coefficients(*_without(2, m, losses))
    assert _of(2, balancer.state_dict()) == before


@pytest.mark.parametrize("name", INDEPENDENT)
def test_an_objective_that_is_never_there_has_no_influence(name):
    one, other = EVERY[name].make(5), EVERY[name].make(4)
    others = [0, 1, 3, 4]
    for m, losses in _history(5):
        found = one.coefficients(*_without(2, m, losses))
        expected = other.coefficients(m[others][:, others], losses[others])
        torch.testing.assert_close(found[others], expected, rtol=1e-12, atol=0)


@every
def test_with_all_absent_nothing_is_learned(name):
    balancer = EVERY[name].make(5)
    history = _history(5)
    for m, losses in history:
        balancer.coefficients(m, losses)
    before = {key: value for key, value in balancer.state_dict().items() if key != "calls"}
    assert torch.isfinite(balancer.coefficients(torch.zeros(5, 5), torch.full((5,), math.nan))).all()
    assert {key: value for key, value in balancer.state_dict().items() if key != "calls"} == before


@every
def test_absent_at_the_first_call(name):
    balancer = EVERY[name].make(5)
    for call, (m, losses) in enumerate(_history(5)):
        found = balancer.coefficients(*(_without(2, m, losses) if call < 3 else (m, losses)))
        assert torch.isfinite(found).all()
        assert found.min() >= 0
        if balancer.simplex:
            assert found.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("name", [name for name in NAMES if EVERY[name].degree is not None])
@pytest.mark.parametrize("factor", [1e-7, 1e7])
def test_a_common_factor_of_all_losses_acts_alike_in_every_call(name, factor):
    one, other = EVERY[name].make(5), EVERY[name].make(5)
    for m, losses in _history(5):
        scaled = other.coefficients(factor**2 * m, factor * losses) * factor ** -EVERY[name].degree
        torch.testing.assert_close(scaled, one.coefficients(m, losses), rtol=1e-9, atol=0)


@every
@pytest.mark.parametrize("factor", [1e-7, 1e7])
def test_losses_and_gradients_of_any_size(name, factor):
    balancer = EVERY[name].make(5)
    for m, losses in _history(5, calls=100):
        assert torch.isfinite(balancer.coefficients(factor**2 * m, factor * losses)).all()


@every
def test_losses_that_are_all_zero(name):
    balancer = EVERY[name].make(3)
    for losses in (torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3)):
        assert torch.isfinite(balancer.coefficients(torch.eye(3), losses)).all()


@pytest.mark.parametrize("name", NEED_LOSSES)
def test_losses_missing(name):
    with pytest.raises(ValueError, match="needs the loss values: pass losses"):
        EVERY[name].make(2).coefficients(torch.eye(2))


@pytest.mark.parametrize("name", NAMES)
def test_another_number_of_objectives_than_before(name):
    balancer = EVERY[name].make(3)
    balancer.coefficients(torch.eye(3), torch.ones(3))
    if any(isinstance(value, list) for value in balancer.state_dict().values()):
        with pytest.raises(ValueError, match=r"3 objectives, this one has 2|3 values, but there are 2"):
            balancer.coefficients(torch.eye(2), torch.ones(2))


@pytest.mark.parametrize("name", ["grad_norm", "db_mtl", "famo"])
def test_negative_losses_are_named(name):
    with pytest.raises(ValueError, match=r"must be ≥ 0, got -1\.0 for objective 1"):
        EVERY[name].make(2).coefficients(torch.eye(2), torch.tensor([1.0, -1.0]))
