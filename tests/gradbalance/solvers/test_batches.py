"""Batches of Gramians: solved one by one on the CPU, all at once and without a look at a value on an accelerator."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from gradbalance.solvers import LinearConstraint, kkt_residual, min_norm
from tests.gradbalance.accelerator import DEVICE, Accelerator
from tests.gradbalance.gradient_zoo import FAMILIES, WELL_POSED, gramian, unit, zoo


def _batch(k, count=6, families=WELL_POSED[:2], seed=0):
    rng = np.random.default_rng(seed)
    return torch.stack([gramian(unit(FAMILIES[families[i % len(families)]](rng, k))) for i in range(count)])


def _jacobian_product(m, preference, **options):
    leaves = m.clone().requires_grad_(), preference.clone().requires_grad_()
    alpha = min_norm(leaves[0], preference=leaves[1], **options)
    return alpha, torch.autograd.grad((alpha * torch.arange(1, alpha.shape[-1] + 1)).square().sum(), leaves)


# --- On the CPU -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"floor": 0.1},
        {"ceiling": 0.4, "constraints": lambda alpha: [alpha[0] >= alpha[1]], "preference": [1, 2, 1, 1]},
        {"groups": [[0, 1], [2], [3]]},
        {"solver": "enumeration", "floor": 0.1, "groups": [[0, 1], [2], [3]], "preference": [1, 2, 1]},
    ],
)
def test_a_batch_is_its_matrices(options):
    m = _batch(4).reshape(2, 3, 4, 4)
    found = min_norm(m, **options)
    assert found.shape == (2, 3, 4)
    assert found.dtype == torch.float64
    for i, j in np.ndindex(2, 3):
        assert torch.equal(found[i, j], min_norm(m[i, j], **options))


def test_an_empty_batch():
    assert min_norm(torch.empty(0, 3, 3)).shape == (0, 3)


def test_what_is_no_batch_of_square_matrices():
    for solver in ("exact", "enumeration"):
        for wrong in (torch.zeros(2, 3, 4), torch.zeros(2, 0, 0)):
            with pytest.raises(ValueError, match="gramian must be of shape"):
                min_norm(wrong, solver=solver)
        for wrong in (torch.zeros(2, 3, 3, dtype=torch.long), torch.zeros(1, 3, 3).tolist()):
            with pytest.raises(TypeError, match="gramian must be a real floating-point tensor of shape"):
                min_norm(wrong, solver=solver)


# --- All sets at once -------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(zoo(min_k=1, max_k=8), st.sampled_from([0.0, 0.4, 1.0]))
def test_enumeration_finds_the_same_point(gradients, share):
    gradients = unit(gradients)
    m = gramian(gradients)
    floor = share / len(m)
    alpha = min_norm(m, floor=floor, solver="enumeration")
    assert alpha.min() >= 0
    assert alpha.sum() == pytest.approx(1, abs=1e-12)
    assert kkt_residual(m, alpha, floor=floor) < 1e-11
    np.testing.assert_allclose(alpha.numpy() @ gradients, min_norm(m, floor=floor).numpy() @ gradients, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(zoo(families=WELL_POSED, max_k=8, spread=6), st.sampled_from([0.0, 0.4]))
def test_enumeration_finds_the_same_weights_of_independent_gradients_of_any_length(gradients, share):
    m = gramian(gradients)
    floor = share / len(m)
    found = min_norm(m, floor=floor, solver="enumeration")
    np.testing.assert_allclose(found, min_norm(m, floor=floor), atol=1e-9)


def test_enumeration_leaves_zero_rows_out():
    m = torch.diag_embed(torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]]))
    expected = [[0, 1 / 3, 2 / 3], [0, 0, 1], [1 / 3, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(min_norm(m, solver="enumeration"), expected, atol=1e-15)


def test_enumeration_takes_the_fewest_objectives_of_equals():
    assert sorted(min_norm(torch.ones(3, 3), solver="enumeration").tolist()) == [0, 0, 1]


def test_what_is_not_finite_spoils_its_own_matrix_only():
    m = torch.eye(3).repeat(2, 1, 1)
    m[0, 1, 1] = torch.nan
    found = min_norm(m, solver="enumeration")
    assert found[0].isnan().all()
    np.testing.assert_allclose(found[1], [1 / 3] * 3)


def test_what_enumeration_does_not_take():
    message = "takes at most 8 objectives, no ceiling and no constraints: use solver='exact'"
    with pytest.raises(ValueError, match=message):
        min_norm(torch.eye(9), solver="enumeration")
    with pytest.raises(ValueError, match=message):
        min_norm(torch.eye(3), ceiling=0.5, solver="enumeration")
    with pytest.raises(ValueError, match=message):
        min_norm(torch.eye(3), constraints=LinearConstraint([1, 0, 0], 0.5), solver="enumeration")
    with pytest.raises(ValueError, match=r"floor must be in \[0, 1/K\]"):
        min_norm(torch.eye(3), floor=0.5, solver="enumeration")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 1000), st.sampled_from([0.0, 0.3]))
def test_enumeration_has_the_same_derivative(k, seed, share):
    m = _batch(k, 2, seed=seed)
    assume((torch.linalg.eigvalsh(m)[:, 0] > 1e-3).all())
    preference = torch.linspace(1, 2, k, dtype=torch.float64)
    _, own = _jacobian_product(m, preference, floor=share / k, solver="enumeration")
    _, expected = _jacobian_product(m, preference, floor=share / k)
    for a, b in zip(own, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_the_derivative_of_enumeration_is_finite_at_zero_rows():
    leaf = torch.diag_embed(torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]])).requires_grad_()
    min_norm(leaf, solver="enumeration")[:, 1].sum().backward()
    assert leaf.grad.isfinite().all()
    assert leaf.grad[0].abs().sum() > 0


def test_enumeration_has_a_second_derivative():
    leaf = _batch(3, 1).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda m: min_norm((m + m.mT) / 2, solver="enumeration"), leaf)


# --- No look at a value -----------------------------------------------------------------------------------------------


def test_on_an_accelerator_nothing_is_read():
    m = _batch(5)
    with Accelerator() as accelerator:
        there = m.to(DEVICE)
        found = min_norm(there, floor=0.05, preference=[1, 2, 1, 1], groups=[[0, 1], [2], [3], [4]])
        assert found.device == DEVICE
        assert accelerator.reads == []
        expected = min_norm(m, floor=0.05, preference=[1, 2, 1, 1], groups=[[0, 1], [2], [3], [4]])
        np.testing.assert_allclose(found.cpu(), expected, atol=1e-12)


def test_a_single_matrix_on_an_accelerator():
    with Accelerator() as accelerator:
        there = torch.eye(3).to(DEVICE)
        assert min_norm(there, solver="enumeration").device == DEVICE
        assert accelerator.reads == []
        assert min_norm(there).device.type == "cpu"
        assert len(accelerator.reads) == 1


@pytest.mark.parametrize(("k", "options"), [(9, {}), (3, {"ceiling": 0.5})])
def test_else_a_batch_is_read_once(k, options):
    m = _batch(k)
    with Accelerator() as accelerator:
        found = min_norm(m.to(DEVICE), **options)
        assert found.device == DEVICE
        assert accelerator.reads == [m.numel()]
        np.testing.assert_allclose(found.cpu(), min_norm(m, **options), atol=1e-15)


def test_without_values_there_is_a_graph_all_the_same():
    def solve(m):
        return min_norm(m, floor=0.1, preference=[1.0, 2.0], groups=[[0, 1], [2]], solver="enumeration")

    m = _batch(3)
    graph = make_fx(solve, tracing_mode="fake")(m)
    torch.testing.assert_close(graph(m), solve(m), rtol=0, atol=1e-15)


def a_step(gradients, parameter, lr=0.1):
    """A training step by hand: K gradients → Gramian → min-norm point → one weighted gradient → update."""
    gramian = gradients @ gradients.T
    (alpha,) = min_norm(gramian[None], floor=0.01, solver="enumeration")
    update = alpha.to(gradients.dtype) @ gradients
    return parameter - lr * update


def test_a_whole_step_compiles_without_a_break():
    gradients, parameter = torch.randn(4, 50), torch.randn(50)
    compiled = torch.compile(a_step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(gradients, parameter), a_step(gradients, parameter))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_whole_step_compiles_to_code():
    gradients, parameter = torch.randn(4, 50), torch.randn(50)
    compiled = torch.compile(a_step, fullgraph=True)
    torch.testing.assert_close(compiled(gradients, parameter), a_step(gradients, parameter))
