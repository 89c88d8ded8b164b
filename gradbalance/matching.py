"""Under FSDP2 every rank must run the same reverse passes: each one gathers weights and reduces gradients with all.

So the ranks first compare which objectives they have. One that is absent on some ranks is stood in for there by a pass
of zeros through another loss, if that one reaches the same parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradbalance.objectives import Objectives
from gradbalance.passes import walk
from gradbalance.ranks import Ranks


class Pass(NamedTuple):
    """One reverse pass: the row that its gradient belongs to, where it starts, and with what."""

    row: int
    outputs: list[Tensor]
    cotangents: list[Tensor]


def match(given: Objectives, ranks: Ranks, device: torch.device) -> dict[int, int]:
    """Compare what the ranks have.

    Returns:
        For each objective that any rank has, which one's graph this rank passes through for it: its own, or a stand-in.

    Raises:
        RuntimeError: On all ranks, if an objective is absent on some of them and nothing can stand in for it.
    """
    count = len(given.names)
    here = given.connected
    agreed = ranks.agree([*map(int, here), *(int(not c) for c in here)], device)
    anywhere, missing = agreed[:count], agreed[count:]
    everywhere = [k for k in range(count) if not missing[k]]
    partly = [k for k in range(count) if anywhere[k] and missing[k]]
    stand_in: dict[int, int] = {}
    if partly:
        leaves = [{id(leaf) for leaf in walk(given.single(k)[0]).leaves} if here[k] else set() for k in range(count)]
        differs = [int(here[k] and leaves[k] != leaves[j]) for k in partly for j in everywhere]
        answers = iter(ranks.agree(differs, device) if differs else [])
        for k in partly:
            for j in everywhere:
                if not next(answers):
                    stand_in.setdefault(k, j)
        lost = [given.names[k] for k in partly if k not in stand_in]
        if lost:
            raise RuntimeError(
                f"backward: {lost} absent on some ranks only. Under FSDP2 every rank must run the same backward "
                "passes, and no other loss reaches the same parameters: pass 0 * loss where it does not count"
            )
    return {k: k if here[k] else stand_in[k] for k in range(count) if anywhere[k]}


def matched_passes(given: Objectives, ranks: Ranks, device: torch.device) -> list[Pass]:
    """One pass for each objective that any rank has, in the same order on all ranks; a stand-in's is of zeros."""
    passes = []
    for k, through in match(given, ranks, device).items():
        outputs, cotangents = given.single(through)
        passes.append(Pass(k, outputs, cotangents if through == k else [torch.zeros_like(c) for c in cotangents]))
    return passes


def sync_is_off(what: str) -> RuntimeError:
    """What to raise where a pass gave the sharded parameters nothing."""
    return RuntimeError(
        f"backward: {what} gave no parameter a gradient. Leave gradient sync on while gradients are accumulated "
        "(set_requires_gradient_sync(True); accelerate: sync_each_batch=True): FSDP2 would add up what belongs to "
        "different passes before it can be told apart"
    )
