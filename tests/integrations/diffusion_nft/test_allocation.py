import json
import math

import numpy as np
import pytest
import torch

from integrations.diffusion_nft.allocation import LEAST, MOST, Allocation

PROMPTS = 12
LIVES = np.array(
    [[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 1, 1]]
)  # a general reward, a specialist, one on half of the strata


def follow(allocation, signal_to_noise, steps=200, lives=LIVES):
    """Every step measures; a prompt's rewards apply as `lives` says."""
    for _ in range(steps):
        strata = np.repeat(np.arange(4), allocation.counts(PROMPTS))
        signal = None if signal_to_noise is None else torch.tensor(signal_to_noise, dtype=torch.float64)
        allocation = allocation.after(PROMPTS, torch.from_numpy(lives[:, strata] == 1), signal)
    return allocation


def start():
    return Allocation.start([0.25] * 4, 3)


def test_without_measurements_it_is_the_fixed_shares():
    allocation = start()
    for _ in range(5):
        assert allocation.counts(PROMPTS) == [3] * 4
        allocation = follow(allocation, None, 1)
    assert allocation.drawn == [15] * 4
    assert allocation.lives == LIVES.tolist()


def test_a_drowned_specialist_gets_more_prompts():
    shares = follow(start(), [0.8, 0.1, 0.8]).shares
    assert shares[0] == pytest.approx(0.25 + 3 * 0.125)  # the others are at their bound
    assert shares[1:] == pytest.approx([LEAST * 0.25] * 3)
    assert follow(start(), [0.8, 0.8, 0.1]).shares[2:] == pytest.approx([0.375] * 2)


def test_the_bounds_hold_at_every_step():
    allocation = Allocation.start([0.7, 0.1, 0.1, 0.1], 3)
    for signal in ([0.9, 0.01, 0.9], [0.1, math.nan, 0.9], [0.9, 0.9, 0.05]):
        for _ in range(40):
            allocation = follow(allocation, signal, 1)
            shares, fixed = np.array(allocation.shares), np.array(allocation.fixed)
            assert shares.sum() == pytest.approx(1)
            assert (shares >= LEAST * fixed * (1 - 1e-9)).all()
            assert (shares <= MOST * fixed * (1 + 1e-9)).all()


def test_the_shares_minimise_the_summed_noise_to_signal():
    """With a world in which ρ_k = c_k / n_k, as sampling noise goes, against a search over the shares."""
    costs = np.array([0.1, 0.4, 0.5])

    def total(shares):
        return (costs / (LIVES @ shares)).sum()

    allocation = start()
    for _ in range(400):
        rho = costs / (LIVES @ np.array(allocation.shares))
        allocation = follow(allocation, (1 / np.sqrt(1 + rho)).tolist(), 1)
    found = np.array(allocation.shares)
    assert total(found) < total(np.full(4, 0.25)) - 0.1
    rng = np.random.default_rng(0)
    others = rng.dirichlet(np.ones(4), 20_000)
    inside = (others >= LEAST * 0.25).all(1) & (others <= MOST * 0.25).all(1)
    assert min(total(shares) for shares in others[inside]) > total(found) - 1e-3


def test_equal_needs_leave_the_shares():
    lives = np.ones((3, 4), dtype=int)
    assert follow(start(), [0.5, 0.2, 0.7], lives=lives).shares == pytest.approx([0.25] * 4)


def test_it_moves_slowly():
    moved = np.array(follow(start(), [0.8, 0.1, 0.8], 2).shares)
    assert np.abs(moved - 0.25).max() <= 0.1 * 2 * (MOST - 1) * 0.25
    assert moved[0] > 0.25


def test_who_is_never_seen_to_have_a_signal_counts_as_drowned_and_who_is_satisfied_as_served():
    assert follow(start(), [0.8, math.nan, 0.8]).shares[0] > 0.5
    assert follow(start(), [0.8, math.inf, 0.1]).shares[0] == pytest.approx(LEAST * 0.25)
    assert follow(start(), [math.inf] * 3).shares == pytest.approx([0.25] * 4)


def test_fractions_of_prompts_are_paid_in_time():
    allocation = Allocation.start([0.5, 0.3, 0.15, 0.05], 3)
    for step in range(1, 41):
        counts = allocation.counts(7)
        assert sum(counts) == 7
        allocation = allocation.after(7, torch.ones(3, 7, dtype=torch.bool), None)
        assert np.abs(np.array(allocation.drawn) - 7 * step * np.array(allocation.shares)).max() < 1
    assert allocation.drawn == [140, 84, 42, 14]


def test_the_state_goes_through_json_exactly():
    allocation = follow(start(), [0.7, 0.3, 0.5], 17)
    again = Allocation.loaded(json.loads(json.dumps(allocation.state_dict())))
    assert again == allocation
    assert follow(again, [0.1, 0.3, 0.5], 9) == follow(allocation, [0.1, 0.3, 0.5], 9)
