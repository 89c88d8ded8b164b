"""The five faults of the published implementation, each shown absent by a test that fails on the published behaviour.

"published" below is the fault, written out, so that each test shows that it would be seen.
"""

import pytest
import torch

from gradbalance import AffineLoss, MarbleOptimizer
from gradbalance.solvers import min_norm
from tests.gradbalance.models import LinearLosses


def update_cosines(coefficients, rows):
    update = coefficients @ rows
    return rows @ update / (rows.norm(dim=1) * update.norm())


def marble(problem, **options):
    return MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.0), **options)


def at_120_degrees():
    return LinearLosses([[10.0, 0.0], [-0.5, 3**0.5 / 2]])


def test_1_amortised_steps_use_the_cached_norms():
    problem = at_120_degrees()
    optimizer = marble(problem, refresh_every=2)
    for refreshed in (True, False):
        optimizer.zero_grad()
        report = optimizer.backward(problem.losses())
        assert report.refreshed is refreshed
        cosines = problem.rows @ problem.x.grad / (problem.rows.norm(dim=1) * problem.x.grad.norm())
        torch.testing.assert_close(cosines, torch.tensor([0.5, 0.5], dtype=torch.float64))
        torch.testing.assert_close(report.weights, torch.tensor([0.5, 0.5], dtype=torch.float64))
        optimizer.step()
    published = update_cosines(torch.tensor([0.5, 0.5], dtype=torch.float64), problem.rows)
    assert published.tolist() == pytest.approx([0.996, -0.419], abs=1e-3)


def test_1_no_conflict_in_a_thousand_draws_amortised_steps_included():
    generator = torch.Generator().manual_seed(0)
    ours = published = 0
    for _ in range(1000):
        scales = torch.exp(torch.randn(5, 1, generator=generator, dtype=torch.float64))
        directions = torch.randn(5, 200, generator=generator, dtype=torch.float64)
        problem = LinearLosses(scales * torch.nn.functional.normalize(directions))
        optimizer = marble(problem, ema_decay=0.0, refresh_every=2)
        for _ in range(2):
            optimizer.zero_grad()
            report = optimizer.backward(problem.losses())
            cosines = problem.rows @ problem.x.grad / (problem.rows.norm(dim=1) * problem.x.grad.norm())
            ours += int((cosines < -1e-6).any())
            assert report.conflicts == 0
            optimizer.step()
        # The fault: α of the unit gradients, applied to the raw ones.
        published += int((update_cosines(report.weights, problem.rows) < 0).any())
    assert ours == 0
    assert 0.13 < published / 1000 < 0.24  # 18 % at P = 200, and more the smaller P is


def test_2_advantages_are_clamped_for_each_objective_before_they_are_blended():
    """A_1 = +9 is clamped to 5 on its own: (5 − 5)/2 = 0; clamping the mean (9 − 5)/2 = 2 would push up."""
    advantages, bound = torch.tensor([[9.0], [-5.0]], dtype=torch.float64), 5.0
    r = (0.5 + advantages.clamp(-bound, bound) / (2 * bound)).unsqueeze(1)
    terms = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)  # P_i and N_i
    loss = AffineLoss(terms, torch.cat([r, 1 - r], dim=1))
    (gradient,) = torch.autograd.grad(loss.combine([0.5, 0.5]), terms)
    torch.testing.assert_close(gradient, torch.full_like(gradient, 0.5))
    published = 0.5 + advantages.mean(0).clamp(-bound, bound) / (2 * bound)
    assert published.item() == pytest.approx(0.7)


def test_3_a_reward_on_a_third_of_the_samples_is_not_diluted():
    """With n_k in the mean and zeros as mask, the specialist's gradient is that of its own samples alone."""
    torch.manual_seed(0)
    features, theta = torch.randn(9, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(2, 9, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 3:] = False
    loss = AffineLoss.policy_gradient(features @ theta, advantages.masked_fill(~mask, torch.nan), mask)
    (ours,) = torch.autograd.grad(loss.losses()[1], theta)
    torch.testing.assert_close(ours, -(advantages[1, :3] @ features[:3]) / 3)
    published = -(advantages[1, :3] @ features[:3]) / 9
    torch.testing.assert_close(ours, 3 * published)


def test_4_one_coefficient_vector_in_a_step_and_as_many_micro_batches_in_the_solve_as_asked():
    """Two micro-batches with opposite needs: their sum decides, and both get the same λ."""
    first, second = LinearLosses([[1.0, 0.0], [0.0, 1.0]]), LinearLosses([[5.0, 1.0], [1.0, 0.2]])
    second.x = first.x
    optimizer = marble(first, ema_decay=0.0)
    optimizer.backward(first.losses(), accumulate=True)
    report = optimizer.backward(second.losses())
    total = first.rows + second.rows
    torch.testing.assert_close(report.gramian, total @ total.T)
    torch.testing.assert_close(first.x.grad, report.coefficients @ total)

    optimizer = marble(first, ema_decay=0.0, refresh_micro_batches=1)
    optimizer.zero_grad()
    optimizer.backward(first.losses(), accumulate=True)
    report = optimizer.backward(second.losses())
    torch.testing.assert_close(report.gramian, first.rows @ first.rows.T)
    torch.testing.assert_close(first.x.grad, report.coefficients @ total)


def test_5_exact_solve_where_a_general_solver_gives_up():
    """Norms over twelve orders: the KKT residual on the unit Gramian stays ≤ 1e-9; nothing falls back to the mean."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 30, generator=generator, dtype=torch.float64)
    rows *= torch.logspace(-6, 6, 8, dtype=torch.float64).unsqueeze(1)
    problem = LinearLosses(rows)
    report = marble(problem, ema_decay=0.0).backward(problem.losses())
    unit = torch.nn.functional.normalize(rows)
    alpha = report.weights
    slope = unit @ unit.T @ alpha
    assert alpha.min() >= 0
    assert (alpha @ slope - slope.min()).item() < 1e-9
    torch.testing.assert_close(alpha, min_norm(unit @ unit.T), rtol=1e-9, atol=1e-12)
    assert (alpha - 1 / 8).abs().max() > 0.01


def test_5_a_zero_gradient_leaves_the_solve_and_a_nonfinite_one_is_named():
    problem = LinearLosses([[1.0, 0.0], [0.0, 0.0], [0.6, 0.8]])
    report = marble(problem, ema_decay=0.0).backward(problem.losses())
    assert report.weights[1] == 0
    assert problem.x.grad.norm() > 0.5
    problem.rows[1, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="'objective_1'"):
        marble(problem).backward(problem.losses())
