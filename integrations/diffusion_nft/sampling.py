r"""From prompts and noise to clean latents and pictures, without classifier-free guidance.

The pipeline's scheduler gives the noise levels σ. Both samplers are deterministic ODE solvers on the same levels:

* `euler`: z ← z + (σ' − σ) v, the same as `pipe(…, guidance_scale=1)`.
* `dpm2`: second-order multistep in λ = log((1−σ)/σ) on the x0-prediction x0 = z − σ v (DPM-Solver++(2M), arXiv
  2211.01095). A first-order step in λ is an Euler step, so it only changes the x0 that the step aims at, to
  x0 + (x0 − x0_previous) h/(2 h_previous) with h = λ' − λ; the first and the last step stay first order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline

from integrations.diffusion_nft.config import Sampler


class Latents:
    """A pipeline seen as a sampler: prompt embeddings (computed once per text), latents and pictures.

    Args:
        pipeline: Only its parts are used; the transformer's active adapter decides the policy.
        size: Picture side in pixels; None is the model's own.
        max_sequence_length: T5 tokens.
    """

    def __init__(self, pipeline: StableDiffusion3Pipeline, size: int | None, max_sequence_length: int) -> None:
        self.pipeline = pipeline
        self.device = pipeline.transformer.device
        self.dtype = pipeline.transformer.dtype
        side = (size or pipeline.default_sample_size * pipeline.vae_scale_factor) // pipeline.vae_scale_factor
        self.shape = (pipeline.transformer.config.in_channels, side, side)
        self._max_sequence_length = max_sequence_length
        self._embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompt embeddings (n, tokens, dim) and pooled embeddings (n, dim)."""
        for text in dict.fromkeys(text for text in texts if text not in self._embeddings):
            # One text at a time: its embedding then never depends on its neighbours.
            embeds, _, pooled, _ = self.pipeline.encode_prompt(
                prompt=[text],
                prompt_2=None,
                prompt_3=None,
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self._max_sequence_length,
            )
            self._embeddings[text] = (embeds[0], pooled[0])
        embeds, pooled = zip(*(self._embeddings[text] for text in texts), strict=True)
        return torch.stack(embeds), torch.stack(pooled)

    def velocity(
        self, latents: torch.Tensor, t: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """The active policy's v(x_t, t) with t in [0, 1], shape (n,)."""
        velocity: torch.Tensor = self.pipeline.transformer(
            hidden_states=latents,
            timestep=t * self.pipeline.scheduler.config.num_train_timesteps,
            encoder_hidden_states=embeddings[0],
            pooled_projections=embeddings[1],
            return_dict=False,
        )[0]
        return velocity

    def levels(self, steps: int) -> torch.Tensor:
        """The scheduler's noise levels σ from high to low and a final 0, shape (steps + 1,)."""
        self.pipeline.scheduler.set_timesteps(steps, device=self.device)
        levels: torch.Tensor = self.pipeline.scheduler.sigmas
        return levels

    @torch.no_grad()
    def sample(self, texts: Sequence[str], noise: torch.Tensor, steps: int, sampler: Sampler) -> torch.Tensor:
        """Clean latents x0 for every text from noise (n, C, H, W), with the transformer's active adapter."""
        embeddings = self.embed(texts)
        levels = self.levels(steps)
        return integrate(
            lambda z, sigma: self.velocity(z, sigma.expand(len(z)), embeddings),
            noise.to(self.device, self.dtype),
            levels,
            second_order=sampler == "dpm2",
        )

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """Latents to uint8 pictures (n, H, W, 3), as the pipeline does it."""
        vae = self.pipeline.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        images = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        array: np.ndarray = self.pipeline.image_processor.postprocess(images, output_type="np")
        return (array * 255).round().astype(np.uint8)


def integrate(
    velocity: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    latents: torch.Tensor,
    levels: torch.Tensor,
    *,
    second_order: bool,
) -> torch.Tensor:
    """Integrate dz/dσ = v from `levels[0]` to `levels[-1]`.

    Args:
        velocity: v(z, σ).
        latents: z at `levels[0]`.
        levels: Decreasing noise levels, shape (steps + 1,).
        second_order: `dpm2` rather than `euler`.
    """
    # λ is −∞ at σ = 1, so that the second step corrects by h/∞ = 0: the limit, with no clipping.
    lam = torch.logit(1 - levels.double()).tolist()
    last = len(levels) - 2
    previous = None
    for i in range(last + 1):
        sigma, following = levels[i], levels[i + 1]
        v = velocity(latents, sigma)
        clean = latents - sigma * v
        if second_order and previous is not None and i < last:
            h, h_previous = lam[i + 1] - lam[i], lam[i] - lam[i - 1]
            v = v - (clean - previous) * (h / (2 * h_previous)) / sigma
        latents = latents + (following - sigma) * v
        previous = clean
    return latents
