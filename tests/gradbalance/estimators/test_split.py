"""Micro-batches of one step against each other: unbiased, where the plain Gramian is off by the noise."""

import numpy as np
import pytest

from gradbalance.estimators import SplitGramian
from tests.gradbalance.estimators.noisy import Quadratics, gramian, mean_and_error

DRAWS = 1500


def raw(estimator, size, name="signal"):
    """The averages before they are floored and made valid."""
    return np.reshape(getattr(estimator, name), (size, size))


def draws(problem, micro_batches, parts, absent=(), count=DRAWS):
    """Û and N of single steps, DRAWS times."""
    signals, measured = [], []
    for _ in range(count):
        estimator = SplitGramian(parts=parts, ema_decay=0.0)
        rows, counts = problem.step(micro_batches, parts, absent)
        estimator.estimate(gramian(rows), counts)
        signals.append(raw(estimator, len(problem.signals)))
        measured.append(raw(estimator, len(problem.signals), "noisy"))
    return signals, measured


@pytest.mark.parametrize(
    ("micro_batches", "parts"), [(2, 2), (3, 2), (4, 2), (4, 4), (5, 3), (2, 4)], ids=lambda n: str(n)
)
def test_it_is_unbiased_and_the_plain_gramian_is_off_by_the_noise(micro_batches, parts):
    problem = Quadratics(count=3, noise=2.0)
    signals, measured = draws(problem, micro_batches, parts)
    mean, error = mean_and_error(signals)
    assert (abs(mean - problem.signal) <= 4.5 * error).all()
    noise = problem.noise / micro_batches
    mean, error = mean_and_error(measured)
    assert (abs(mean - problem.signal - noise) <= 4.5 * error).all()
    assert (noise > 10 * error).all()  # so the test could tell


def test_more_parts_have_less_variance_and_at_most_half_of_it():
    problem = Quadratics(count=2, noise=30.0)  # all noise
    spread = {parts: np.var(draws(problem, 8, parts, count=2000)[0], axis=0) for parts in (2, 4, 8)}
    assert (spread[8] < spread[4]).all()
    assert (spread[4] < spread[2]).all()
    np.testing.assert_allclose(spread[8] / spread[2], 8 / 7 / 2, rtol=0.25)


def test_a_reward_in_one_part_only_tells_of_its_pairs_and_not_of_itself():
    problem = Quadratics(count=3, noise=1.0)
    only_first = {(i, 0) for i in (1, 2, 3)}  # of four micro-batches
    signals, _ = draws(problem, 4, 2, absent=only_first)
    mean, error = mean_and_error(signals)
    # The losses are divided by four, and there is a quarter of objective 0.
    expected = problem.signal * np.outer([0.25, 1, 1], [0.25, 1, 1])
    known = np.ones((3, 3), dtype=bool)
    known[0, 0] = False
    assert (abs(mean - expected)[known] <= 4.5 * error[known]).all()
    assert mean[0, 0] == 0.0


def test_until_it_is_in_two_parts_its_own_step_stands_for_it():
    problem = Quadratics(count=2, noise=1.0)
    rows, counts = problem.step(2, 2, absent={(1, 0)})
    found = SplitGramian().estimate(gramian(rows), counts)
    measured = gramian(rows)[0, 0]
    assert found.signal[0, 0] == found.gramian[0, 0] == pytest.approx(measured)
    assert np.isnan(found.signal_to_noise[0])
    assert np.isfinite(found.signal_to_noise[1])


def test_a_part_whose_gradient_is_zero_does_not_count():
    """0 · loss where a reward does not apply: the same as None."""
    problem = Quadratics(count=2, noise=1.0)
    rows, counts = problem.step(4, 2, absent={(1, 0), (3, 0)})
    left_out, written_as_zero = SplitGramian(), SplitGramian()
    left_out.estimate(gramian(rows), counts)
    written_as_zero.estimate(gramian(rows), np.full((2, 2), 2.0))
    assert left_out.state_dict() == written_as_zero.state_dict()


def test_a_rare_reward_is_averaged_by_what_the_steps_tell():
    """In two parts now and then, in one at other times: the second kind of step must not pull it to 0."""
    problem = Quadratics(count=2, noise=0.0)
    estimator = SplitGramian()
    for step in range(40):
        rows, counts = problem.step(2, 2, absent={(1, 0)} if step % 4 else ())
        estimator.estimate(gramian(rows), counts)
    assert raw(estimator, 2)[0, 0] == pytest.approx(problem.signal[0, 0])


def test_unevenly_spread_rare_samples_are_under_estimated_by_one_over_their_number():
    rng = np.random.default_rng(0)
    samples = 6  # each in one of two parts by chance; every one's gradient is the signal 1 / samples
    found = []
    for _ in range(2000):
        share = rng.binomial(samples, 0.5) / samples
        rows = np.array([[share], [1 - share]])
        estimator = SplitGramian(ema_decay=0.0, min_signal=1e-9)
        estimator.estimate(gramian(rows), np.ones((2, 1)))
        found.append(estimator.signal[0])
    # Steps with all samples in one part tell nothing and are left out, so it is a little above 1 − 1/6.
    seen = [value for value in found if value > 0]
    assert 500 < len(seen) < 2000
    assert np.mean(seen) == pytest.approx(1 - 1 / samples, abs=0.04)


def test_one_micro_batch_goes_on_with_the_averages_or_says_what_to_do():
    problem = Quadratics(count=2)
    rows, counts = problem.step(1, 2)
    estimator = SplitGramian()
    with pytest.raises(RuntimeError, match=r"accumulate=True.*history"):
        estimator.estimate(gramian(rows), counts)
    assert estimator.state_dict() == SplitGramian().state_dict()
    two, both = problem.step(2, 2)
    estimator.estimate(gramian(two), both)
    before = estimator.state_dict()
    found = estimator.estimate(gramian(rows), counts)
    assert estimator.state_dict() == before
    np.testing.assert_allclose(found.gramian, np.reshape(before["noisy"], (2, 2)))


def test_two_micro_batches_with_gradients_in_one_are_no_mistake():
    """A first step in which every reward that counts is in one micro-batch: there is a Gramian, and no estimate."""
    rows, counts = np.array([[2.0], [0.0]]), np.ones((2, 1))
    found = SplitGramian().estimate(gramian(rows), counts)
    assert found.signal.tolist() == found.gramian.tolist() == [[4.0]]
    assert np.isnan(found.signal_to_noise).all()


def test_without_noise_signal_and_gramian_are_the_same():
    problem = Quadratics(count=4, noise=0.0)
    rows, counts = problem.step(5, 3)
    found = SplitGramian(parts=3).estimate(gramian(rows), counts)
    np.testing.assert_allclose(found.signal, problem.signal, rtol=1e-12)
    np.testing.assert_allclose(found.gramian, problem.signal, rtol=1e-12)
    np.testing.assert_allclose(found.signal_to_noise, 1.0)


def test_a_drowned_objective_is_floored_and_reported_before_flooring():
    """Two parts that point opposite ways: the cross product is negative."""
    rows = np.array([[1.0, 0.1], [3.0, 0.0], [-1.0, 0.1], [3.0, 0.0]])
    found = SplitGramian(min_signal=0.2).estimate(gramian(rows), np.ones((2, 2)))
    assert found.signal_to_noise.tolist() == [0.0, 1.0]
    assert found.signal[0, 0] == pytest.approx(0.2 * 0.04)
    assert found.signal[1, 1] == pytest.approx(36.0)
