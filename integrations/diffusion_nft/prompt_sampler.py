"""Which prompts an optimizer step sees: fixed shares of every stratum, each stratum shuffled and used up in turn.

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
        shares: One positive integer per stratum: of every `sum(shares)` prompts in a row, so many are from it, evenly
            spread. None: one each.

    Raises:
        UserError: There are not as many shares as strata.
    """

    def __init__(
        self, strata: Sequence[Sequence[Prompt]], per_step: int, seed: int, shares: Sequence[int] | None = None
    ) -> None:
        if shares is not None and len(shares) != len(strata):
            firsts = ", ".join(repr(stratum[0].text) for stratum in strata)
            raise UserError(
                f"prompts.shares={list(shares)} has {len(shares)} values for {len(strata)} strata, which begin with "
                f"{firsts}"
            )
        self._shares = [1] * len(strata) if shares is None else list(shares)
        turns = [((i + 0.5) / share, s) for s, share in enumerate(self._shares) for i in range(share)]
        self._round = [stratum for _, stratum in sorted(turns)]
        self._strata = strata
        self._per_step = per_step
        self._seed = seed

    @property
    def shares(self) -> list[float]:
        """Each stratum's share of the prompts that `draw` draws; they sum to 1."""
        return [share / sum(self._shares) for share in self._shares]

    def draw(self, step: int) -> list[Prompt]:
        """The prompts of optimizer step `step` (from 0)."""
        drawn = []
        for position in range(step * self._per_step, (step + 1) * self._per_step):
            turn, place_in_round = divmod(position, len(self._round))
            stratum = self._round[place_in_round]
            index = turn * self._shares[stratum] + self._round[:place_in_round].count(stratum)
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
