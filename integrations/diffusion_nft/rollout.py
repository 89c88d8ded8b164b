"""Sample pictures and score them at the same time: the rewards of one batch run while the next batch is sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from integrations.diffusion_nft.config import RunError, Sampler
from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.rewards import Reward
from integrations.diffusion_nft.sampling import Latents


class RewardError(RunError):
    """A reward raised, or returned something that is not one number (or NaN) per picture."""


@dataclass(frozen=True)
class Rollout:
    """N pictures with what is known about them.

    Attributes:
        prompts: The prompt of each picture.
        latents: Clean latents x0, shape (N, C, H, W).
        images: uint8 (N, H, W, 3).
        rewards: float64 (K, N), NaN where a reward does not apply.
        seconds: Wall-clock by phase: `sample`, and `reward`, the time spent waiting for rewards after sampling.
    """

    prompts: list[Prompt]
    latents: torch.Tensor
    images: np.ndarray
    rewards: torch.Tensor
    seconds: dict[str, float]


def collect(
    latents: Latents,
    rewards: Mapping[str, Reward],
    prompts: Sequence[Prompt],
    noise: torch.Tensor,
    *,
    steps: int,
    sampler: Sampler,
    batch: int,
    check: Callable[[], None] = lambda: None,
) -> Rollout:
    """Sample one picture per prompt with the active policy and score all.

    Args:
        latents: The pipeline as a sampler.
        rewards: Rewards by name.
        prompts: N prompts.
        noise: Shape (N, C, H, W).
        steps: Sampling steps.
        sampler: ODE solver.
        batch: Pictures at a time.
        check: Called between batches; may raise to stop.

    Raises:
        RewardError: A reward failed; names it.
    """
    clean, images, scores = [], [], []
    start = time.perf_counter()
    pool = ThreadPoolExecutor(1)
    try:
        for first in range(0, len(prompts), batch):
            check()
            part = prompts[first : first + batch]
            texts = [prompt.text for prompt in part]
            clean.append(latents.sample(texts, noise[first : first + batch], steps, sampler))
            images.append(latents.decode(clean[-1]))
            scores.append(pool.submit(score, rewards, images[-1], part))
        sampled = time.perf_counter()
        table = torch.cat([future.result() for future in scores], dim=1)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    seconds = {"sample": sampled - start, "reward": time.perf_counter() - sampled}
    return Rollout(list(prompts), torch.cat(clean), np.concatenate(images), table, seconds)


@torch.no_grad()
def score(rewards: Mapping[str, Reward], images: np.ndarray, prompts: Sequence[Prompt]) -> torch.Tensor:
    """Rewards of pictures, float64 (K, N).

    Raises:
        RewardError: A reward raised or returned a wrong shape or an infinite value.
    """
    rows = []
    for name, reward in rewards.items():
        try:
            values = np.asarray(reward(images, prompts), dtype=np.float64)
        except Exception as error:
            raise RewardError(f"reward {name!r} failed: {type(error).__name__}: {error}") from error
        if values.shape != (len(prompts),) or np.isinf(values).any():
            raise RewardError(
                f"reward {name!r} must return {len(prompts)} finite numbers (NaN: does not apply), got shape "
                f"{values.shape}{' with an infinite value' if np.isinf(values).any() else ''}"
            )
        rows.append(torch.from_numpy(values))
    return torch.stack(rows)
