"""Prominence and framing on boxes of known size and place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.rewards.composition import FramingReward, ProminenceReward

PROMPT = Prompt("anything")


def picture(*boxes, size=40):
    image = np.full((size, size, 3), 255, np.uint8)
    for left, top, right, bottom in boxes:
        image[top:bottom, left:right] = (220, 30, 30)
    return image


def score(reward, image):
    (value,) = reward(image[None], [PROMPT])
    return value


@pytest.mark.parametrize(
    ("box", "prominence", "framing"),
    [
        ((10, 10, 30, 30), 0.25 / 0.4, 1),
        ((16, 16, 24, 24), 0.04 / 0.4, 1),
        ((5, 5, 35, 35), 1, 1),
        ((0, 10, 20, 30), 0.25 / 0.4, 0),
        ((2, 10, 22, 30), 0.25 / 0.4, 0.4),
        ((10, 20, 30, 39), 0.2375 / 0.4, 0.2),
        ((2, 2, 38, 38), 0.19 / 0.3, 0.4),
        ((0, 0, 40, 40), 0, 0),
    ],
)
def test_one_box(box, prominence, framing):
    assert score(ProminenceReward(), picture(box)) == pytest.approx(prominence)
    assert score(FramingReward(), picture(box)) == pytest.approx(framing)


def test_boxes_add_up_and_framing_is_averaged():
    image = picture((10, 10, 20, 20), (25, 3, 35, 13), (0, 25, 10, 35))
    assert score(ProminenceReward(), image) == pytest.approx(0.1875 / 0.4)
    assert score(FramingReward(), image) == pytest.approx((1 + 0.6 + 0) / 3)


@pytest.mark.parametrize("reward", [ProminenceReward(), FramingReward()])
def test_an_empty_picture_scores_nothing(reward):
    assert score(reward, picture()) == 0
    assert score(reward, np.zeros((40, 40, 3), np.uint8)) == 0


def test_noise_is_neither_prominent_nor_well_framed():
    noise = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    assert FramingReward()(noise, [PROMPT] * 8).mean() < 0.1
    assert ProminenceReward()(noise, [PROMPT] * 8).mean() < 0.5


@given(st.integers(0, 30), st.integers(0, 30), st.integers(5, 40), st.integers(5, 40))
def test_bounded(left, top, width, height):
    image = picture((left, top, min(left + width, 40), min(top + height, 40)))
    for reward in (ProminenceReward(), FramingReward()):
        assert 0 <= score(reward, image) <= 1
