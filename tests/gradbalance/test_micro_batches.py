"""How many micro-batches a refresh measures when it is chosen from the noise."""

import copy
import io
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from gradbalance import BalancedOptimizer, measurement
from gradbalance.estimators import Estimate, HistoryGramian, SplitGramian
from gradbalance.micro_batches import needed
from gradbalance.state import KEY
from tests.gradbalance.estimators.noisy import Quadratics
from tests.gradbalance.models import OneTrunk, batches
from tests.gradbalance.training import build, everything_of, record_of

NAN = float("nan")
OPTIONS = {"gramian_estimator": "split", "refresh_micro_batches": "auto"}


# --- The formula ------------------------------------------------------------------------------------------------


def estimate(*ratios, zero=()):
    squares = np.array([0.0 if k in zero else 1.0 for k in range(len(ratios))])
    return Estimate(np.diag(squares), np.diag(squares), np.array(ratios))


@pytest.mark.parametrize("measured", [2.0, 7.0, 32.0])
@pytest.mark.parametrize("scale", [3.0, 10.0, 100.0])
def test_it_is_the_noise_scale_whatever_was_measured(measured, scale):
    ratio = (1 / (1 + scale / measured)) ** 0.5
    assert needed(estimate(0.99, ratio), measured, 2) == pytest.approx(scale, abs=1)


def test_it_is_rounded_up_and_the_noisiest_objective_decides():
    assert needed(estimate(math.sqrt(4 / 6.5), math.sqrt(4 / 5)), 4.0, 2) == 3
    assert needed(estimate(math.sqrt(4 / 6.5), math.sqrt(4 / 9.5)), 4.0, 2) == 6


@pytest.mark.parametrize("ratio", [1.0, 1.2, 0.999])  # an estimate may be of more signal than gradient
def test_no_fewer_than_the_estimator_needs(ratio):
    assert needed(estimate(ratio), 8.0, 3) == 3


def test_all_where_too_little_is_known():
    assert needed(estimate(0.9, NAN), 8.0, 2) == 0  # of one with a gradient nothing is known
    assert needed(estimate(0.9, 0.0), 8.0, 2) == 0  # its signal is lost
    assert needed(estimate(0.9, 1e-200), 8.0, 2) == 0
    assert needed(Estimate(np.eye(2)), 8.0, 2) == 0


def test_an_objective_without_gradient_holds_nobody_up():
    assert needed(estimate(math.sqrt(0.5), NAN, zero=[1]), 8.0, 2) == 8


def test_an_absent_objective_counts_as_it_was():
    assert needed(estimate(math.sqrt(0.5), math.sqrt(0.21), zero=[1]), 8.0, 2) == 31


@pytest.mark.parametrize("micro_batches", [2, 8, 32])
def test_the_variance_of_the_signals_estimate_is_that_of_the_derivation(micro_batches):
    problem = Quadratics(count=1, size=100, noise=3.0)
    found = []
    for _ in range(3000):
        rows, _ = problem.step(micro_batches, 2)
        found.append(4.0 * float(rows[0] @ rows[1]))
    square = problem.signal.item()
    ratio = problem.noise.item() / square / micro_batches
    assert np.var(found) / square**2 == pytest.approx(4 * (ratio + ratio**2) / 100, rel=0.15)


# --- Known signal and noise -------------------------------------------------------------------------------------


class Noisy:
    """Quadratics whose gradients come from micro-batches of known noise; the parameters stay where they are."""

    def __init__(self, noise, count=2, size=400, **options):
        self.problem = Quadratics(count=count, size=size, noise=noise)
        self.scale = float((self.problem.noise.diagonal() / self.problem.signal.diagonal()).max())
        self.x = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        options = {**OPTIONS, "balancer": "nash_mtl", **options}
        self.optimizer = BalancedOptimizer(torch.optim.SGD([self.x], lr=0.0), **options)

    def step(self, micro_batches, absent=()):
        """``absent`` holds objectives."""
        self.optimizer.zero_grad()
        for i in range(micro_batches):
            rows = torch.from_numpy(self.problem.gradients()) / micro_batches
            losses = [None if k in absent else row @ self.x for k, row in enumerate(rows)]
            report = self.optimizer.backward(losses, accumulate=i + 1 < micro_batches)
        self.optimizer.step()
        return report

    @property
    def wanted(self):
        return self.optimizer.param_groups[0][KEY]["wanted"]


