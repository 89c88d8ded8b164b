"""Moving averages without a bias to their beginning."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance.estimators import SplitGramian
from gradbalance.estimators.averages import gained, moved
from tests.gradbalance.estimators.noisy import Quadratics, gramian

decays = st.sampled_from([0.0, 0.5, 0.9, 0.999])


@settings(max_examples=100, deadline=None)
@given(decay=decays, values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), seed=st.integers(0, 100))
def test_it_is_the_weighted_mean_with_decaying_weights(decay, values, seed):
    amounts = np.random.default_rng(seed).uniform(0.1, 2.0, len(values))
    average, mass = np.zeros(1), np.zeros(1)
    for value, amount in zip(values, amounts, strict=True):
        mass, part = gained(mass, np.array([amount]), decay)
        average = moved(average, np.array([value]), part)
    weights = amounts * decay ** np.arange(len(values))[::-1]
    assert mass.item() == pytest.approx(weights.sum())
    assert average.item() == pytest.approx(weights @ values / weights.sum(), rel=1e-9, abs=1e-6)


@given(decay=decays, value=st.floats(allow_nan=False, allow_infinity=False, width=32), steps=st.integers(1, 50))
def test_a_constant_is_its_own_average_to_the_last_bit(decay, value, steps):
    average, mass = np.zeros(1), np.zeros(1)
    for _ in range(steps):
        mass, part = gained(mass, np.ones(1), decay)
        average = moved(average, np.array([value]), part)
    assert average.item() == value


def test_nothing_new_changes_nothing():
    mass, part = gained(np.array([0.0, 3.0]), np.zeros(2), 0.9)
    assert mass.tolist() == [0.0, 3.0]
    assert moved(np.array([1.0, 2.0]), np.array([np.pi, 1e300]), part).tolist() == [1.0, 2.0]


def test_equal_steps_have_adams_correction():
    mass = np.zeros(1)
    for step in range(1, 30):
        mass, part = gained(mass, np.ones(1), 0.9)
        assert part.item() == pytest.approx((1 - 0.9) / (1 - 0.9**step))


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_an_estimator_that_sees_the_same_step_again_says_the_same(decay):
    rows, counts = Quadratics(seed=3).step(4, 2)
    estimator = SplitGramian(ema_decay=decay)
    first = estimator.estimate(gramian(rows), counts)
    for _ in range(20):
        again = estimator.estimate(gramian(rows), counts)
        assert (again.gramian == first.gramian).all()
        assert (again.signal == first.signal).all()


def test_pairs_that_are_not_together_in_a_step_keep_their_averages():
    problem = Quadratics(count=3)
    estimator = SplitGramian()
    rows, counts = problem.step(4, 2)
    estimator.estimate(gramian(rows), counts)
    before = estimator.state_dict()
    gone = {(i, 1) for i in range(4)}
    rows, counts = problem.step(4, 2, absent=gone)
    found = estimator.estimate(gramian(rows), counts)
    after = estimator.state_dict()
    for name in ("noisy", "signal", "mass"):
        old, new = (np.reshape(state[name], (3, 3)) for state in (before, after))
        assert (old[1] == new[1]).all()
        assert (old[:, 1] == new[:, 1]).all()
        assert (old[np.ix_([0, 2], [0, 2])] != new[np.ix_([0, 2], [0, 2])]).all()
    for matrix in (found.gramian, found.signal):  # an absent objective is no row of the Gramian
        assert (matrix[1] == 0).all()
        assert (matrix[:, 1] == 0).all()
        assert (matrix.diagonal()[[0, 2]] > 0).all()
    assert found.signal_to_noise[1] > 0  # what is known of it stays known
