r"""Prompts where they are needed: a stratum whose rewards are drowned in noise gets more of each step's prompts.

With a_s the share of stratum s, reward k sees n_k = Σ a_s over the strata it lives on, and its noise-to-signal power is
ρ_k ∝ 1/n_k. The shares that minimise Σ_k ρ_k are the fixed point of a_s ← a_s √(Σ_{k on s} ρ_k / n_k), normalised:
Neyman's allocation, where rewards share strata. Shares move a little towards it at each measurement and stay between
half and three times what they were at the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

SPEED = 0.1  # share of the way to the wanted shares made at a measurement
LEAST, MOST = 0.5, 3.0  # bounds, as multiples of the fixed share
LEAST_SIGNAL = 0.05  # a smaller signal-to-noise is taken for this: it cannot be told from none


@dataclass(frozen=True)
class Allocation:
    """How the prompts of a step are spread over the strata. Never changed in place: `after` is the state a step later.

    Attributes:
        fixed: Each stratum's share without measurement, sums to 1.
        shares: Its share now.
        credit: Prompts it is owed: the fractions that no step could draw.
        drawn: Prompts drawn from it so far.
        lives: For each reward and stratum, 1 once the reward applied to a picture of it.
    """

    fixed: list[float]
    shares: list[float]
    credit: list[float]
    drawn: list[int]
    lives: list[list[int]]

    @classmethod
    def start(cls, fixed: Sequence[float], rewards: int) -> Allocation:
        """Before the first step."""
        count = len(fixed)
        return cls(list(fixed), list(fixed), [0.0] * count, [0] * count, [[0] * count for _ in range(rewards)])

    def counts(self, prompts: int) -> list[int]:
        """The prompts of each stratum in the next step.

        Args:
            prompts: How many in all.
        """
        owed = np.array(self.credit) + prompts * np.array(self.shares)
        counts = [0] * len(owed)
        for _ in range(prompts):
            most = int(owed.argmax())
            counts[most] += 1
            owed[most] -= 1
        return counts

    def after(self, prompts: int, valid: torch.Tensor, signal_to_noise: torch.Tensor | None) -> Allocation:
        """The state after a step.

        Args:
            prompts: How many prompts the step had, `counts(prompts)` of each stratum, in the strata's order.
            valid: Whether a reward applied to some picture of a prompt, bool (rewards, prompts).
            signal_to_noise: √(U_kk/N_kk) of each reward, NaN where it is not known; None where this step measured
                nothing. A reward that shall get no prompts for its own sake has infinity.
        """
        counts = self.counts(prompts)
        strata = np.repeat(np.arange(len(counts)), counts)
        lives = np.array(self.lives)
        for k, row in enumerate(valid.numpy()):
            lives[k, strata[row]] = 1
        owed = np.array(self.credit) + prompts * np.array(self.shares) - counts
        moved = replace(
            self,
            credit=owed.tolist(),
            drawn=[before + count for before, count in zip(self.drawn, counts, strict=True)],
            lives=lives.tolist(),
        )
        if signal_to_noise is None:
            return moved
        shares = np.array(self.shares)
        wanted = _bounded(_wanted(shares, lives, signal_to_noise.numpy()), np.array(self.fixed))
        return replace(moved, shares=(shares + SPEED * (wanted - shares)).tolist())

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs, for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> Allocation:
        """The allocation that `state_dict` described."""
        return cls(**state)


def _wanted(shares: np.ndarray, lives: np.ndarray, signal_to_noise: np.ndarray) -> np.ndarray:
    """The next shares on the way to the least Σ_k ρ_k, not normalised."""
    power = np.nan_to_num(signal_to_noise, nan=0.0, posinf=1.0).clip(LEAST_SIGNAL, 1.0) ** 2
    noise_to_signal = (1 - power) / power
    seen = lives @ shares
    pull = lives.T @ (noise_to_signal / np.where(seen > 0, seen, 1.0))
    wanted: np.ndarray = shares * np.sqrt(pull)
    return wanted


def _bounded(wanted: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Shares in proportion to `wanted` as far as the bounds let them be, with sum 1; `fixed` if nothing is wanted."""
    if not wanted.any():
        return fixed
    wanted = np.maximum(wanted, 1e-6 * wanted.max())  # what is left over goes to strata that nobody wants
    low, high = 0.0, MOST * fixed.max() / wanted.min()
    for _ in range(100):  # the sum grows with the factor
        middle = (low + high) / 2
        if np.clip(middle * wanted, LEAST * fixed, MOST * fixed).sum() < 1:
            low = middle
        else:
            high = middle
    shares: np.ndarray = np.clip(high * wanted, LEAST * fixed, MOST * fixed)
    shares /= shares.sum()
    return shares