@pytest.mark.parametrize("noise", [2.0, 3.0, 4.0])
def test_it_converges_to_the_noise_scale(noise):
    run = Noisy(noise)
    measured = [run.step(32).micro_batches for _ in range(30)]
    assert measured[0] == 32  # nothing is known yet
    np.testing.assert_allclose(measured[1:], run.scale, rtol=0.25, atol=1.0)
    # The whole step's gradient, whatever was measured of it.
    assert run.optimizer.report.signal_to_noise.min() == pytest.approx((1 + run.scale / 32) ** -0.5, rel=0.1)


def test_more_noise_than_the_step_can_average_away_measures_all():
    run = Noisy(10.0)
    assert [run.step(8).micro_batches for _ in range(5)] == [8] * 5
    assert run.wanted > 8


def test_it_follows_noise_that_changes():
    run = Noisy(4.0)
    for _ in range(10):
        run.step(32)
    run.problem.sigmas = run.problem.sigmas / 2
    few = [run.step(32).micro_batches for _ in range(60)][-10:]
    np.testing.assert_allclose(few, run.scale / 4, rtol=0.25, atol=1.0)
    run.problem.sigmas = run.problem.sigmas * 2
    many = [run.step(32).micro_batches for _ in range(60)][-10:]
    np.testing.assert_allclose(many, run.scale, rtol=0.25, atol=1.0)


def test_the_estimates_are_those_of_the_whole_step_whatever_was_measured():
    """Nor does the step of a method that looks at the gradients' length change with m."""
    run = Noisy(3.0)
    signals, lengths = [], []
    for _ in range(30):
        report = run.step(32)
        signals.append(report.signal.diagonal())
        lengths.append((report.coefficients @ report.signal @ report.coefficients).sqrt())
    assert report.micro_batches < 16
    signal = torch.from_numpy(run.problem.signal).diagonal()
    for found in signals:
        torch.testing.assert_close(found, signal, rtol=0.25, atol=0)  # a third of the gradients would be a tenth of it
    torch.testing.assert_close(torch.stack(lengths), lengths[0].expand(30), rtol=0.1, atol=0)


@pytest.mark.parametrize("shares", [(1.0, 0.25), (0.25, 1.0), (0.5, 0.5)])
def test_noise_is_put_to_that_of_the_whole_step(shares):
    """Otherwise N and ρ would be those of shares long past."""
    found = []
    for seed in range(200):
        problem = Quadratics(count=2, noise=2.0)
        problem.rng = np.random.default_rng(seed)
        estimator = SplitGramian(ema_decay=0.9)
        for share in shares:
            rows, counts = problem.step(int(16 * share), 2)
            result = estimator.estimate((rows * share) @ (rows * share).T, counts, share)
        found.append(result.gramian.diagonal())
    expected = problem.signal.diagonal() + problem.noise.diagonal() / 16
    mean, error = np.mean(found, axis=0), np.std(found, axis=0) / 200**0.5
    assert (abs(mean - expected) <= 4 * error).all()
    assert (error < 0.05 * expected).all()


def test_a_share_is_positive_and_not_for_averages_of_past_gradients():
    with pytest.raises(ValueError, match="share must be positive, got 0"):
        SplitGramian().estimate(np.eye(4), np.ones((2, 2)), 0.0)
    with pytest.raises(ValueError, match=r"share must be 1, got 0\.5"):
        HistoryGramian().estimate(np.eye(4), np.ones((1, 2)), 0.5)


# --- In the engine ----------------------------------------------------------------------------------------------


def test_it_takes_as_many_reverse_passes_as_it_says(monkeypatch):
    passes = []
    original = measurement.reverse_pass
    monkeypatch.setattr(measurement, "reverse_pass", lambda *a, **o: passes.append(1) or original(*a, **o))
    run = Noisy(2.0)
    for _ in range(4):
        wanted = run.wanted
        report = run.step(16)
        assert len(passes) == 2 * report.micro_batches
        assert report.micro_batches == (wanted or 16)
        passes.clear()
    assert wanted < 10


