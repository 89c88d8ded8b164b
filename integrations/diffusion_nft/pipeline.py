"""The pipeline a config names, on the device it names."""

from __future__ import annotations

from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import StableDiffusion3Pipeline

from integrations.diffusion_nft.config import Config, UserError

TINY = "tiny"


def find_device(name: str) -> torch.device:
    """`auto` is the accelerator if there is one.

    Raises:
        UserError: No such device here.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device={name!r} cannot be used: {' '.join(str(error).split())[:200]}") from None


def load_pipeline(config: Config) -> StableDiffusion3Pipeline:
    """The config's pipeline in evaluation mode, without progress bars.

    Raises:
        UserError: It is not there or is no Stable Diffusion 3 pipeline.
    """
    device = find_device(config.device)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    if config.pipeline == TINY:
        from integrations.diffusion_nft import tiny

        pipeline = tiny.load_pipeline()
    else:
        if config.pipeline.startswith(("/", ".", "~")) and not Path(config.pipeline).expanduser().is_dir():
            raise UserError(f"pipeline={config.pipeline!r}: no such folder")
        try:
            pipeline = StableDiffusion3Pipeline.from_pretrained(config.pipeline)
        except (OSError, ValueError) as error:
            raise UserError(
                f"pipeline={config.pipeline!r} cannot be loaded: {' '.join(str(error).split())[:300]}"
            ) from None
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)
