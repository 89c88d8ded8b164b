"""The last stage of a run: from ``uniform_after`` on refreshes use equal weights, and all else stays as it is."""

import pytest
import torch
from torch.optim import SGD

from gradbalance import BalancedOptimizer, MarbleOptimizer
from gradbalance.balancers import CRMOGM, FAMO, Marble, SDMGrad
from tests.gradbalance.models import LinearLosses
from tests.gradbalance.test_resume import EVERY, MODES, one_process_dcp, stop_and_go_on, through_dcp_folder

ROWS = [[1.0, 0.0, 0.0], [-2.0, 3.0, 0.0], [0.0, -0.4, 0.3]]
NORMS = torch.tensor(ROWS, dtype=torch.float64).norm(dim=1)
UNIFORM = NORMS.mean() / 3 / NORMS


def make(make_optimizer=MarbleOptimizer, **options):
    problem = LinearLosses(ROWS)
    return problem, make_optimizer(SGD([problem.x], lr=0.0), **options)


def steps(problem, optimizer, count, losses=lambda given: given):
    seen = []
    for _ in range(count):
        optimizer.zero_grad()
        optimizer.backward(losses(problem.losses()))
        seen.append((optimizer.coefficients, problem.x.grad.clone()))
        optimizer.step()
    return seen


def test_equal_weights_of_unit_gradients_from_the_named_step_on():
    plain, switched = make(), make(uniform_after=3)
    before = steps(*plain, 3)
    seen = steps(*switched, 6)
    for (coefficients, gradient), (expected, update) in zip(seen[:3], before, strict=True):
        assert torch.equal(coefficients, expected)
        assert torch.equal(gradient, update)
    assert (before[2][0] - UNIFORM).abs().max() > 0.1
    for coefficients, gradient in seen[3:]:  # at once: equal weights are not averaged
        torch.testing.assert_close(coefficients, UNIFORM)
        torch.testing.assert_close(gradient, UNIFORM @ torch.tensor(ROWS, dtype=torch.float64))
    torch.testing.assert_close(switched[1].report.weights, torch.full((3,), 1 / 3, dtype=torch.float64))


def test_between_refreshes_it_waits_for_the_next_one():
    seen = steps(*make(uniform_after=2, refresh_every=3), 5)
    assert torch.equal(seen[2][0], seen[0][0])
    torch.testing.assert_close(seen[3][0], UNIFORM)


def test_raw_gradients_are_averaged_plainly():
    seen = steps(*make(BalancedOptimizer, balancer="modo", uniform_after=0), 1)
    torch.testing.assert_close(seen[0][0], torch.full((3,), 1 / 3, dtype=torch.float64))


def test_only_those_present_with_a_gradient_share():
    problem, optimizer = make(uniform_after=1)
    steps(problem, optimizer, 1)
    kept = optimizer.param_groups[0]["gradbalance"]["weights"][2]
    steps(problem, optimizer, 1, lambda given: [given[0], given[1], None])
    weights = optimizer.param_groups[0]["gradbalance"]["weights"]
    assert weights == pytest.approx([(1 - kept) / 2, (1 - kept) / 2, kept])
    steps(problem, optimizer, 1, lambda given: [0 * given[0], *given[1:]])
    assert optimizer.param_groups[0]["gradbalance"]["weights"] == [0.0, 0.5, 0.5]


def test_a_balancer_that_looks_at_losses_alone_ends_uniform_too():
    problem, optimizer = make(BalancedOptimizer, balancer=FAMO(min_losses=[-9.0] * 3), uniform_after=2, refresh_every=9)
    steps(problem, optimizer, 3)
    torch.testing.assert_close(optimizer.coefficients, torch.full((3,), 1 / 3, dtype=torch.float64))


def test_never_reached_it_changes_nothing():
    for (a, b), (c, d) in zip(steps(*make(), 4), steps(*make(uniform_after=4), 4), strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


@one_process_dcp
@pytest.mark.parametrize("stop", [1, EVERY, EVERY + 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_switches_at_the_same_step(mode, stop, tmp_path):
    options = {"refresh_every": EVERY, "ema_decay": 0.7, "uniform_after": EVERY}
    stop_and_go_on(through_dcp_folder, tmp_path, mode, stop, **options)


def test_the_balancers_own_state_stays():
    problem, optimizer = make(BalancedOptimizer, balancer=CRMOGM(Marble(), decay=0.5), uniform_after=2)
    steps(problem, optimizer, 2)
    before = optimizer.balancer.state_dict()
    steps(problem, optimizer, 2)
    assert optimizer.param_groups[0]["gradbalance"]["balancer"] == before
    assert optimizer.param_groups[0]["gradbalance"]["method"] == "CRMOGM"


@pytest.mark.parametrize("value", [-1, 1.5, "3", True])
def test_bad_values(value):
    with pytest.raises(ValueError, match="uniform_after must be an integer of at least 0 or None, got"):
        make(uniform_after=value)


@pytest.mark.parametrize(
    ("balancer", "message"),
    [
        ("mgda", "uniform_after needs a balancer whose weights are non-negative with sum 1, .* MGDA are not"),
        (CRMOGM("pcgrad"), "PCGrad are not"),
        (Marble([1, 2, 3]), "uniform_after and preference exclude each other"),
        (CRMOGM(Marble([1, 2, 3])), "uniform_after and preference exclude each other"),
        (SDMGrad(preference=[1, 2, 3]), "uniform_after and preference exclude each other"),
    ],
)
def test_balancers_without_equal_weights(balancer, message):
    with pytest.raises(ValueError, match=message):
        make(BalancedOptimizer, balancer=balancer, uniform_after=3)
