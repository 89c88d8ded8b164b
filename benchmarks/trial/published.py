r"""MARBLE as its published code does it, with the four faults that this library does not have.

Every `EVERY` steps one micro-batch measures the K gradients and solves for α* on their unit vectors; all else follows a
single loss of the blended advantage Ā = Σ_k ᾱ_k A_k with ᾱ ← ρ ᾱ + (1−ρ) α*.

1. ᾱ was solved for unit gradients, but weighs raw ones: the advantages' losses.
2. Ā is clamped after it was averaged, which is no average of the clamped ones.
3. A reward that does not apply has advantage 0, and a loss is divided by the whole micro-batch.
4. The measured micro-batch steps along n̄ Σ_k α*_k g_k/‖g_k‖, all others of the step along the loss of Ā.

Its solver (SLSQP) is replaced by the exact one, which the fault-free part of a comparison should not depend on.
"""

from __future__ import annotations

from typing import Any

import torch

from gradbalance.solvers import min_norm
from integrations.diffusion_nft.advantages import group_advantages
from integrations.diffusion_nft.randomness import generator
from integrations.diffusion_nft.rollout import Rollout
from integrations.diffusion_nft.trainer import Trainer

EVERY, DECAY = 10, 0.7


def blended_loss(
    terms: torch.Tensor, alpha: torch.Tensor, advantages: torch.Tensor, beta: float, clip: float
) -> torch.Tensor:
    """(A_max/β) mean_i [r P_i + (1−r) N_i] with r of Σ_k α_k A_k: faults 1, 2 and 3.

    Args:
        terms: [P; N], shape (2, n).
        alpha: Shape (K,).
        advantages: Shape (K, n), NaN where a reward does not apply.
        beta: β.
        clip: A_max.
    """
    blended = alpha.to(advantages) @ advantages.nan_to_num(0.0)
    r = 0.5 + blended.clamp(-clip, clip) / (2 * clip)
    return clip / beta * (r * terms[0] + (1 - r) * terms[1]).mean()


def harmonised(gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """α* (K,) and the direction n̄ Σ_k α*_k g_k/‖g_k‖ (P,) of gradients (K, P); a zero gradient has no part in it."""
    norms = gradients.double().norm(dim=1)
    unit = gradients.double() / norms.where(norms > 0, 1.0).unsqueeze(1)
    alpha = min_norm(unit @ unit.T)
    return alpha, norms.mean() * (alpha @ unit)


class PublishedMarble(Trainer):
    """The trainer with the published balance; everything else is the same."""

    _average: torch.Tensor | None = None

    def balance(self, rollout: Rollout) -> dict[str, Any]:
        """Leave the step's gradient in `.grad`: the mean over its micro-batches."""
        groups = torch.arange(len(rollout.prompts)) // self.config.rollout.images_per_prompt
        advantages = group_advantages(rollout.rewards, groups)
        parameters = self.policy.parameters
        measures = self.done % EVERY == 0
        for part in self.parts(rollout, generator(self.config.seed, "train", self.done)):
            mine = advantages[:, part.pictures]
            if measures:
                gradient = self._refresh(part.terms, mine)
            else:
                assert self._average is not None
                gradient = _flat_gradient(self._loss(part.terms, self._average, mine), parameters)
            measures = False
            _add(gradient * part.share, parameters)
        assert self._average is not None
        return {"coefficients": dict(zip(self.method.names, self._average.tolist(), strict=True))}

    def _refresh(self, terms: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Fault 4: the gradient of the measured micro-batch is α*'s, that of the others ᾱ's."""
        one_each = torch.eye(len(advantages), dtype=torch.float64)
        gradients = torch.stack(
            [_flat_gradient(self._loss(terms, one, advantages), self.policy.parameters, keep=True) for one in one_each]
        )
        alpha, direction = harmonised(gradients)
        self._average = alpha if self._average is None else DECAY * self._average + (1 - DECAY) * alpha
        return direction

    def _loss(self, terms: torch.Tensor, alpha: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        settings = self.config.loss
        return blended_loss(terms, alpha, advantages, settings.beta, settings.advantage_clip)


def _flat_gradient(loss: torch.Tensor, parameters: list[torch.nn.Parameter], *, keep: bool = False) -> torch.Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters, retain_graph=keep)])


def _add(gradient: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    """Add a flat gradient to `.grad`."""
    parts = torch.split(gradient, [parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        added = part.view_as(parameter).to(parameter)
        parameter.grad = added if parameter.grad is None else parameter.grad + added
