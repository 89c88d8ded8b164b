"""Held-out measurement: fixed prompts and fixed noise, so that before and after differ by the policy alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from integrations.diffusion_nft.config import Config
from integrations.diffusion_nft.prompt_sampler import load_strata
from integrations.diffusion_nft.randomness import generator, noise
from integrations.diffusion_nft.rewards import Reward
from integrations.diffusion_nft.rollout import Rollout, collect
from integrations.diffusion_nft.sampling import Latents

STANDARD_ERROR = (
    "se: standard error of after - before, paired by picture (same prompt and noise), pictures of a prompt averaged "
    "first; se_unpaired: as if the two sets of pictures were independent"
)


class HeldOut:
    """The held-out set of a config: equal shares of every stratum, so that every specialist has its pictures.

    Attributes:
        prompts: The prompt of each picture, N in all.
        groups: Shape (N,), the same number for pictures of the same prompt.

    Args:
        config: Its `prompts.held_out` and `evaluation`.
        latents: The pipeline as a sampler.
        rewards: What is measured, by name.

    Raises:
        UserError: A prompt file is missing or wrong.
    """

    def __init__(self, config: Config, latents: Latents, rewards: Mapping[str, Reward]) -> None:
        self._settings = config.evaluation
        self._latents = latents
        self.rewards = rewards
        strata = load_strata(config.prompts.held_out)
        share = -(-self._settings.pictures // len(strata))
        chosen = [(s, p) for s, stratum in enumerate(strata) for p in self._choose(share, len(stratum))]
        self.prompts = [strata[s][i] for s, i in chosen]
        self.groups = np.unique(chosen, axis=0, return_inverse=True)[1]

    def _choose(self, share: int, available: int) -> list[int]:
        """The prompt of each of a stratum's pictures, by its place in the stratum."""
        each = self._settings.images_per_prompt
        turns = -(-share // each)
        return [spread(i // each, turns, available) for i in range(share)]

    def measure(self, check: Callable[[], None] = lambda: None) -> Rollout:
        """Pictures and rewards of the active policy."""
        start = noise(self._latents.shape, len(self.prompts), generator(self._settings.seed, "held out"))
        return collect(
            self._latents,
            self.rewards,
            self.prompts,
            start,
            steps=self._settings.steps,
            sampler=self._settings.sampler,
            batch=self._settings.batch,
            check=check,
        )

    def table(self, measured: Rollout) -> dict[str, list[float]]:
        """Rewards by name, one value per picture, NaN where a reward does not apply."""
        return dict(zip(self.rewards, measured.rewards.tolist(), strict=True))


def spread(i: int, share: int, available: int) -> int:
    """Index of the i-th of `share` draws from `available` prompts: evenly spread, repeats side by side."""
    return i * available // share


def mean_and_error(values: Sequence[float], groups: np.ndarray) -> tuple[float, float]:
    """Mean over pictures and its standard error with each prompt's pictures counted as one draw.

    Args:
        values: Shape (N,), NaN where missing.
        groups: Shape (N,), the prompt of each picture.

    Returns:
        Mean and standard error; NaN where there are none, or fewer than two prompts.
    """
    array = np.asarray(values, dtype=np.float64)
    valid = ~np.isnan(array)
    if not valid.any():
        return float("nan"), float("nan")
    array, labels = array[valid], np.unique(groups[valid], return_inverse=True)[1]
    counts = np.bincount(labels)
    if len(counts) < 2:
        return float(array.mean()), float("nan")
    # A ratio estimator over prompts: exact for equal group sizes, and right when some pictures are missing.
    residuals = np.bincount(labels, weights=array - array.mean())
    error = np.sqrt((residuals**2).sum() * len(counts) / (len(counts) - 1)) / len(array)
    return float(array.mean()), float(error)


def compare(before: Sequence[float], after: Sequence[float], groups: np.ndarray) -> dict[str, float | int]:
    """Before and after of one reward, with the standard errors of their difference (see `STANDARD_ERROR`)."""
    mean_before, error_before = mean_and_error(before, groups)
    mean_after, error_after = mean_and_error(after, groups)
    change, error = mean_and_error(np.asarray(after, dtype=float) - np.asarray(before, dtype=float), groups)
    return {
        "before": mean_before,
        "after": mean_after,
        "change": change,
        "se": error,
        "se_unpaired": float(np.hypot(error_before, error_after)),
        "pictures": int((~torch.tensor(after, dtype=torch.float64).isnan()).sum()),
    }
