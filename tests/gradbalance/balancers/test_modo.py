"""MoDo's step; what it shares with others of its kind is in test_simplex_descent."""

import numpy as np
import pytest
import torch

from benchmarks.agreement.projecting import PAIRS
from gradbalance.balancers import MoDo


def test_one_step_by_hand():
    """From (½, ½) with M = diag(1, 3) / 4: (½ − ⅛, ½ − ⅜) is moved by ¼ back onto the simplex."""
    balancer = MoDo(gamma=1.0)
    np.testing.assert_allclose(balancer.coefficients(torch.diag(torch.tensor([1.0, 3.0]))), [0.625, 0.375])
    assert balancer.shares == pytest.approx([0.625, 0.375])


def test_the_published_step_by_hand():
    """(½ − 0.1 · ½, ½ − 0.1 · 3/2), and 0.1 back."""
    found = MoDo(gamma=0.1, normalize=False).coefficients(torch.diag(torch.tensor([1.0, 3.0])))
    np.testing.assert_allclose(found, [0.55, 0.45])


def test_rho_pulls_towards_equal_coefficients():
    """The goal minimises λᵀ(M / tr M + ρ I)λ: λ ∝ 1 / (¼ + ½) and 1 / (¾ + ½)."""
    balancer = MoDo(gamma=0.5, rho=0.5)
    for _ in range(200):
        found = balancer.coefficients(torch.diag(torch.tensor([1.0, 3.0])))
    np.testing.assert_allclose(found, [0.625, 0.375])


def test_same_as_torchjd():
    assert PAIRS["modo", "torchjd"]() <= 1e-12


def test_noise_averages_out():
    """Two gradients of equal length but for the noise of the second, seen through independent samples."""
    rng = np.random.default_rng(0)
    truth = np.eye(2, 50)
    with_signal, without = MoDo(gamma=0.05), MoDo(gamma=0.05)
    ends = []
    for step in range(2000):
        first, second = (truth + np.array([[0.0], [0.3]]) * rng.standard_normal((2, 50)) for _ in range(2))
        cross = (first @ second.T + second @ first.T) / 2
        m = torch.from_numpy(first @ first.T)
        pair = with_signal.coefficients(m, signal=torch.from_numpy(cross)), without.coefficients(m)
        if step >= 500:
            ends.append([found[0].item() for found in pair])
    unbiased, biased = np.mean(ends, axis=0)
    assert abs(unbiased - 0.5) < 0.05
    assert biased > 0.7


def test_bad_rho():
    with pytest.raises(ValueError, match=r"rho must be a number in \[0, ∞\), got -0\.1"):
        MoDo(rho=-0.1)
