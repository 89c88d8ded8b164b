"""An exact stand-in for a VAE: 2×2 pixels become 12 channels, nothing is learned and nothing lost."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin
from torch.nn import functional as F


class SpaceToDepthVAE(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """The interface of ``AutoencoderKL`` over ``pixel_unshuffle``.

    Args:
        latent_channels: 3 · 2².
        scaling_factor: Latents are ``(z − shift_factor) · scaling_factor``, as in Stable Diffusion 3; the defaults
            bring the mostly white pictures of the tiny task to about zero mean and unit variance.
        shift_factor: See ``scaling_factor``.
        block_out_channels: Only its length counts: pipelines take the downscaling 2^(length − 1) from it.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        latent_channels: int = 12,
        scaling_factor: float = 2.0,
        shift_factor: float = 0.82,
        block_out_channels: tuple[int, ...] = (12, 12),
    ) -> None:
        super().__init__()
        # Pipelines ask every part for its device and dtype, which a module without parameters cannot tell.
        self.register_buffer("anchor", torch.zeros(1))

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[Any]:
        """Pictures (N, 3, H, W) in [−1, 1] to a distribution without spread over (N, 12, H/2, W/2)."""
        mean = F.pixel_unshuffle(x, 2)
        posterior = DiagonalGaussianDistribution(torch.cat([mean, torch.zeros_like(mean)], dim=1), deterministic=True)
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(self, z: torch.Tensor, return_dict: bool = True, generator: object = None) -> DecoderOutput | tuple[Any]:
        """Latents (N, 12, H/2, W/2) to pictures (N, 3, H, W): the inverse of ``encode``."""
        sample = F.pixel_shuffle(z, 2)
        return DecoderOutput(sample=sample) if return_dict else (sample,)
