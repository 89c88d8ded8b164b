"""This step's gradients against averages of the past ones."""

import numpy as np
import pytest

from gradbalance.estimators import HistoryGramian
from tests.gradbalance.estimators.noisy import Quadratics, gramian, mean_and_error


class Run:
    """An estimator with the buffers that an engine keeps for it."""

    def __init__(self, problem, **options):
        self.problem = problem
        self.estimator = HistoryGramian(**options)
        self.averages = np.zeros_like(problem.signals)

    def step(self, absent=()):
        here = np.array([k not in absent for k in range(len(self.averages))], dtype=float)
        gradients = here[:, None] * self.problem.gradients()
        products = gramian(np.concatenate([gradients, self.averages]))
        found = self.estimator.estimate(products, here[None])
        self.averages += found.newest[:, None] * (gradients - self.averages)
        return found, gradients

    def raw(self):
        count = len(self.averages)
        return np.reshape(self.estimator.signal, (count, count))


def test_it_is_unbiased_and_the_plain_gramian_is_off_by_the_noise():
    problem = Quadratics(count=3, noise=1.5)
    signals, measured = [], []
    for _ in range(800):
        run = Run(problem, ema_decay=0.8)
        for _ in range(4):
            run.step()
        signals.append(run.raw())
        measured.append(np.reshape(run.estimator.noisy, (3, 3)))
    mean, error = mean_and_error(signals)
    assert (abs(mean - problem.signal) <= 4.5 * error).all()
    mean, error = mean_and_error(measured)
    assert (abs(mean - problem.signal - problem.noise) <= 4.5 * error).all()
    assert (problem.noise > 10 * error).all()


def test_the_first_step_has_no_past_and_is_plain():
    run = Run(Quadratics(count=3))
    found, gradients = run.step()
    np.testing.assert_allclose(found.gramian, gramian(gradients), rtol=1e-12)
    np.testing.assert_allclose(found.signal, gramian(gradients), rtol=1e-12)
    assert np.isnan(found.signal_to_noise).all()
    assert found.newest.tolist() == [1.0, 1.0, 1.0]
    np.testing.assert_array_equal(run.averages, gradients)


def test_the_average_of_the_past_has_no_bias_to_its_beginning():
    run = Run(Quadratics(count=2), history_decay=0.8)
    seen = [run.step()[1] for _ in range(7)]
    weights = 0.8 ** np.arange(7)[::-1]
    np.testing.assert_allclose(run.averages, np.tensordot(weights, seen, 1) / weights.sum(), rtol=1e-12)


def test_both_sides_of_a_pair_are_used_or_the_one_there_is():
    problem = Quadratics(count=2, noise=1.0)
    run = Run(problem, ema_decay=0.0)
    _, first = run.step(absent={1})
    _, second = run.step()
    raw = run.raw()
    assert raw[0, 1] == raw[1, 0] == pytest.approx(second[1] @ first[0])  # objective 1 has no past
    assert raw[1, 1] == 0.0
    past = run.averages.copy()
    _, third = run.step()
    assert run.raw()[0, 1] == pytest.approx((third[0] @ past[1] + past[0] @ third[1]) / 2)


def test_an_absent_objective_keeps_its_past():
    run = Run(Quadratics(count=2))
    run.step()
    before = run.averages.copy()
    found, _ = run.step(absent={0})
    assert found.newest[0] == 0.0
    np.testing.assert_array_equal(run.averages[0], before[0])
    assert (run.averages[1] != before[1]).all()


def test_a_past_that_was_lost_is_begun_anew():
    """A checkpoint that kept the numbers and not the buffers must not count zeros as a gradient."""
    problem = Quadratics(count=2, noise=0.5)
    run = Run(problem)
    for _ in range(5):
        run.step()
    before = run.estimator.signal
    run.averages[:] = 0.0
    found, gradients = run.step()
    assert run.estimator.signal == before
    assert found.newest.tolist() == [1.0, 1.0]
    np.testing.assert_array_equal(run.averages, gradients)
