"""What applied updates do to each reward: the cosine of the parameters' change with the reward's gradient elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from integrations.diffusion_nft.advantages import group_advantages
from integrations.diffusion_nft.loss import nft_coefficients
from integrations.diffusion_nft.randomness import generator
from integrations.diffusion_nft.rollout import Rollout
from integrations.diffusion_nft.trainer import Trainer

BATCHES = 2  # held-out batches of a measurement, each with half of the prompts


def cosines(
    trainer: Trainer, held_out: Rollout, groups: np.ndarray, change: Sequence[torch.Tensor]
) -> list[list[float | None]]:
    """Cosines of a parameter change with the rewards' descent directions on held-out pictures.

    The gradient is that of each reward's own loss at the averaged policy, which made the pictures.

    Args:
        trainer: Its loss is used; neither its weights nor its optimizer change.
        held_out: Pictures of the averaged policy, with all K rewards.
        groups: Shape (N,), the prompt of each picture.
        change: θ after minus θ before some steps, one tensor per parameter.

    Returns:
        For each batch K cosines; None where a reward tells no two of its pictures apart, or nothing has changed.
    """
    direction = torch.cat([part.flatten() for part in change]).double()
    found = []
    with trainer.policy.averaged():
        for batch in range(BATCHES):
            chosen = torch.from_numpy(np.flatnonzero(groups % BATCHES == batch))
            gradients = _gradients(trainer, _part_of(held_out, chosen), torch.from_numpy(groups)[chosen])
            lengths = gradients.norm(dim=1) * direction.norm()
            values = -(gradients @ direction) / lengths.where(lengths > 0, 1.0)
            found.append([float(v) if n > 0 else None for v, n in zip(values, lengths, strict=True)])
    return found


def _part_of(rollout: Rollout, chosen: torch.Tensor) -> Rollout:
    indices = chosen.tolist()
    return Rollout(
        [rollout.prompts[i] for i in indices],
        rollout.latents[chosen],
        rollout.images[indices],
        rollout.rewards[:, chosen],
        {},
    )


def _gradients(trainer: Trainer, rollout: Rollout, groups: torch.Tensor) -> torch.Tensor:
    """Each reward's gradient of its loss, float64 (K, P)."""
    settings, parameters = trainer.config.loss, trainer.policy.parameters
    advantages = group_advantages(rollout.rewards, torch.unique(groups, return_inverse=True)[1])
    counts = trainer.counts(advantages)
    total = torch.zeros(len(advantages), sum(p.numel() for p in parameters), dtype=torch.float64)
    for part in trainer.parts(rollout, generator(trainer.config.seed, "probe", trainer.done)):
        constants = nft_coefficients(
            advantages[:, part.pictures], counts, beta=settings.beta, advantage_clip=settings.advantage_clip
        )
        losses = (constants * part.terms).sum((1, 2))
        for k in torch.nonzero(counts).flatten().tolist():
            gradient = torch.autograd.grad(losses[k], parameters, retain_graph=True)
            total[k] += torch.cat([g.flatten() for g in gradient]).double()
    return total
