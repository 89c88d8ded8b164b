import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from integrations.diffusion_nft.advantages import group_advantages, weighted_sum

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
            out[k, i] = (value - np.mean(group)) / (np.std(valid) + 1e-4)
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
