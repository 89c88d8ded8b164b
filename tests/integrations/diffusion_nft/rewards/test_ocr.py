"""The OCR reward: its rule on cases worked by hand, and its engine on pictures."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.rewards.ocr import OcrReward, similarity
from integrations.diffusion_nft.tiny import pictures


@pytest.fixture(scope="module")
def reward():
    return OcrReward()


@pytest.mark.parametrize(
    ("asked", "read", "score"),
    [
        ("KA", "ka", 1),
        ("KA", "xx KA 7", 1),
        ("New York", "NEWYORK", 1),
        ("KA", "K", 1 / 2),
        ("KA", "AK", 0),
        ("KA", "KXA", 1 / 2),
        ("KA", "", 0),
        ("KA", "completely different", 0),
        ("kitten", "sitting", 1 / 2),
        ("flaw", "lawn", 1 / 2),
    ],
)
def test_rule(asked, read, score):
    assert similarity(asked, read) == pytest.approx(score)


def levenshtein(a, b):
    """The recursive definition."""

    @functools.cache
    def distance(i, j):
        if not i or not j:
            return i + j
        swap = distance(i - 1, j - 1) + (a[i - 1] != b[j - 1])
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, swap)

    return distance(len(a), len(b))


@given(st.text("abc", min_size=1, max_size=6), st.text("abc", max_size=6))
def test_rule_against_the_definition(asked, read):
    distance = 0 if asked in read else min(levenshtein(asked, read), len(asked))
    assert similarity(asked, read) == pytest.approx(1 - distance / len(asked))


def test_applies_to_prompts_with_quoted_text_only(reward):
    rng = np.random.default_rng(0)
    scenes = [pictures.Scene("red", "text", 1, "KA"), pictures.Scene("blue", "square", 2)]
    images = np.stack([pictures.draw(scene, rng) for scene in scenes])[[0, 1, 0, 0, 1]]
    prompts = [Prompt('"KA"'), Prompt("two blue squares"), Prompt('""'), Prompt('" k a "'), Prompt('"KA"')]
    np.testing.assert_array_equal(reward(images, prompts), [1, np.nan, np.nan, 1, 0])


def test_no_prompt_applies(reward):
    assert np.isnan(reward(np.zeros((2, 32, 32, 3), np.uint8), [Prompt("a"), Prompt("b")])).all()


def test_empty_and_noise_pictures_spell_nothing(reward):
    noise = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    images = np.concatenate([np.full((1, 32, 32, 3), 255, np.uint8), np.zeros((1, 32, 32, 3), np.uint8), noise])
    np.testing.assert_array_equal(reward(images, [Prompt('"KA"')] * 6), 0)


def test_large_pictures_are_searched_for_text(reward):
    picture = Image.new("RGB", (256, 192), "white")
    font = ImageFont.truetype(str(pictures._FONT), 40)
    ImageDraw.Draw(picture).text((60, 120), "Open", fill="black", font=font)
    ImageDraw.Draw(picture).text((100, 30), "Cafe", fill="navy", font=font)
    images = np.asarray(picture)[None]
    assert reward(images, [Prompt('a sign, "open"')]) == [1]
    assert reward(images, [Prompt('a sign, "cafe"')]) == [1]
    assert reward(np.full_like(images, 255), [Prompt('a sign, "open"')]) == [0]
