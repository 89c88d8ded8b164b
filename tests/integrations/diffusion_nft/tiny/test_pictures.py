"""The pictures of the tiny task: every scene has one caption, and every reward reads a clean picture rightly."""

from collections import Counter

import numpy as np
import pytest

from integrations.diffusion_nft.rewards import build_rewards
from integrations.diffusion_nft.tiny import pictures
from integrations.diffusion_nft.tiny.pictures import Scene, draw, is_held_out, mistaken, random_scene

SCENES = [*pictures.shape_scenes(), *pictures.text_scenes()]


def test_captions_name_scenes_uniquely():
    assert len({scene.prompt.text for scene in SCENES}) == len(SCENES) == 36 + 256
    assert Scene("red", "circle", 2).prompt.text == "two red circles"
    assert Scene("blue", "text", 1, "KA").prompt.text == 'blue text "KA"'
    assert Scene("blue", "text", 1, "KA").prompt.quoted == "KA"


def test_held_out_scenes_use_every_word_equally_often():
    held_out = [scene for scene in SCENES if is_held_out(scene)]
    shapes = [scene for scene in held_out if not scene.text]
    texts = [scene for scene in held_out if scene.text]
    assert (len(shapes), len(texts)) == (9, 64)
    assert set(Counter(scene.shape for scene in shapes).values()) == {3}
    assert set(Counter(scene.count for scene in shapes).values()) == {3}
    assert {scene.colour for scene in shapes} == set(pictures.COLOURS)
    for place in (0, 1):
        assert Counter(scene.text[place] for scene in texts) == dict.fromkeys(pictures.LETTERS, 8)


@pytest.fixture(scope="module")
def clean():
    rng = np.random.default_rng(0)
    scenes = [*(scene for scene in pictures.shape_scenes() for _ in range(10)), *pictures.text_scenes()[::3]]
    return np.stack([draw(scene, rng) for scene in scenes]), [scene.prompt for scene in scenes]


@pytest.mark.parametrize(("name", "applies"), [("ocr", 86), ("count", 360), ("colour", 446)])
def test_rewards_read_clean_pictures(clean, name, applies):
    images, prompts = clean
    scores = build_rewards([name])[name](images, prompts)
    assert np.isfinite(scores).sum() == applies
    assert np.nanmean(scores) >= 0.99


def test_clean_pictures_are_tidy_and_leave_room_for_framing(clean):
    images, prompts = clean
    assert build_rewards(["tidiness"])["tidiness"](images, prompts).min() > 0.95
    framing = build_rewards(["framing"])["framing"](images, prompts)
    assert 0.3 < framing.mean() < 0.7
    assert framing.std() > 0.15


def test_drawing_is_reproducible_and_varied():
    scene = Scene("green", "triangle", 3)
    first, again, other = (draw(scene, np.random.default_rng(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert first.shape == (pictures.SIZE, pictures.SIZE, 3)
    assert first.dtype == np.uint8


def test_share_of_wrong_captions():
    rng = np.random.default_rng(0)
    scenes = [random_scene(rng) for _ in range(4000)]
    assert all(mistaken(scene, rng, 0, 0) == scene for scene in scenes)
    said = [mistaken(scene, rng, 0.4, 0.15) for scene in scenes]
    assert set(said) <= set(SCENES)
    colours = np.mean([a.colour == b.colour for a, b in zip(scenes, said, strict=True)])
    assert colours == pytest.approx(0.6 * (0.85 + 0.15 / 4) + 0.4 / 4, abs=0.03)
    kinds = np.mean([bool(a.text) == bool(b.text) for a, b in zip(scenes, said, strict=True)])
    assert kinds == pytest.approx(0.8, abs=0.03)
