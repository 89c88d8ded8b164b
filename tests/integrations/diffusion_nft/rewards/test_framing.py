"""Framing on boxes of known size and place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.rewards.framing import FramingReward

PROMPT = Prompt("anything")


def picture(*boxes, size=60):
    image = np.full((size, size, 3), 255, np.uint8)
    for left, top, right, bottom in boxes:
        image[top:bottom, left:right] = (220, 30, 30)
    return image


def score(reward, image):
    (value,) = reward(image[None], [PROMPT])
    return value


@pytest.mark.parametrize(
    ("box", "clear", "middle"),
    [
        ((12, 12, 36, 36), 1, 1 - 6 * 2**0.5 / 15),
        ((24, 24, 36, 36), 1, 1),
        ((10, 10, 50, 50), 1, 1),
        ((0, 20, 20, 40), 0, 0),
        ((5, 20, 25, 40), 0.5, 0),
        ((20, 29, 40, 57), 0.3, 1 - 13 / 15),
        ((3, 3, 57, 57), 0.3, 1),
        ((0, 0, 60, 60), 0, 1),
    ],
)
def test_one_box(box, clear, middle):
    assert score(FramingReward(), picture(box)) == pytest.approx(0.75 * clear + 0.25 * middle)


def test_clearance_is_averaged_over_boxes():
    image = picture((12, 12, 24, 24), (48, 5, 60, 17))
    offset = np.hypot(36 - 30, (18 + 11) / 2 - 30) / 15
    assert score(FramingReward(), image) == pytest.approx(0.75 * (1 + 0) / 2 + 0.25 * max(0, 1 - offset))


def test_an_empty_picture_scores_nothing():
    assert score(FramingReward(), picture()) == 0
    assert score(FramingReward(), np.zeros((60, 60, 3), np.uint8)) == 0


def test_noise_is_not_well_framed():
    noise = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    assert FramingReward()(noise, [PROMPT] * 8).mean() < 0.4


@given(st.integers(0, 50), st.integers(0, 50), st.integers(6, 60), st.integers(6, 60))
def test_bounded(left, top, width, height):
    image = picture((left, top, min(left + width, 60), min(top + height, 60)))
    assert 0 <= score(FramingReward(), image) <= 1
