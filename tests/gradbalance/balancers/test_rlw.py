"""Random loss weighting: the distributions, and where the chance comes from."""

import math

import pytest
import torch
from torchjd.aggregation import RandomWeighting

from gradbalance.balancers import RLW

DISTRIBUTIONS = ["normal", "dirichlet"]


def _draws(balancer, k, calls=4000):
    m = torch.eye(k, dtype=torch.float64)
    return torch.stack([balancer.coefficients(m) for _ in range(calls)])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_on_the_simplex_and_uniform_on_average(distribution):
    draws = _draws(RLW(distribution), 4)
    assert (draws > 0).all()
    torch.testing.assert_close(draws.sum(1), torch.ones(4000, dtype=torch.float64))
    torch.testing.assert_close(draws.mean(0), torch.full((4,), 0.25, dtype=torch.float64), rtol=0, atol=0.015)


def test_normal_has_the_spread_of_torchjd():
    torch.manual_seed(0)
    theirs = torch.stack([RandomWeighting()(torch.eye(4, dtype=torch.float64)) for _ in range(4000)])
    torch.testing.assert_close(_draws(RLW(), 4).var(0), theirs.var(0), rtol=0.15, atol=0)


def test_dirichlet_has_the_variance_of_the_uniform_distribution_on_the_simplex():
    expected = torch.full((4,), (1 / 4) * (3 / 4) / 5, dtype=torch.float64)  # p (1 − p) / (K + 1)
    torch.testing.assert_close(_draws(RLW("dirichlet"), 4).var(0), expected, rtol=0.1, atol=0)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_new_at_every_call_and_reproducible(distribution):
    first = _draws(RLW(distribution, seed=7), 3, calls=5)
    assert torch.equal(first, _draws(RLW(distribution, seed=7), 3, calls=5))
    assert len({tuple(row.tolist()) for row in first}) == 5
    assert not torch.equal(first, _draws(RLW(distribution, seed=8), 3, calls=5))


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    RLW().coefficients(torch.eye(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_present_objectives_share_everything():
    found = RLW().coefficients(torch.eye(3), torch.tensor([1.0, math.nan, 1.0]))
    assert found[1] == 0
    assert found.sum().item() == pytest.approx(1)


def test_bad_options():
    with pytest.raises(ValueError, match="distribution must be one of 'normal', 'dirichlet', got 'uniform'"):
        RLW("uniform")
    with pytest.raises(ValueError, match="seed must be an integer ≥ 0, got -1"):
        RLW(seed=-1)
