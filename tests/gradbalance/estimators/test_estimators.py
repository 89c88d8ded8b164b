"""What every estimator keeps to, and finding one by name."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance.estimators import Averaged, HistoryGramian, Plain, SplitGramian, available, get
from tests.gradbalance.estimators.noisy import gramian

every = pytest.mark.parametrize("name", available())
averaging = pytest.mark.parametrize("name", ["history", "split"])


def steps(estimator, count, number, seed, order=None, scales=None):
    """What some steps of noise with a rare second objective make of the estimator; the history's rows are noise too."""
    rng, blocks = np.random.default_rng(seed), estimator.parts + estimator.uses_history
    order = np.arange(count) if order is None else order
    scales = np.ones(count) if scales is None else np.asarray(scales)
    found = []
    for step in range(number):
        rows = rng.standard_normal((blocks, count, 2 * count)) + 0.7
        counts = np.ones((estimator.parts, count))
        if count > 1 and step % 2:
            rows[0, 1], counts[0, 1] = 0.0, 0.0
        rows = (scales[:, None] * rows)[:, order]
        found.append(estimator.estimate(gramian(rows.reshape(blocks * count, -1)), counts[:, order]))
    return found


def matrices(found):
    return [m for m in (found.gramian, found.signal) if m is not None]


@every
def test_found_by_name(name):
    assert get(name).state_dict() == get(name).fresh().state_dict()
    assert repr(get(name)) == repr(get(name).fresh())
    assert type(get(name)) in (Plain, SplitGramian, HistoryGramian)


def test_options_and_what_they_are_called():
    assert repr(get("split", parts=3, ema_decay=0.5)) == "SplitGramian(parts=3, ema_decay=0.5, min_signal=0.01)"
    assert repr(get("history")) == "HistoryGramian(history_decay=0.9, ema_decay=0.9, min_signal=0.01)"
    with pytest.raises(ValueError, match=r"no Gramian estimator is called 'splitt'; did you mean 'split'\?"):
        get("splitt")
    with pytest.raises(TypeError, match="'plain' has no option 'parts'"):
        get("plain", parts=2)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *(("split", "parts", value) for value in (0, 1, 2.0, True, "2", None)),
        *((name, "ema_decay", v) for name in ("split", "history") for v in (-0.1, 1.0, float("nan"), "0.9", None)),
        *((name, "min_signal", v) for name in ("split", "history") for v in (0.0, -1, 1.1, float("inf"), True)),
        *(("history", "history_decay", value) for value in (-0.1, 1, float("nan"))),
    ],
)
def test_wrong_options_are_named(name, option, value):
    with pytest.raises(ValueError, match=rf"{option} must be .*{value!r}"):
        get(name, **{option: value})


def test_plain_changes_nothing():
    measured = gramian(np.random.default_rng(0).standard_normal((4, 7)))
    found = Plain().estimate(measured, np.ones((1, 4)))
    assert (found.gramian == measured).all()
    assert found.signal is found.signal_to_noise is found.newest is None


@every
def test_what_does_not_fit_is_explained(name):
    estimator = get(name)
    rows = (estimator.parts + estimator.uses_history) * 3
    with pytest.raises(ValueError, match=rf"gramian must have shape \({rows}, {rows}\)"):
        estimator.estimate(np.eye(rows + 1), np.ones((estimator.parts, 3)))
    with pytest.raises(ValueError, match=r"counts must have shape"):
        estimator.estimate(np.eye(rows), np.ones(3))
    spoilt = np.eye(rows)
    spoilt[1, 1] = np.nan
    with pytest.raises(ValueError, match="non-finite"):
        estimator.estimate(spoilt, np.ones((estimator.parts, 3)))
    assert estimator.state_dict() == estimator.fresh().state_dict()


@averaging
@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 8), number=st.integers(1, 6), seed=st.integers(0, 1000))
def test_both_results_are_valid_gramians(name, count, number, seed):
    for found in steps(get(name), count, number, seed):
        for matrix in matrices(found):
            assert (abs(matrix - matrix.T) <= 1e-15 * abs(matrix).max()).all()
            assert np.linalg.eigvalsh(matrix)[0] >= -1e-12 * count * matrix.diagonal().max()
        diagonal, noisy = found.signal.diagonal(), found.gramian.diagonal()
        assert (diagonal >= 0.01 * noisy * (1 - 1e-12)).all()
        assert (diagonal <= noisy).all()


@averaging
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_order_of_the_objectives_means_nothing(name, seed):
    order = np.random.default_rng(seed).permutation(5)
    for plain, moved in zip(steps(get(name), 5, 4, seed), steps(get(name), 5, 4, seed, order), strict=True):
        for a, b in zip(matrices(plain), matrices(moved), strict=True):
            np.testing.assert_allclose(a[np.ix_(order, order)], b, atol=1e-10 * abs(a).max())
        np.testing.assert_allclose(plain.signal_to_noise[order], moved.signal_to_noise, rtol=1e-10)


@averaging
@pytest.mark.parametrize("scales", [[1e-7] * 3, [1e7] * 3, [1e-7, 1.0, 1e7]])
def test_rescaling_the_losses_rescales_the_estimate(name, scales):
    factors = np.outer(scales, scales)
    for plain, scaled in zip(steps(get(name), 3, 5, 0), steps(get(name), 3, 5, 0, scales=scales), strict=True):
        for a, b in zip(matrices(plain), matrices(scaled), strict=True):
            np.testing.assert_allclose(a * factors, b, rtol=1e-9, atol=0)
        np.testing.assert_allclose(plain.signal_to_noise, scaled.signal_to_noise, rtol=1e-9)


@averaging
def test_every_number_of_objectives(name):
    for count in (1, 2, 16, 32):
        assert np.isfinite(steps(get(name), count, 3, 0)[-1].signal).all()


@averaging
def test_the_state_resumes_bit_for_bit_and_is_plain(name):
    estimator = get(name)
    steps(estimator, 3, 4, 0)
    saved = estimator.state_dict()
    resumed, before = get(name), copy.deepcopy(saved)
    resumed.load_state_dict(json.loads(json.dumps(saved)))
    for a, b in zip(steps(estimator, 3, 4, 1), steps(resumed, 3, 4, 1), strict=True):
        assert (a.gramian == b.gramian).all()
        assert (a.signal == b.signal).all()
    assert estimator.state_dict() == resumed.state_dict() != before
    assert saved == before  # replaced, not changed


@averaging
def test_a_state_that_is_another_ones_or_of_another_size_is_refused(name):
    with pytest.raises(ValueError, match="state_dict is not one of"):
        get(name).load_state_dict({})
    estimator = get(name)
    steps(estimator, 3, 2, 0)
    with pytest.raises(ValueError, match="values, but there are"):
        steps(estimator, 2, 2, 0)


def test_the_shared_part_cannot_be_used_alone():
    with pytest.raises(TypeError, match="abstract"):
        Averaged(0.9, 0.05)
