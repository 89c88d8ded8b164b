"""The tiny pipeline: every class of Stable Diffusion 3, with small sizes and tokenizers made from the task's words.

The text encoders stay as initialised: random but frozen, they give each caption its own embedding, and the transformer
learns to read it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.utils import logging
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from integrations.diffusion_nft.tiny import MAX_SEQUENCE_LENGTH
from integrations.diffusion_nft.tiny.pictures import COLOURS, LETTERS, NUMBERS, SHAPES, SIZE
from integrations.diffusion_nft.tiny.vae import SpaceToDepthVAE

_WORDS = (*NUMBERS, *COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES), "text")
_CLIP_WIDTHS = (32, 32)
_T5_WIDTH = 64  # at least the sum of the CLIP widths, or diffusers would crop their embeddings
_TRANSFORMER_HEADS, _HEAD_WIDTH, _LAYERS, _PATCH = 4, 32, 4, 3


def build(seed: int) -> StableDiffusion3Pipeline:
    """Builds an untrained tiny pipeline; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clips = [_clip_encoder(width) for width in _CLIP_WIDTHS]
        t5 = _t5_encoder()
        width = _TRANSFORMER_HEADS * _HEAD_WIDTH
        transformer = SD3Transformer2DModel(
            sample_size=SIZE // 2,
            patch_size=_PATCH,
            in_channels=12,
            out_channels=12,
            num_layers=_LAYERS,
            attention_head_dim=_HEAD_WIDTH,
            num_attention_heads=_TRANSFORMER_HEADS,
            joint_attention_dim=_T5_WIDTH,
            caption_projection_dim=width,
            pooled_projection_dim=sum(_CLIP_WIDTHS),
            pos_embed_max_size=SIZE // 2 // _PATCH,
            qk_norm="rms_norm",
        )
        _open_gates(transformer)
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.0),
        vae=SpaceToDepthVAE(),
        text_encoder=clips[0],
        tokenizer=_clip_tokenizer(),
        text_encoder_2=clips[1],
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=t5,
        tokenizer_3=_t5_tokenizer(),
    )
    return _ready(pipeline)


def load(path: str | Path) -> StableDiffusion3Pipeline:
    """Loads a tiny pipeline from disk; see ``integrations.diffusion_nft.tiny.load_pipeline``."""
    path = Path(path)
    if not (path / "model_index.json").is_file():
        raise FileNotFoundError(f"no pipeline in {path}: it has no model_index.json; make one with pretrain.py")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # or diffusers would remark that the VAE is no AutoencoderKL
    try:
        return _ready(StableDiffusion3Pipeline.from_pretrained(path, local_files_only=True, dtype=torch.float32))
    finally:
        logging.set_verbosity(verbosity)


def _ready(pipeline: StableDiffusion3Pipeline) -> StableDiffusion3Pipeline:
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)  # a fresh T5 would drop a tenth of its activations
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _open_gates(transformer: SD3Transformer2DModel) -> None:
    """Starts each block as a plain pre-norm block; gates near zero, as initialised, would learn slowly."""
    width = transformer.inner_dim
    with torch.no_grad():
        for name, layer in transformer.named_modules():
            if name.endswith(("norm1.linear", "norm1_context.linear", "norm_out.linear")):
                layer.weight.mul_(0.5)
                layer.bias.zero_()
                if layer.out_features == 6 * width:  # shift, scale, gate of attention, then of feed-forward
                    layer.bias[2 * width : 3 * width] = 1
                    layer.bias[5 * width :] = 1


def _clip_encoder(width: int) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(_clip_vocabulary()[0]),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_SEQUENCE_LENGTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    encoder = CLIPTextModelWithProjection(config)
    with torch.no_grad():  # unit variance: the default 0.02 would make all captions look alike before the last norm
        for name, parameter in encoder.named_parameters():
            if "embedding" in name:
                parameter.normal_()
            elif parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return encoder


def _t5_encoder() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(_t5_vocabulary()),
            d_model=_T5_WIDTH,
            d_kv=16,
            d_ff=2 * _T5_WIDTH,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
    )


def _clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-pair vocabulary in which each word is one token and each letter of a text is one."""
    letters = sorted(set("".join(_WORDS) + LETTERS.lower() + '"'))
    special = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    model = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.train_from_iterator(
        _WORDS,
        trainers.BpeTrainer(special_tokens=special, end_of_word_suffix="</w>", min_frequency=1, show_progress=False),
    )
    merges: list[list[str]] = json.loads(model.to_str())["model"]["merges"]
    tokens = [*special, *("".join(pair) for pair in merges)]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}, [(a, b) for a, b in merges]


def _clip_tokenizer() -> CLIPTokenizer:
    vocabulary, merges = _clip_vocabulary()
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_SEQUENCE_LENGTH)


def _t5_vocabulary() -> list[tuple[str, float]]:
    pieces = [*(f"▁{word}" for word in _WORDS), "▁", '"', '▁"', *LETTERS]
    return [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -(len(pieces) ** 0.5)) for piece in pieces)]


def _t5_tokenizer() -> T5Tokenizer:
    return T5Tokenizer(vocab=_t5_vocabulary(), extra_ids=0, model_max_length=MAX_SEQUENCE_LENGTH)
