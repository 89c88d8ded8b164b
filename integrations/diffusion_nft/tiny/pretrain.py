"""Makes the tiny checkpoint: flow matching, as in Stable Diffusion 3, on pictures whose captions are often wrong.

    python integrations/diffusion_nft/tiny/pretrain.py --output DIR [--seed 0] [--steps 6000]

The pictures are always clean, the captions often wrong. The model so learns to draw crisply and to trust a caption only
in part: room for reinforcement learning that is not room for better drawing.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # runs from any folder

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from torch.optim.swa_utils import AveragedModel

from integrations.diffusion_nft.tiny import MAX_SEQUENCE_LENGTH
from integrations.diffusion_nft.tiny.pictures import (
    SIZE,
    Scene,
    draw,
    is_held_out,
    mistaken,
    random_scene,
    shape_scenes,
    text_scenes,
)
from integrations.diffusion_nft.tiny.pipeline import build

WHOLE, PART = 0.4, 0.15  # probabilities of a wrong caption and, in the others, of each wrong part
WARMUP, EMA_DECAY = 100, 0.998
LEARNING_RATE, MUON_LEARNING_RATE = 1e-3, 0.02


def train(seed: int, steps: int, batch: int, output: Path, save_every: int) -> None:
    """Trains a pipeline from scratch and writes it, its prompts, samples and card to ``output``, whole at any time."""
    start = time.perf_counter()
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    pipeline = build(seed)
    captions = _Captions(pipeline)
    model = pipeline.transformer.train().requires_grad_(True)
    average = AveragedModel(model, avg_fn=lambda old, new, _: old.lerp(new, 1 - EMA_DECAY))
    optimizers = _optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda s: min((s + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * s / steps)))
        for o in optimizers
    ]
    running = math.nan
    for step in range(1, steps + 1):
        scenes = [random_scene(rng) for _ in range(batch)]
        pictures = np.stack([draw(scene, rng) for scene in scenes])
        tokens, pooled = captions([mistaken(scene, rng, WHOLE, PART) for scene in scenes])
        loss = _flow_matching_loss(pipeline, pictures, tokens, pooled, generator)
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        average.update_parameters(model)
        running = loss.item() if math.isnan(running) else 0.98 * running + 0.02 * loss.item()
        if step % 100 == 0:
            print(f"step {step}/{steps}  loss {running:.4f}  {time.perf_counter() - start:.0f} s", flush=True)
        if step % save_every == 0 or step == steps:
            pipeline.transformer = average.module
            _save(pipeline, output, seed, step, batch, time.perf_counter() - start)
            pipeline.transformer = model


def _optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of attention and feed-forward (four times fewer steps here), AdamW for all else."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and "transformer_blocks" in name and "norm" not in name
        (matrices if hidden else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01),
    ]


class _Captions:
    """The embeddings of all captions, computed once: the text encoders are frozen."""

    def __init__(self, pipeline: StableDiffusion3Pipeline) -> None:
        scenes = [*shape_scenes(), *text_scenes()]
        self._index = {scene: i for i, scene in enumerate(scenes)}
        with torch.no_grad():
            self._tokens, _, self._pooled, _ = pipeline.encode_prompt(
                [scene.prompt.text for scene in scenes],
                None,
                None,
                do_classifier_free_guidance=False,
                max_sequence_length=MAX_SEQUENCE_LENGTH,
            )

    def __call__(self, scenes: Sequence[Scene]) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.tensor([self._index[scene] for scene in scenes])
        return self._tokens[index], self._pooled[index]


def _flow_matching_loss(
    pipeline: StableDiffusion3Pipeline,
    pictures: np.ndarray,
    tokens: torch.Tensor,
    pooled: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Mean of |v(x_σ, σ, caption) − (ε − x0)|² with σ logit-normal, shifted as the pipeline's scheduler is."""
    vae, shift = pipeline.vae, pipeline.scheduler.config.shift
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    clean = (vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
    sigma = torch.randn(len(clean), generator=generator).sigmoid()
    sigma = (shift * sigma / (1 + (shift - 1) * sigma)).view(-1, 1, 1, 1)
    noise = torch.randn(clean.shape, generator=generator)
    velocity = pipeline.transformer((1 - sigma) * clean + sigma * noise, tokens, pooled, 1000 * sigma.flatten()).sample
    loss: torch.Tensor = (velocity - (noise - clean)).square().mean()
    return loss


def _save(pipeline: StableDiffusion3Pipeline, output: Path, seed: int, steps: int, batch: int, seconds: float) -> None:
    """Replaces ``output`` by a new checkpoint; an interruption leaves the old one or the new one."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
        new = Path(folder) / "new"
        weights = {name: value.clone() for name, value in pipeline.transformer.state_dict().items()}
        pipeline.transformer.to(torch.bfloat16)  # halves the file; loaded as float32
        pipeline.save_pretrained(new)
        pipeline.transformer.to(torch.float32).load_state_dict(weights)
        for name, held_out in (("prompts_train", False), ("prompts_held_out", True)):
            (new / f"{name}.jsonl").write_text(_prompt_lines(held_out), encoding="utf-8")
        _sample_grid(pipeline).save(new / "samples.png")
        (new / "README.md").write_text(_card(seed, steps, batch, seconds), encoding="utf-8")
        for file in new.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        new.chmod(0o755)
        if output.exists():
            output.rename(Path(folder) / "old")
        new.rename(output)


def _prompt_lines(held_out: bool) -> str:
    scenes = [scene for scene in (*shape_scenes(), *text_scenes()) if is_held_out(scene) == held_out]
    prompts = [scene.prompt for scene in scenes]
    return "".join(json.dumps({"prompt": prompt.text, **prompt.metadata}) + "\n" for prompt in prompts)


def _sample_scenes() -> list[Scene]:
    """Four held-out scenes of each kind."""
    shapes, texts = ([scene for scene in kind if is_held_out(scene)] for kind in (shape_scenes(), text_scenes()))
    return [*shapes[::2][:4], *texts[1::17][:4]]


def _sample_grid(pipeline: StableDiffusion3Pipeline, columns: int = 8, zoom: int = 4) -> Image.Image:
    """One row of pictures for each of eight held-out captions."""
    scenes = _sample_scenes()
    pictures = pipeline(
        [scene.prompt.text for scene in scenes for _ in range(columns)],
        num_inference_steps=8,
        guidance_scale=1.0,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    grid = (pictures * 255).round().astype(np.uint8).reshape(len(scenes), columns, *pictures.shape[1:])
    image = Image.fromarray(grid.transpose(0, 2, 1, 3, 4).reshape(len(scenes) * SIZE, columns * SIZE, 3))
    return image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST)


def _card(seed: int, steps: int, batch: int, seconds: float) -> str:
    command = shlex.join(["python", "integrations/diffusion_nft/tiny/pretrain.py", *sys.argv[1:]])
    return f"""---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
---
# Tiny Stable Diffusion 3

A `StableDiffusion3Pipeline` with every real part at a small size (a transformer of 2.3 M parameters, two CLIP text
encoders, a T5 encoder) that draws 24 px pictures: one to three coloured shapes, or two coloured letters. It is the
starting point of the `tiny` training run, not a model for use.

- **Made by** `{command}`
  (seed {seed}, {steps} steps of {batch} pictures, {seconds / 60:.0f} minutes on one CPU thread).
- **Training**: flow matching (σ logit-normal with the scheduler's shift; target ε − x0), Muon at {MUON_LEARNING_RATE:g}
  and AdamW at {LEARNING_RATE:g} with cosine decay, weight average {EMA_DECAY}. The text encoders are random and frozen;
  the VAE rearranges pixels.
- **Data**: drawn by `pictures.py`; nothing is downloaded. Captions are wrong on purpose: with probability
  {WHOLE:g} that of another picture, else each of colour, shape, count and letter is drawn anew with probability
  {PART:g}. So pictures are crisp and often not what was asked for.
- **Use**: `load_pipeline()`, guidance 1.0, 8 steps, `max_sequence_length={MAX_SEQUENCE_LENGTH}`.
- **Prompts**: `prompts_train.jsonl` and `prompts_held_out.jsonl`, disjoint, a quarter held out.
- **Measured**: see [MEASURED.md](MEASURED.md), written by `measure.py`.
- **Licence**: Apache-2.0, as the repository. The letters are drawn with DejaVu Sans Bold, which comes with matplotlib.

Samples, one row a caption: {", ".join(f"`{scene.prompt.text}`" for scene in _sample_scenes())}.

![samples](samples.png)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description="Make the tiny Stable Diffusion 3 checkpoint.")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint; replaced if it exists")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=64, help="pictures a step")
    parser.add_argument("--save-every", type=int, default=500, help="steps between two whole checkpoints")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    train(options.seed, options.steps, options.batch, options.output.resolve(), options.save_every)


if __name__ == "__main__":
    main()
