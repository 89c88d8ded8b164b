"""Expert iteration: the specialists' best pictures, learnt by one LoRA with plain flow matching."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.randomness import generator, noise
from integrations.diffusion_nft.rollout import Rollout
from integrations.diffusion_nft.trainer import Trainer

ROLLOUTS = 4  # of each specialist, of a training step's size
KEPT = 4  # one of so many pictures of a prompt is kept


class Distilled:
    """Trains a trainer's policy on pictures of its specialists; `step()` makes one optimizer step.

    Args:
        trainer: Gives prompts, sampler, rewards and the LoRA; its own balancing is not used.
        adapters: The specialists' LoRA weights, by reward.
    """

    def __init__(self, trainer: Trainer, adapters: Mapping[str, Path]) -> None:
        self._trainer = trainer
        untrained = trainer.policy.state_dict()
        chosen = [self._best_of(name, path) for name, path in adapters.items()]
        trainer.policy.load_state_dict(untrained)
        trainer.done = 0
        self._latents = torch.cat([latents for latents, _ in chosen])
        self._prompts = [prompt for _, prompts in chosen for prompt in prompts]
        settings = trainer.config.optimizer
        self._optimizer = torch.optim.AdamW(
            trainer.policy.parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )

    def _best_of(self, name: str, path: Path) -> tuple[torch.Tensor, list[Prompt]]:
        """Pictures of one specialist, the best of each prompt by its own reward."""
        trainer = self._trainer
        trainer.policy.load_state_dict(load_file(path))
        kept, prompts = [], []
        for trainer.done in range(ROLLOUTS):  # other prompts and noise each time
            rollout = trainer.rollout()
            best = best_pictures(rollout, list(trainer.rewards).index(name), trainer.config.rollout.images_per_prompt)
            kept.append(rollout.latents[best])
            prompts += [rollout.prompts[i] for i in best]
        return torch.cat(kept), prompts

    def step(self) -> None:
        """One step of flow matching: v towards ε − x0 at the levels that the sampler visits."""
        trainer = self._trainer
        settings = trainer.config.rollout
        draw = generator(trainer.config.seed, "distil", trainer.done)
        picked = torch.randint(len(self._prompts), (settings.prompts * settings.images_per_prompt,), generator=draw)
        levels = trainer.latents.levels(settings.steps)[:-1]
        for batch in torch.split(picked, trainer.config.loss.micro_batch):
            clean = self._latents[batch]
            fresh = noise(trainer.latents.shape, len(batch), draw).to(clean)
            t = levels[torch.randint(len(levels), (len(batch),), generator=draw)].to(clean)
            level = t.view(-1, 1, 1, 1)
            embeddings = trainer.latents.embed([self._prompts[i].text for i in batch.tolist()])
            velocity = trainer.latents.velocity((1 - level) * clean + level * fresh, t, embeddings)
            loss = (velocity - (fresh - clean)).square().mean() * (len(batch) / len(picked))
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trainer.policy.parameters, trainer.config.optimizer.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        trainer.done += 1
        trainer.policy.follow(trainer.done)


def best_pictures(rollout: Rollout, reward: int, per_prompt: int) -> list[int]:
    """Indices of each prompt's best pictures by one reward, one in `KEPT`; none where the reward does not apply."""
    best: list[int] = []
    for first in range(0, len(rollout.prompts), per_prompt):
        scores = rollout.rewards[reward, first : first + per_prompt]
        if not scores.isnan().any():
            best += (first + scores.argsort(descending=True)[: max(1, per_prompt // KEPT)]).tolist()
    return best


def adapters_of(paths: Mapping[str, Path]) -> Mapping[str, Path]:
    """The specialists' files by reward, as given.

    Raises:
        FileNotFoundError: A specialist has not been trained.
    """
    for name, path in paths.items():
        if not path.exists():
            raise FileNotFoundError(f"the specialist for {name} has left no weights ({path.name})")
    return paths
