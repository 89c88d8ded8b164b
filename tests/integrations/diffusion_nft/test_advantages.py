import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from integrations.diffusion_nft.advantages import group_advantages, summed_advantages, weighted_sum

NAN = float("nan")


def slow(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The definition, one number at a time."""
    out = np.full(rewards.shape, NAN)
    for k, row in enumerate(rewards):
        valid = row[~np.isnan(row)]
        for i, value in enumerate(row):
            if np.isnan(value):
                continue
            group = [row[j] for j in range(len(row)) if groups[j] == groups[i] and not np.isnan(row[j])]
            spread = np.std(valid) + 1e-4 * np.abs(valid).max()
            out[k, i] = (value - np.mean(group)) / spread if spread else 0.0
    return out


@st.composite
def tables(draw):
    count = draw(st.integers(1, 12))
    value = st.one_of(st.just(NAN), st.floats(-10, 10, allow_nan=False))
    rewards = draw(st.lists(st.lists(value, min_size=count, max_size=count), min_size=1, max_size=3))
    groups = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    return np.array(rewards), np.array(groups)


@settings(deadline=None)
@given(tables())
def test_matches_the_definition_for_ragged_groups_and_missing_rewards(table):
    rewards, groups = table
    result = group_advantages(torch.tensor(rewards), torch.tensor(groups)).numpy()
    np.testing.assert_allclose(result, slow(rewards, groups), rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(tables())
def test_missing_rewards_stay_missing_and_all_else_is_finite(table):
    rewards, groups = table
    result = group_advantages(torch.tensor(rewards), torch.tensor(groups))
    assert (result.isnan() == torch.tensor(rewards).isnan()).all()
    assert not result.isinf().any()


def test_single_valid_picture_and_constant_reward_give_zero():
    rewards = torch.tensor([[1.0, NAN, NAN, 3.0], [0.1, 0.1, 0.1, 0.1]])
    result = group_advantages(rewards, torch.tensor([0, 1, 1, 1]))
    assert result[0, 0] == 0
    assert result[0, 3] == 0
    assert (result[1] == 0).all()


@pytest.mark.parametrize("factor", [1e-9, 1e-2, 1e2, 1e9])
def test_other_units_change_nothing(factor):
    rewards = torch.tensor([[0.1, 0.1003, NAN, 0.1001, 0.1002, 0.9]], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    result = group_advantages(rewards, groups)
    torch.testing.assert_close(group_advantages(factor * rewards, groups), result, equal_nan=True, rtol=1e-12, atol=0)


def test_the_floor_is_the_published_one_where_the_largest_reward_is_one():
    rewards = torch.tensor([[0.0, 1.0, 0.5, 0.25]], dtype=torch.float64)
    expected = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, torch.zeros(4, dtype=torch.long)), expected)


def test_gdpo_sums_what_applies_and_has_unit_spread():
    advantages = torch.tensor([[1.0, -1.0, NAN, 2.0], [2.0, NAN, NAN, -1.0]], dtype=torch.float64)
    result = summed_advantages(advantages)
    assert result[2].isnan()
    total = torch.tensor([3.0, -1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(result[[0, 1, 3]], total / total.std(correction=0))
    assert summed_advantages(torch.zeros(2, 3)).tolist() == [0.0, 0.0, 0.0]


def test_a_missing_reward_does_not_dilute_the_others():
    groups = torch.tensor([0, 0, 1, 1])
    alone = group_advantages(torch.tensor([[1.0, 3.0]]), groups[:2])
    among = group_advantages(torch.tensor([[1.0, 3.0, NAN, NAN]]), groups)
    assert torch.equal(alone, among[:, :2])


def test_weighted_sum_skips_what_does_not_apply():
    rewards = torch.tensor([[1.0, NAN, NAN], [10.0, 20.0, NAN]], dtype=torch.float64)
    result = weighted_sum(rewards, torch.tensor([2.0, 0.5]))
    assert result[:2].tolist() == [7.0, 10.0]
    assert result[2].isnan()
