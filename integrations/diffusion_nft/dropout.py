"""Reward dropout: each step each reward sits out with some probability, but never all of them."""

from __future__ import annotations

import torch


def dropped(present: torch.Tensor, probability: float, draw: torch.Generator) -> torch.Tensor:
    """Which of the present rewards sit this step out; one at least stays.

    Args:
        present: Which rewards have something to say in this step, bool (K,).
        probability: Of each, in [0, 1).
        draw: The step's own generator, so that a resumed run drops the same ones.
    """
    luck = torch.rand(len(present), generator=draw)
    out = present & (luck < probability)
    if bool(present.any()) and not bool((present & ~out).any()):
        out[luck.masked_fill(~present, -1.0).argmax()] = False
    return out
