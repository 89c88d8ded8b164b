"""Improvement tracking, and what is wrong with one over the improvement."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance.balancers import ImprovementTracking


def _run(balancer, history):
    """λ of every call."""
    history = torch.tensor(history, dtype=torch.float64)
    return torch.stack([balancer.coefficients(torch.eye(len(losses)), losses) for losses in history])


def _naive(history, decay):
    """1 / (L − m), m the moving average before the call."""
    averages, found = history[0], []
    for losses in history[1:]:
        found.append(1 / (losses - averages))
        averages = decay * averages + (1 - decay) * losses
    return np.array(found)


def test_by_hand():
    """With decay ½ the newest of two values counts 2/3.

    Averages 4, 4, then changes 2, 0, deviations 2, 0: ρ = (1, 0). Averages 8/3, 4, then changes −1/3, 2, deviations
    2/3 (1/3) + 1/3 (2) = 8/9 and 4/3: ρ = (−3/8, 3/2).
    """
    balancer = ImprovementTracking(decay=0.5)
    found = _run(balancer, [[4.0, 4.0], [2.0, 4.0], [3.0, 2.0]])
    e = math.e
    assert found[0].tolist() == [0.5, 0.5]
    assert found[1].tolist() == pytest.approx([1 / (1 + e), e / (1 + e)])
    assert found[2, 0].item() == pytest.approx(1 / (1 + math.exp(-3 / 8 - 3 / 2)))
    assert balancer.deviations == pytest.approx([8 / 9, 4 / 3])


def test_the_coefficient_rises_when_improvement_stalls():
    steps = np.arange(100)
    stalling, steady = np.maximum(1 - steps / 50, 0), 1 - steps / 100
    share = _run(ImprovementTracking(), np.stack([stalling, steady], 1).tolist())[:, 0]
    assert share[45] == pytest.approx(0.5, abs=0.01)  # both improve as is usual for them
    assert share[-1] > 0.55
    assert (share[51:].diff() > 0).all()


def test_the_naive_rule_changes_sign_and_explodes_where_ours_does_not():
    steps = np.arange(60)
    history = np.stack([1 + 0.1 * np.sin(steps / 5), 2 - steps / 60], 1)  # one loss swings, one falls
    naive = _naive(history, decay=0.97)
    assert naive.min() < 0 < naive.max()
    assert abs(naive).max() > 100 * np.median(abs(naive))
    ours = _run(ImprovementTracking(), history.tolist())
    assert ours.min() > 0.03
    assert ours.max() < 0.97


def test_a_constant_loss_is_no_division_by_zero():
    history = np.full((5, 2), 0.1)
    with np.errstate(divide="ignore"):
        assert np.isinf(_naive(history, decay=0.5)).all()
    assert _run(ImprovementTracking(), history.tolist()).tolist() == [[0.5, 0.5]] * 5


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), factor=st.integers(-20, 20), decay=st.sampled_from([0.0, 0.5, 0.95, 0.99]))
def test_positive_bounded_and_free_of_scale_and_sign(seed, factor, decay):
    history = np.random.default_rng(seed).standard_normal((30, 4))
    one, other = ImprovementTracking(decay), ImprovementTracking(decay)
    found = _run(one, history.tolist())
    assert found.min() > 0
    assert found.sum(1).tolist() == pytest.approx([1.0] * 30)
    bound = 2 / (1 - decay)
    assert (found.max(1).values / found.min(1).values).log().max() <= bound * (1 + 1e-9)
    torch.testing.assert_close(_run(other, (history * 2.0**factor).tolist()), found)


def test_an_offset_of_a_loss_changes_nothing():
    history = np.random.default_rng(0).standard_normal((30, 2))
    shifted = _run(ImprovementTracking(), (history + np.array([100.0, -5.0])).tolist())
    torch.testing.assert_close(shifted, _run(ImprovementTracking(), history.tolist()), rtol=1e-9, atol=1e-9)


def test_rounding_is_no_improvement():
    history = [[1.0, 1.0]] + [[1.0 + 1e-15 * (-1) ** i, 1.0] for i in range(10)]
    assert _run(ImprovementTracking(), history).tolist() == [[0.5, 0.5]] * 11


def test_temperature():
    history = [[4.0, 4.0], [2.0, 4.0]]
    cold, warm = (_run(ImprovementTracking(temperature=t), history)[1, 1].item() for t in (0.1, 100.0))
    assert cold == pytest.approx(1 / (1 + math.exp(-10)))
    assert warm == pytest.approx(0.5, abs=0.01)


def test_bad_options():
    with pytest.raises(ValueError, match=r"decay must be a number in \[0, 1\), got 1"):
        ImprovementTracking(decay=1)
    with pytest.raises(ValueError, match=r"temperature must be a number in \(0, ∞\), got 0"):
        ImprovementTracking(temperature=0)
