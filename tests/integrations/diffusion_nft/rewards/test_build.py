"""Rewards by name."""

import pytest

from integrations.diffusion_nft.rewards import build_rewards


def test_order_and_names_are_kept():
    rewards = build_rewards(["framing", "count", "tidiness"])
    assert list(rewards) == ["framing", "count", "tidiness"]
    assert all(reward.name == name for name, reward in rewards.items())


@pytest.mark.parametrize(("name", "near"), [("color", "colour"), ("counts", "count"), ("zzz", "ocr")])
def test_unknown_name_suggests_known_ones(name, near):
    with pytest.raises(ValueError, match=f"unknown reward '{name}'.*{near}"):
        build_rewards(["count", name])


def test_repeated_name():
    with pytest.raises(ValueError, match="distinct"):
        build_rewards(["count", "count"])
