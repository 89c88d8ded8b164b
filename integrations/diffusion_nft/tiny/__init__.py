"""A Stable Diffusion 3 pipeline small enough for two CPU cores, its pictures, and the checkpoint that ships.

Its prompts lie next to the checkpoint's card: ``prompts_train.jsonl`` and, disjoint, ``prompts_held_out.jsonl``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline

CHECKPOINT = Path(__file__).parent / "checkpoint"
MAX_SEQUENCE_LENGTH = 8  # T5 tokens: what the checkpoint was trained with, to be passed to the pipeline


def load_pipeline(path: Path = CHECKPOINT) -> StableDiffusion3Pipeline:
    """Loads a tiny pipeline from disk: float32, eval mode, no network.

    Args:
        path: A folder written by ``pretrain.py`` (or by ``save_pretrained`` of such a pipeline).
    """
    from integrations.diffusion_nft.tiny.pipeline import load

    return load(path)
