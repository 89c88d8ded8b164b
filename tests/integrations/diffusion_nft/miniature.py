"""A miniature Stable Diffusion 3 pipeline with random weights, stub rewards, and a config that uses them."""

import json
from pathlib import Path

import numpy as np
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

from integrations.diffusion_nft.tiny.pipeline import build

SIDE = 8  # latent side; pictures are 16 px


def make_pipeline(seed: int = 0):
    pipeline = build(seed)
    whole = pipeline.transformer.config
    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=SIDE,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=whole.joint_attention_dim,
        caption_projection_dim=16,
        pooled_projection_dim=whole.pooled_projection_dim,
        pos_embed_max_size=SIDE,
        qk_norm="rms_norm",
    )
    for parameter in transformer.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    parts = {**pipeline.components, "transformer": transformer.eval().requires_grad_(False)}
    pipeline = StableDiffusion3Pipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class Redness:
    """General: mean red minus mean blue."""

    name = "redness"

    def __call__(self, images, prompts):
        channels = images.astype(np.float64).mean(axis=(1, 2)) / 255
        return channels[:, 0] - channels[:, 2]


class Darkness:
    """Specialist: only prompts that quote a text."""

    name = "darkness"

    def __call__(self, images, prompts):
        values = 1 - images.astype(np.float64).mean(axis=(1, 2, 3)) / 255
        return np.where([prompt.quoted is not None for prompt in prompts], values, np.nan)


STUBS = {"redness": Redness, "darkness": Darkness}


def stub_rewards(names):
    unknown = [name for name in names if name not in STUBS]
    if unknown:
        raise ValueError(f"unknown reward {unknown[0]!r}; did you mean redness?")
    return {name: STUBS[name]() for name in names}


def settings(folder: Path, **changes) -> dict:
    prompts = folder / "prompts.jsonl"
    texts = ["red circle", "two blue squares", 'text "A"', 'text "B"']
    lines = [{"prompt": text, "tag": "ocr" if '"' in text else "plain"} for text in texts]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return {
        "seed": 3,
        "pipeline": "replaced by the test",
        "device": "cpu",
        "max_sequence_length": 8,
        "prompts": {"train": [str(prompts)], "held_out": [str(prompts)]},
        "rewards": ["redness", "darkness"],
        "method": "marble",
        "steps": 2,
        "save_every": 1,
        "lora": {"rank": 2, "alpha": 4},
        "rollout": {"prompts": 4, "images_per_prompt": 3, "steps": 3, "batch": 5},
        "loss": {"micro_batch": 5, "train_timesteps": 1, "kl": 0.01},
        "optimizer": {"lr": 0.01},
        "evaluation": {"steps": 2, "grid": 4, "pictures": 4},
        **changes,
    }
