"""Measures whether the tiny task can be learned: base rewards, and signal and conflict of the rewards' gradients.

    python integrations/diffusion_nft/tiny/measure.py [--checkpoint DIR] [--batches 16] [--output FILE.md]

Gradients are those of the DiffusionNFT loss at v = v_old with respect to a fresh LoRA. Cross products of gradients from
independent batches are free of noise on average: with N_kl = E⟨g_k, g_l⟩ in a batch and U_kl = ⟨E g_k, E g_l⟩ across
batches, the share of signal in reward k's gradient norm is √(U_kk/N_kk) and the true cosine is U_kl/√(U_kk U_ll).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # runs from any folder

import numpy as np
import numpy.typing as npt
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig

from integrations.diffusion_nft.prompts import Prompt, load_prompts
from integrations.diffusion_nft.rewards import Reward, build_rewards
from integrations.diffusion_nft.tiny import CHECKPOINT, MAX_SEQUENCE_LENGTH, load_pipeline
from integrations.diffusion_nft.tiny.pictures import draw, shape_scenes, text_scenes

NAMES = ("ocr", "count", "colour", "tidiness", "framing")
STEPS, GROUPS, GROUP = 8, 10, 12  # sampling steps, prompts a batch, pictures a prompt
_BETA, _MAX_ADVANTAGE, _TIMESTEPS = 0.1, 5.0, 2
_PROJECTIONS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


class Sampled:
    """Pictures with what made them: latents, prompts, embeddings, scores (K, N)."""

    def __init__(
        self,
        pipeline: StableDiffusion3Pipeline,
        prompts: Sequence[Prompt],
        rewards: dict[str, Reward],
        seed: int,
    ) -> None:
        with torch.no_grad():
            self.tokens, _, self.pooled, _ = pipeline.encode_prompt(
                [prompt.text for prompt in prompts],
                None,
                None,
                do_classifier_free_guidance=False,
                max_sequence_length=MAX_SEQUENCE_LENGTH,
            )
        self.prompts = list(prompts)
        self.latents = pipeline(
            prompt_embeds=self.tokens,
            pooled_prompt_embeds=self.pooled,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        ).images
        config = pipeline.vae.config
        pixels = pipeline.vae.decode(self.latents / config.scaling_factor + config.shift_factor).sample
        pixels = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1)
        self.images = pixels.to(torch.uint8).numpy()
        self.scores = np.array([reward(self.images, self.prompts) for reward in rewards.values()])


def advantages(scores: np.ndarray) -> np.ndarray:
    """Group-centred, batch-scaled advantages (K, N) of scores in groups of ``GROUP`` columns; NaN becomes 0."""
    grouped = scores.reshape(len(scores), -1, GROUP)
    centred = (grouped - grouped.mean(-1, keepdims=True)).reshape(scores.shape)
    scaled: npt.NDArray[np.float64] = centred / (np.nanstd(scores, axis=1, keepdims=True) + 1e-4)
    scaled[np.isnan(scaled)] = 0
    return scaled


def gradients(pipeline: StableDiffusion3Pipeline, batch: Sampled, generator: torch.Generator) -> torch.Tensor:
    """One DiffusionNFT gradient per reward (K, P), each sample at ``_TIMESTEPS`` of the sampling times."""
    model = pipeline.transformer
    parameters = [p for p in model.parameters() if p.requires_grad]
    r = 0.5 + torch.from_numpy(advantages(batch.scores)).clamp(-_MAX_ADVANTAGE, _MAX_ADVANTAGE) / (2 * _MAX_ADVANTAGE)
    mask = torch.from_numpy(np.isfinite(batch.scores)).double()
    sigmas = pipeline.scheduler.sigmas[: int(0.99 * STEPS)]
    total = torch.zeros(len(r), sum(p.numel() for p in parameters), dtype=torch.float64)
    order = torch.stack([torch.randperm(len(sigmas), generator=generator) for _ in batch.prompts])
    for turn in range(_TIMESTEPS):
        for chunk in torch.split(torch.arange(len(batch.prompts)), 40):
            clean, t = batch.latents[chunk], sigmas[order[chunk, turn]].view(-1, 1, 1, 1)
            noisy = (1 - t) * clean + t * torch.randn(clean.shape, generator=generator)
            v = model(noisy, batch.tokens[chunk], batch.pooled[chunk], 1000 * t.flatten()).sample
            old = v.detach()
            plus, minus = _BETA * v + (1 - _BETA) * old, (1 + _BETA) * old - _BETA * v
            errors = [(noisy - t * side - clean) for side in (plus, minus)]
            terms = torch.stack([e.square().mean((1, 2, 3)) / e.detach().abs().mean((1, 2, 3)) for e in errors])
            for k in range(len(r)):
                weights = _MAX_ADVANTAGE / _BETA * torch.stack([r[k, chunk], 1 - r[k, chunk]]) * mask[k, chunk]
                loss = (weights.float() * terms).sum() / float(mask[k].sum() * _TIMESTEPS)
                parts = torch.autograd.grad(loss, parameters, retain_graph=k + 1 < len(r))
                total[k] += torch.cat([part.flatten() for part in parts]).double()
    return total


def signal(samples: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Shares of signal (K,) and true cosines (K, K) from gradients of independent batches (batches, K, P)."""
    n = len(samples)
    within = torch.einsum("bkp,blp->kl", samples, samples) / n
    mean = samples.mean(0)
    across = (n * (mean @ mean.T) - within) / (n - 1)  # Σ over pairs of distinct batches
    norms = across.diagonal().clamp_min(0).sqrt()  # 0: no signal found in so few batches, and NaN for its cosines
    return (norms / within.diagonal().sqrt()).numpy(), (across / torch.outer(norms, norms)).numpy()


