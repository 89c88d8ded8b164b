"""The derivative under ceiling, constraints, preference and groups, and where there is more than one to choose from."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradbalance.solvers import LinearConstraint, min_norm
from gradbalance.solvers.constraints import as_arrays
from tests.gradbalance.gradient_zoo import WELL_POSED, gramian, unit, zoo
from tests.gradbalance.solvers.test_constrained import options

WELL = {"families": WELL_POSED[:2], "min_k": 2, "max_k": 7}


def _loss(m, preference, direction, **chosen):
    return min_norm(m, preference=preference, **chosen) @ direction


def _gradients(m, preference, direction, **chosen):
    leaves = m.clone().requires_grad_(), preference.clone().requires_grad_()
    return torch.autograd.grad(_loss(*leaves, direction, **chosen), leaves)


def _draw(data, gradients):
    """Gramian, preference, direction and options, not where the derivative jumps."""
    m = gramian(unit(gradients))
    k = len(m)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    preference, direction = (torch.from_numpy(rng.uniform(0.5, 2, k)) for _ in range(2))
    chosen = data.draw(options(k))
    if data.draw(st.booleans()) and k > 3:
        chosen = {"floor": 0.2 / k, "ceiling": 2 / k, "groups": [[0, 2], [1], *([i] for i in range(3, k))]}
        preference = preference[:-1]
    return m, preference, direction, chosen


def _one_step(m, preference, change, step, direction, **chosen):
    return float(_loss(m + step * change[0], preference + step * change[1], direction, **chosen))


@settings(max_examples=60, deadline=None)
@given(zoo(**WELL), st.data())
def test_finite_differences(gradients, data):
    m, preference, direction, chosen = _draw(data, gradients)
    assume(torch.linalg.eigvalsh(m)[0] > 1e-2)
    change = torch.randn(m.shape, dtype=torch.float64), torch.randn(preference.shape, dtype=torch.float64)
    change = (change[0] + change[0].T, change[1])
    here, up, down = (_one_step(m, preference, change, step, direction, **chosen) for step in (0, 1e-6, -1e-6))
    assume(abs(up + down - 2 * here) < 1e-9)  # no kink in between
    gradients = _gradients(m, preference, direction, **chosen)
    found = sum(float((g * d).sum()) for g, d in zip(gradients, change, strict=True))
    assert found == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-6)


@settings(max_examples=15, deadline=None)
@given(zoo(**WELL), st.data())
def test_same_as_cvxpylayers(gradients, data):
    m, preference, direction, chosen = _draw(data, gradients)
    assume(torch.linalg.eigvalsh(m)[0] > 1e-2)
    change = torch.eye(len(m)), preference
    here, up, down = (_one_step(m, preference, change, step, direction, **chosen) for step in (0, 1e-5, -1e-5))
    assume(abs(up + down - 2 * here) < 1e-8)
    own = _gradients(m, preference, direction, **chosen)
    other = _gradients(m, preference, direction, **chosen, solver="cvxpylayers")
    for a, b in zip(own, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(zoo(min_k=2, max_k=12, spread=2), st.data())
def test_always_finite(gradients, data):
    m = gramian(gradients)
    chosen = data.draw(options(len(m)))
    preference, direction = torch.ones(len(m), dtype=torch.float64), torch.arange(1, len(m) + 1).double()
    assert all(g.isfinite().all() for g in _gradients(m, preference, direction, **chosen))


def test_gradcheck():
    m = gramian(unit(np.random.default_rng(0).standard_normal((5, 30)))).requires_grad_()
    p = torch.linspace(1, 2, 5, dtype=torch.float64).requires_grad_()
    meet = as_arrays(lambda alpha: [alpha[0] >= alpha[4]], 5)
    for chosen in ({"ceiling": 0.22}, {"constraints": meet}, {"ceiling": 0.25, "floor": 0.15, "constraints": meet}):
        assert torch.autograd.gradcheck(lambda m, p, c=chosen: min_norm((m + m.T) / 2, preference=p, **c), (m, p))


def test_a_second_derivative_is_refused():
    leaf = torch.eye(3, dtype=torch.float64).requires_grad_()
    seed = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(min_norm(leaf, ceiling=0.5), leaf, seed, create_graph=True)
    with pytest.raises(RuntimeError, match="min_norm can be differentiated once"):
        gradient.sum().backward()


# --- Where there is more than one derivative --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "chosen", "stays"),
    [
        # ⟨g_1, g_2⟩ = ‖g_1‖²: α = (1, 0), and α_2 is about to leave the floor; it stays if the cosine grows.
        ([[1.0, 1.0], [1.0, 3.0]], {}, [[0.0, 1.0], [1.0, 0.0]]),
        # orthogonal, norms² 1 and 2: α = (2/3, 1/3) meets the ceiling without being held back; it is if g_1 shrinks.
        ([[1.0, 0.0], [0.0, 2.0]], {"ceiling": 2 / 3}, [[-1.0, 0.0], [0.0, 0.0]]),
        ([[1.0, 0.0], [0.0, 2.0]], {"constraints": LinearConstraint([1, -2], upper=0)}, [[-1.0, 0.0], [0.0, 0.0]]),
    ],
    ids=["floor", "ceiling", "constraint"],
)
def test_an_inequality_that_holds_without_need_is_kept(m, chosen, stays):
    m, change = torch.tensor(m, dtype=torch.float64), torch.tensor(stays, dtype=torch.float64)
    leaf = m.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(min_norm(leaf, **chosen)[0], leaf)
    kept, left = ((min_norm(m + s * change, **chosen) - min_norm(m, **chosen))[0] / s for s in (1e-6, -1e-6))
    assert float((gradient * change).sum()) == pytest.approx(float(kept), abs=1e-5)
    assert abs(float(left - kept)) > 0.1  # the other one-sided derivative is another


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 7), st.sampled_from([{}, {"ceiling": 0.6}, {"floor": 0.05}]))
def test_dependent_gradients_under_changes_that_keep_the_dependence(seed, k, chosen):
    """K vectors in k − 1 dimensions, turned and stretched together: the derivative of d, though α is not unique."""
    rng = np.random.default_rng(seed)
    gradients = torch.from_numpy(unit(rng.standard_normal((k, k - 1)) + 1.0))
    stretch, aim = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((k - 1, k - 1), (k - 1,)))

    def loss(step):
        moved = gradients @ (torch.eye(k - 1, dtype=torch.float64) + step * stretch)
        return min_norm(moved @ moved.T, **chosen) @ moved @ aim

    leaf = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(loss(leaf), leaf)
    here, up, down = (float(loss(torch.tensor(s, dtype=torch.float64))) for s in (0.0, 1e-5, -1e-5))
    assume(abs(up + down - 2 * here) < 1e-8)
    assert float(found) == pytest.approx((up - down) / 2e-5, rel=1e-3, abs=1e-4)