def test_amortised_steps_leave_it_alone():
    run = Noisy(2.0, refresh_every=3)
    seen = []
    for _ in range(7):
        report = run.step(16)
        seen.append((report.refreshed, report.micro_batches, run.wanted))
    assert [refreshed for refreshed, *_ in seen] == [True, False, False, True, False, False, True]
    assert seen[0] == (True, 16.0, seen[1][2])
    assert seen[1][1:] == seen[2][1:] == (16.0, seen[0][2])
    assert seen[3][1] == seen[2][2]
    assert seen[4][1:] == seen[5][1:] == (seen[3][1], seen[3][2])
    assert seen[6][1] == seen[5][2]


def test_a_short_step_measures_all_it_has():
    run = Noisy(3.0)
    run.step(32)
    assert run.wanted > 4
    assert run.step(4).micro_batches == 4


def test_a_refresh_still_waits_for_what_no_solve_has_seen():
    run = Noisy(1.0, count=3)
    run.step(16, absent=[2])
    assert 2 <= run.wanted < 8
    run.optimizer.zero_grad()
    for i in range(16):
        rows = torch.from_numpy(run.problem.gradients()) / 16
        losses = [None if k == 2 and i < 12 else row @ run.x for k, row in enumerate(rows)]
        report = run.optimizer.backward(losses, accumulate=i < 15)
    assert report.micro_batches == 13
    run.optimizer.step()
    assert run.wanted == 0  # one micro-batch tells nothing of its noise


def test_a_step_that_is_not_made_chooses_nothing():
    run = Noisy(2.0, nonfinite="skip")
    run.step(8)
    before = copy.deepcopy(run.optimizer.param_groups[0][KEY])
    run.problem.sigmas = run.problem.sigmas * np.inf
    assert run.step(8).skipped
    assert run.optimizer.param_groups[0][KEY] == before


def some_steps(model, optimizer, steps):
    records = []
    for t in steps:
        optimizer.zero_grad()
        data = batches(6, seed=t)
        for i, x in enumerate(data):
            losses = [loss / 6 for loss in model.losses(x)]
            if t % 4 == 2:
                losses[1] = None
            report = optimizer.backward(losses, accumulate=i < 5)
        optimizer.step()
        records.append(record_of(report))
    return records


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5])
def test_a_resumed_run_is_the_run_that_never_stopped(stop):
    saved, fresh = (build(seed=seed, model=OneTrunk, refresh_every=2, **OPTIONS) for seed in (0, 1))
    some_steps(*saved, range(stop))
    fresh[0].load_state_dict(saved[0].state_dict())
    buffer = io.BytesIO()
    torch.save(saved[1].state_dict(), buffer)
    buffer.seek(0)
    fresh[1].load_state_dict(torch.load(buffer, weights_only=True))
    ahead = range(stop, stop + 8)
    assert some_steps(*fresh, ahead) == some_steps(*saved, ahead)
    assert everything_of(*fresh) == everything_of(*saved)
    state = saved[1].param_groups[0][KEY]
    assert json.loads(json.dumps(state)) == state
    assert state["most"] == 6


def test_integers_choose_nothing():
    model, optimizer = build(model=OneTrunk, gramian_estimator="split", refresh_micro_batches=3)
    some_steps(model, optimizer, range(4))
    state = optimizer.param_groups[0][KEY]
    assert (state["measured"], state["most"], state["wanted"]) == (3, 0, 0)
    assert optimizer.report.micro_batches == 3
    assert optimizer.report.as_dict()["balance/micro_batches"] == 3


# --- Wrong options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("plain", "Plain"), ("history", "HistoryGramian")])
def test_an_estimator_that_compares_no_micro_batches_is_refused(name, kind):
    with pytest.raises(ValueError, match=f'comparing micro-batches, which {kind} does not do; use .*"split"'):
        build(gramian_estimator=name, refresh_micro_batches="auto")


@pytest.mark.parametrize("value", ["Auto", True, 2.0, 0])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=f'refresh_micro_batches must be .*"auto" or None, got {value!r}'):
        build(gramian_estimator="split", refresh_micro_batches=value)