def measure(checkpoint: Path, batches: int, seed: int) -> str:
    """Runs all measurements and returns them as Markdown."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    pipeline, rewards = load_pipeline(checkpoint), build_rewards(NAMES)
    clean = [scene for scene in (*shape_scenes(), *text_scenes()) for _ in range(4)]
    pictures = np.stack([draw(scene, rng) for scene in clean])
    exact = [np.nanmean(reward(pictures, [scene.prompt for scene in clean])) for reward in rewards.values()]
    pipeline.transformer.add_adapter(
        LoraConfig(r=16, lora_alpha=32, init_lora_weights="gaussian", target_modules=_PROJECTIONS)
    )
    prompts = load_prompts(checkpoint / "prompts_train.jsonl")
    texts, shapes = (np.array([i for i, p in enumerate(prompts) if (p.quoted is None) == k]) for k in (False, True))
    seen, found = [], []
    for index in range(batches):
        half = GROUPS // 2
        chosen = [*rng.choice(texts, half, replace=False), *rng.choice(shapes, GROUPS - half, replace=False)]
        batch = Sampled(pipeline, [prompts[i] for i in chosen for _ in range(GROUP)], rewards, seed + index)
        found.append(gradients(pipeline, batch, generator))
        seen.append(batch)
    scores = np.concatenate([batch.scores for batch in seen], axis=1)
    shares, cosines = signal(torch.stack(found))
    lines = [
        f"Base rewards over {scores.shape[1]} pictures (train prompts, {STEPS} Euler steps); spread is the standard",
        f"deviation among pictures of one prompt. Gradients of {batches} independent batches of {GROUPS} prompts ×",
        f"{GROUP} pictures: the share of signal in a batch's gradient norm, and the true cosines between rewards.",
        "",
        "| reward | on clean pictures | base mean | spread | signal share | " + " | ".join(NAMES) + " |",
        "|---|---|---|---|---|" + "---|" * len(NAMES),
    ]
    for k, name in enumerate(NAMES):
        spread = np.sqrt(np.nanmean(scores[k].reshape(-1, GROUP).var(-1)))
        row = [exact[k], np.nanmean(scores[k]), spread, shares[k], *cosines[k]]
        lines.append(f"| {name} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
    return "\n".join([*lines, "", _times(pipeline, seen[0], rewards)]) + "\n"


def _times(pipeline: StableDiffusion3Pipeline, batch: Sampled, rewards: dict[str, Reward]) -> str:
    """Seconds of sampling and scoring 100 pictures and of one training pass over 16."""
    hundred = [batch.prompts[i] for i in np.linspace(0, len(batch.prompts) - 1, 100).astype(int)]
    marks = [time.perf_counter()]
    sampled = Sampled(pipeline, hundred, {}, 0)
    marks.append(time.perf_counter())
    for reward in rewards.values():
        reward(sampled.images, hundred)
        marks.append(time.perf_counter())
    inputs = sampled.latents[:16], sampled.tokens[:16], sampled.pooled[:16], torch.full((16,), 500.0)
    pipeline.transformer(*inputs).sample.square().mean().backward()
    marks.append(time.perf_counter())
    sampling, *scoring, training = np.diff(marks)
    detail = ", ".join(f"{name} {value:.2f}" for name, value in zip(rewards, scoring, strict=True))
    return (
        f"One thread: 100 pictures sampled in {sampling:.2f} s and scored in {sum(scoring):.2f} s ({detail}); "
        f"forward and backward of 16 pictures {1000 * training:.0f} ms."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, measures and reports."""
    parser = argparse.ArgumentParser(description="Measure the tiny task.")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="also written here, as Markdown")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report = measure(options.checkpoint, options.batches, options.seed)
    print(report)
    if options.output:
        options.output.write_text("# Measured\n\n" + report, encoding="utf-8")


if __name__ == "__main__":
    main()
