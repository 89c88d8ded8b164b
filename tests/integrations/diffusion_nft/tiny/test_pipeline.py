"""The tiny pipeline: real Stable Diffusion 3 parts, tokenizers of whole words, and a checkpoint that loads offline."""

import json

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from integrations.diffusion_nft.prompts import load_prompts
from integrations.diffusion_nft.tiny import CHECKPOINT, MAX_SEQUENCE_LENGTH, load_pipeline
from integrations.diffusion_nft.tiny.pictures import LETTERS, SIZE, shape_scenes, text_scenes
from integrations.diffusion_nft.tiny.pipeline import build

CAPTIONS = [scene.prompt.text for scene in (*shape_scenes(), *text_scenes())]


@pytest.fixture(scope="module")
def fresh():
    return build(0)


def sample(pipeline, captions, steps=2):
    return pipeline(
        captions,
        num_inference_steps=steps,
        guidance_scale=1.0,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images


def test_every_word_and_letter_is_one_token(fresh):
    for caption in CAPTIONS:
        words = caption.split()
        letters = words.pop().strip('"') if '"' in caption else ""
        expected = len(words) + (len(letters) + 2 if letters else 0)  # two quotes
        for tokenizer, special in ((fresh.tokenizer, 2), (fresh.tokenizer_3, 1)):
            tokens = tokenizer(caption).input_ids
            assert len(tokens) == expected + special <= MAX_SEQUENCE_LENGTH, caption
            assert "<unk>" not in tokenizer.convert_ids_to_tokens(tokens), caption


def test_letters_and_their_order_are_distinct_tokens(fresh):
    for tokenizer in (fresh.tokenizer, fresh.tokenizer_3):
        ids = {tuple(tokenizer(f'red text "{a}{b}"').input_ids) for a in LETTERS for b in LETTERS}
        assert len(ids) == len(LETTERS) ** 2


def test_every_caption_has_its_own_embedding(fresh):
    tokens, _, pooled, _ = fresh.encode_prompt(
        CAPTIONS, None, None, do_classifier_free_guidance=False, max_sequence_length=MAX_SEQUENCE_LENGTH
    )
    assert tokens.shape == (len(CAPTIONS), 2 * MAX_SEQUENCE_LENGTH, fresh.transformer.config.joint_attention_dim)
    assert pooled.shape == (len(CAPTIONS), fresh.transformer.config.pooled_projection_dim)
    distances = torch.cdist(tokens.flatten(1), tokens.flatten(1)).fill_diagonal_(torch.inf)
    assert distances.min() > 0.1 * distances[distances.isfinite()].median()


def test_same_seed_same_weights(fresh):
    again, other = build(0), build(1)
    for part in ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3"):
        weights = getattr(fresh, part).state_dict()
        assert all(torch.equal(weights[name], value) for name, value in getattr(again, part).state_dict().items())
    assert not torch.equal(fresh.transformer.proj_out.weight, other.transformer.proj_out.weight)


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    build(0)
    assert torch.equal(torch.rand(1), expected)


def test_round_trip_gives_the_same_pictures(fresh, tmp_path):
    fresh.save_pretrained(tmp_path)
    loaded = load_pipeline(tmp_path)
    assert type(loaded.vae) is type(fresh.vae)
    np.testing.assert_array_equal(sample(loaded, CAPTIONS[:2]), sample(fresh, CAPTIONS[:2]))


def test_no_pipeline_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"pretrain\.py"):
        load_pipeline(tmp_path)


def test_the_shipped_checkpoint_loads_and_is_small():
    pipeline = load_pipeline()
    assert isinstance(pipeline, StableDiffusion3Pipeline)
    for part in (pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3):
        assert part.dtype == torch.float32
        assert not part.training
    assert sum(file.stat().st_size for file in CHECKPOINT.rglob("*.safetensors")) <= 8e6
    assert sample(pipeline, CAPTIONS[:1]).shape == (1, SIZE, SIZE, 3)


def test_the_shipped_prompts_are_those_of_the_task():
    sets = [load_prompts(CHECKPOINT / f"prompts_{name}.jsonl") for name in ("train", "held_out")]
    texts = [{prompt.text for prompt in prompts} for prompts in sets]
    assert not texts[0] & texts[1]
    assert texts[0] | texts[1] == set(CAPTIONS)
    metadata = {scene.prompt.text: scene.prompt.metadata for scene in (*shape_scenes(), *text_scenes())}
    assert all(prompt.metadata == metadata[prompt.text] for prompts in sets for prompt in prompts)


def test_the_shipped_config_names_importable_parts():
    index = json.loads((CHECKPOINT / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusion3Pipeline"
    assert index["vae"] == ["integrations.diffusion_nft.tiny.vae", "SpaceToDepthVAE"]
