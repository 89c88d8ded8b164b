"""Tidiness on drawings whose specks and smudges are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.rewards.tidiness import TidinessReward

PROMPT = Prompt("anything", {})
INK, PALE = (220, 30, 30), (255, 200, 200)


def picture(*marks, size=60):
    image = np.full((size, size, 3), 255, np.uint8)
    for left, top, right, bottom, colour in marks:
        image[top:bottom, left:right] = colour
    return image


def score(image):
    (value,) = TidinessReward()(image[None], [PROMPT])
    return value


def test_one_whole_mark_is_tidy():
    assert score(picture((20, 20, 40, 40, INK))) == 1


def test_a_soft_edge_costs_nothing():
    assert score(picture((19, 19, 41, 41, PALE), (20, 20, 40, 40, INK))) == 1


def test_specks_and_smudges_cost_their_share():
    assert score(picture((20, 20, 40, 40, INK), (50, 50, 60, 60, INK))) == pytest.approx(400 / 500)
    assert score(picture((20, 20, 40, 40, INK), (0, 0, 10, 10, PALE))) == pytest.approx(400 / 500)


def test_an_empty_picture_or_one_of_specks_scores_nothing():
    assert score(picture()) == 0
    assert score(np.zeros((60, 60, 3), np.uint8)) == 0
    assert score(picture(*((x, y, x + 4, y + 4, INK) for x in range(0, 60, 8) for y in range(0, 60, 8)))) == 0


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 60), st.integers(1, 60))
def test_bounded(left, top, width, height):
    box = left, top, min(left + width, 60), min(top + height, 60)
    assert 0 <= score(picture((*box, INK), (0, 0, 5, 5, PALE))) <= 1
