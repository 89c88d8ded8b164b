"""Count and colour after GenEval's rules, on pictures whose content is known."""

import cv2
import numpy as np
import pytest

from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.rewards.objects import ColourReward, CountReward, detect
from integrations.diffusion_nft.tiny.pictures import COLOURS, Scene, draw

WHITE = np.full((32, 32, 3), 255, np.uint8)


def squares(*colours, side=8):
    """Squares side by side."""
    image = WHITE.copy()
    for i, colour in enumerate(colours):
        image[4 : 4 + side, 1 + 10 * i : 1 + 10 * i + side] = COLOURS[colour]
    return image


def ask(*entries):
    return Prompt("p", {"tag": "counting", "include": [dict(entry) for entry in entries]})


def score(reward, image, prompt):
    (value,) = reward(image[None], [prompt])
    return value


def test_detections_are_what_was_drawn():
    first, second = sorted(detect(squares("red", "blue")), key=lambda item: item.box)
    assert (first.kind, first.colour, first.area, first.box) == ("square", "red", 64, (1, 4, 9, 12))
    assert (second.kind, second.colour, second.box) == ("square", "blue", (11, 4, 19, 12))


@pytest.mark.parametrize(
    ("found", "asked", "expected"), [(1, 1, 1), (2, 1, 0), (1, 2, 0.5), (3, 2, 0.5), (2, 3, 2 / 3)]
)
def test_count_is_graded(found, asked, expected):
    value = score(CountReward(), squares(*["red"] * found), ask({"class": "square", "count": asked, "color": "red"}))
    assert value == pytest.approx(expected)


def test_count_looks_at_the_class_not_the_colour():
    image = squares("red", "blue")
    assert score(CountReward(), image, ask({"class": "square", "count": 2, "color": "green"})) == 1
    assert score(CountReward(), image, ask({"class": "circle", "count": 2, "color": "red"})) == 0


def test_colour_is_the_share_of_the_class():
    image = squares("red", "blue")
    assert score(ColourReward(), image, ask({"class": "square", "count": 2, "color": "red"})) == 0.5
    assert score(ColourReward(), image, ask({"class": "square", "count": 2, "color": "green"})) == 0
    assert score(ColourReward(), image, ask({"class": "circle", "count": 1, "color": "red"})) == 0


def test_several_entries_are_averaged():
    image = squares("red", "red", "blue")
    prompt = ask({"class": "square", "count": 3}, {"class": "circle", "count": 1})
    assert score(CountReward(), image, prompt) == 0.5


def test_where_the_rewards_do_not_apply():
    text = Scene("red", "text", 1, "KA")
    image = draw(text, np.random.default_rng(0))
    no_colour = ask({"class": "square", "count": 1})
    for reward, prompt in [
        (CountReward(), Prompt("a cat")),
        (ColourReward(), Prompt("a cat")),
        (CountReward(), text.prompt),
        (ColourReward(), no_colour),
    ]:
        assert np.isnan(score(reward, image, prompt))
    assert score(ColourReward(), image, text.prompt) == 1
    assert score(CountReward(), image, no_colour) == 0


def test_empty_and_noise_pictures_score_nothing():
    noise = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    prompt = Scene("red", "circle", 2).prompt
    for reward in (CountReward(), ColourReward()):
        assert score(reward, WHITE, prompt) == 0
        assert score(reward, WHITE // 3, prompt) == 0
        assert reward(noise, [prompt] * 8).mean() < 0.2


def test_specks_and_grey_are_not_objects():
    image = WHITE.copy()
    image[3:5, 3:6] = COLOURS["red"]
    image[10:20, 10:20] = 90
    assert detect(image) == []


@pytest.mark.parametrize("size", [32, 64, 256])
def test_detection_does_not_depend_on_the_resolution(size):
    image = draw(Scene("purple", "triangle", 2), np.random.default_rng(3))
    image = cv2.resize(image, (size, size), interpolation=cv2.INTER_CUBIC)
    assert [(item.kind, item.colour) for item in detect(image)] == [("triangle", "purple")] * 2
