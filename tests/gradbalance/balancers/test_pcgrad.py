"""PCGrad from the Gramian alone, against the projections of real vectors and torchjd's version."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.agreement.projecting import PAIRS
from gradbalance.balancers import PCGrad, pcgrad
from tests.gradbalance.gradient_zoo import gramian, zoo


def _project(gradients, orders):
    """The paper's algorithm, on the vectors; orders[k] lists the other objectives as k meets them."""
    total = np.zeros(gradients.shape[1])
    for k, order in enumerate(orders):
        projected = gradients[k].copy()
        for j in order:
            inner = projected @ gradients[j]
            if inner < 0:
                projected -= inner / (gradients[j] @ gradients[j]) * gradients[j]
        total += projected
    return total


def _orders(monkeypatch, k):
    """Make the next call's order known: the objectives ascending."""
    orders = np.array([[j for j in range(k) if j != i] for i in range(k)], dtype=np.intp).reshape(k, k - 1)
    monkeypatch.setattr(pcgrad, "random_orders", lambda *_: orders)
    return orders


def test_two_conflicting_gradients():
    gradients = np.array([[1.0, 0.0], [-1.0, 1.0]])
    coefficients = PCGrad().coefficients(gramian(gradients)).numpy()
    np.testing.assert_allclose(coefficients, [2.0, 1.5])  # 1 − (−1)/1 for g_1, 1 − (−1)/2 for g_2
    np.testing.assert_allclose(coefficients @ gradients, _project(gradients, [[1], [0]]))


@settings(max_examples=50, deadline=None)
@given(gradients=zoo(min_k=1, max_k=10, spread=1))
def test_same_as_projecting_vectors(gradients):
    gradients = gradients[np.abs(gradients).sum(1) > 0]
    assume(len(gradients) > 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        orders = _orders(monkeypatch, len(gradients))
        coefficients = PCGrad().coefficients(gramian(gradients)).numpy()
    expected = _project(gradients, orders)
    np.testing.assert_allclose(coefficients @ gradients, expected, atol=1e-9 * np.linalg.norm(gradients))


@pytest.mark.parametrize("oracle", ["torchjd", "conflictfree"])
def test_same_as_others_in_the_same_order(oracle):
    assert PAIRS["pcgrad", oracle]() <= 1e-12


@settings(max_examples=50, deadline=None)
@given(gradients=zoo(min_k=2, max_k=2, spread=3))
def test_two_objectives_are_permutation_equivariant_and_never_conflict(gradients):
    m = gramian(gradients)
    coefficients = PCGrad().coefficients(m)
    assert torch.equal(PCGrad().coefficients(m.flip(0, 1)), coefficients.flip(0))
    norms = m.diagonal().sqrt()
    assert ((m @ coefficients) >= -1e-9 * norms * norms.max()).all()


def test_permutation_equivariant_in_distribution():
    """Three objectives, means over 2,000 orders: of exchanged objectives they agree within the sampling error."""
    m = gramian(np.random.default_rng(4).standard_normal((3, 3)))
    order = [2, 0, 1]
    draws, exchanged = PCGrad(0), PCGrad(1)
    first = torch.stack([draws.coefficients(m)[order] for _ in range(2000)])
    second = torch.stack([exchanged.coefficients(m[order][:, order]) for _ in range(2000)])
    assert (first.std(0) > 0).any()  # the order matters here
    error = (first.var(0) / 2000 + second.var(0) / 2000).sqrt()
    assert ((first.mean(0) - second.mean(0)).abs() <= 5 * error + 1e-12).all()


def test_without_conflicts_nothing_is_projected():
    gradients = np.abs(np.random.default_rng(0).standard_normal((5, 9)))
    assert PCGrad().coefficients(gramian(gradients)).tolist() == [1.0] * 5


def test_an_objective_without_gradient_is_never_divided_by():
    gradients = np.array([[1.0, 0.0], [0.0, 0.0], [-1.0, 1.0]])
    np.testing.assert_allclose(PCGrad().coefficients(gramian(gradients)), [2.0, 0.0, 1.5])


def _sequence(balancer, m, calls=5):
    return torch.stack([balancer.coefficients(m) for _ in range(calls)])


def test_the_order_is_new_at_every_call_and_reproducible():
    m = gramian(np.random.default_rng(0).standard_normal((8, 6)))
    first = _sequence(PCGrad(seed=7), m)
    assert torch.equal(first, _sequence(PCGrad(seed=7), m))
    assert len({tuple(row.tolist()) for row in first}) == 5
    assert not torch.equal(first, _sequence(PCGrad(seed=8), m))


@given(st.integers(0, 2**63), st.integers(0, 10**12))
@settings(max_examples=20, deadline=None)
def test_any_seed_and_number_of_calls(seed, calls):
    balancer = PCGrad(seed=seed)
    balancer.load_state_dict({"calls": calls})
    balancer.coefficients(torch.eye(3))
    assert balancer.state_dict() == {"calls": calls + 1}


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    PCGrad().coefficients(torch.eye(3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [-1, 1.5, "0", True])
def test_bad_seed(seed):
    with pytest.raises(ValueError, match="seed must be an integer ≥ 0, got"):
        PCGrad(seed)
