"""Which prompts an optimizer step sees: equal shares of every stratum, each stratum shuffled and used up in turn.

The draw is a function of the seed and the step alone, so a resumed run goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from integrations.diffusion_nft.config import UserError, resolve_path
from integrations.diffusion_nft.prompts import Prompt, load_prompts
from integrations.diffusion_nft.randomness import generator


def load_strata(files: Sequence[str]) -> list[list[Prompt]]:
    """The prompts of the files, one list per file, GenEval `tag`, and whether a text is quoted.

    Raises:
        UserError: A file is missing, unreadable or empty.
    """
    strata: dict[tuple[str, str, bool], list[Prompt]] = {}
    for file in files:
        path = resolve_path(file)
        try:
            prompts = load_prompts(path)
        except (ValueError, OSError) as error:
            raise UserError(" ".join(str(error).split())) from None
        for prompt in prompts:
            key = (file, str(prompt.metadata.get("tag", "")), prompt.quoted is not None)
            strata.setdefault(key, []).append(prompt)
    return list(strata.values())


class PromptSampler:
    """Draws the prompts of each step.

    Args:
        strata: Lists of prompts.
        per_step: Prompts per step; they go round the strata, so with fewer prompts than strata the turn moves on.
        seed: Decides the order.
    """

    def __init__(self, strata: Sequence[Sequence[Prompt]], per_step: int, seed: int) -> None:
        self._strata = strata
        self._per_step = per_step
        self._seed = seed

    @property
    def shares(self) -> list[float]:
        """Each stratum's share of the prompts that `draw` draws; they sum to 1."""
        return [1 / len(self._strata)] * len(self._strata)

    def draw(self, step: int) -> list[Prompt]:
        """The prompts of optimizer step `step` (from 0)."""
        drawn = []
        for position in range(step * self._per_step, (step + 1) * self._per_step):
            index, stratum = divmod(position, len(self._strata))
            drawn.append(self._prompt(stratum, index))
        return drawn

    def draw_counts(self, counts: Sequence[int], before: Sequence[int]) -> list[Prompt]:
        """The next prompts of each stratum, stratum by stratum.

        Args:
            counts: How many of each.
            before: How many of each have been drawn.
        """
        places = enumerate(zip(before, counts, strict=True))
        return [self._prompt(s, index) for s, (first, count) in places for index in range(first, first + count)]

    def _prompt(self, stratum: int, index: int) -> Prompt:
        """The `index`-th prompt that is drawn from a stratum."""
        prompts = self._strata[stratum]
        lap, place = divmod(index, len(prompts))
        order = torch.randperm(len(prompts), generator=generator(self._seed, "prompts", stratum, lap))
        return prompts[int(order[place])]
