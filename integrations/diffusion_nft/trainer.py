"""DiffusionNFT's loop: sample with `old`, score, advantages, one balanced optimizer step, let the averages follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline

from gradbalance import AffineLoss
from integrations.diffusion_nft.balancing import Method
from integrations.diffusion_nft.config import Config
from integrations.diffusion_nft.levers import Levers
from integrations.diffusion_nft.loss import nft_coefficients, nft_terms, velocity_kl
from integrations.diffusion_nft.policy import Policy
from integrations.diffusion_nft.prompt_sampler import PromptSampler, load_strata
from integrations.diffusion_nft.randomness import generator, noise
from integrations.diffusion_nft.rewards import Reward
from integrations.diffusion_nft.rewards.scaled import scaled
from integrations.diffusion_nft.rollout import Rollout, collect
from integrations.diffusion_nft.run_folder import RunFolder, load_checkpoint
from integrations.diffusion_nft.sampling import Latents


@dataclass(frozen=True)
class Part:
    """One micro-batch at one timestep.

    Attributes:
        pictures: Their indices in the rollout, shape (n,).
        terms: [P; N] with the graph, shape (2, n).
        kl: Mean KL with the graph, None if its weight is 0.
        share: Of the step's pictures and timesteps.
        last: Whether it completes the step.
    """

    pictures: torch.Tensor
    terms: torch.Tensor
    kl: torch.Tensor | None
    share: float
    last: bool


class Trainer:
    """One run's moving parts; `step()` makes one optimizer step.

    Attributes:
        done: Completed optimizer steps.
        levers: Who takes part in the next step, and how its prompts are spread.
        whole: False only while parameters change: at any other moment, `save` writes the last complete step.

    Args:
        config: The run's settings.
        pipeline: Gets the LoRA adapters.
        rewards: The rewards to train on, by name, in the config's order and in their own units.
        method: Objectives and optimizer.
        check: Called between batches; may raise to stop the run. Never called while parameters change.

    Raises:
        UserError: Prompts or LoRA targets are wrong.
    """

    def __init__(
        self,
        config: Config,
        pipeline: StableDiffusion3Pipeline,
        rewards: Mapping[str, Reward],
        method: Method,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.method = method
        self.rewards = {name: scaled(reward, config.reward_scale.get(name, 1.0)) for name, reward in rewards.items()}
        self.latents = Latents(pipeline, config.size, config.max_sequence_length)
        self._prompts = PromptSampler(
            load_strata(config.prompts.train), config.rollout.prompts, config.seed, config.prompts.shares
        )
        self.levers = Levers.start(config, self._prompts.shares)
        torch.manual_seed(config.seed)  # the adapters' initial weights
        self.policy = Policy(pipeline, config.lora, config.averages)
        self.optimizer = method.optimizer(self.policy.parameters)
        self.done = 0
        self.whole = True
        self._check = check

    def step(self) -> dict[str, Any]:
        """One rollout and one optimizer step; returns its line for metrics.jsonl."""
        rollout = self.rollout()
        start = time.perf_counter()
        record = self.learn(rollout)
        seconds = {**rollout.seconds, "train": time.perf_counter() - start}
        valid = ~rollout.rewards.isnan()
        names = list(self.rewards)
        return {
            "step": self.done,
            "rewards": dict(zip(names, rollout.rewards.nanmean(1).tolist(), strict=True)),
            "valid": dict(zip(names, valid.sum(1).tolist(), strict=True)),
            **record,
            "seconds": seconds,
            "images_per_second": len(rollout.prompts) / sum(seconds.values()),
        }

    def rollout(self) -> Rollout:
        """This step's pictures, sampled by the policy `old` without guidance."""
        settings = self.config.rollout
        allocation = self.levers.allocation
        if allocation is None:
            drawn = self._prompts.draw(self.done)
        else:
            drawn = self._prompts.draw_counts(allocation.counts(settings.prompts), allocation.drawn)
        prompts = [p for p in drawn for _ in range(settings.images_per_prompt)]
        start = noise(self.latents.shape, len(prompts), generator(self.config.seed, "rollout", self.done))
        with self.policy.sampling():
            return collect(
                self.latents,
                self.rewards,
                prompts,
                start,
                steps=settings.steps,
                sampler=settings.sampler,
                batch=settings.batch,
                check=self._check,
            )

    def learn(self, rollout: Rollout) -> dict[str, Any]:
        """One optimizer step on a rollout; returns losses, balance, norms and decays.

        Where no reward tells any two pictures apart there is nothing to learn: the step counts, and moves nothing.
        """
        if not self.counts(self._advantages(rollout)).any():
            self.levers, self.done = self.levers.after(rollout.rewards, None), self.done + 1
            nothing = self.method.nothing(self.optimizer.coefficients)
            return {**nothing, "kl": None, **self.levers.record(), "grad_norm": None, "decays": None}
        record = self.balance(rollout)
        levers = self.levers.after(rollout.rewards, self.optimizer.report)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters, self.config.optimizer.max_grad_norm)
        self.whole = False
        try:
            self.optimizer.step()
        except FloatingPointError:  # a NaN that gradbalance found before it changed anything
            self.whole = True
            raise
        self.done += 1
        self.levers = levers
        decays = self.policy.follow(self.done)
        self.whole = True
        self.optimizer.zero_grad()
        return {**record, **levers.record(), "grad_norm": float(norm), "decays": decays}

    def balance(self, rollout: Rollout) -> dict[str, Any]:
        """Leave the balanced gradient of a rollout in `.grad`; returns the losses and the balance."""
        kl = self.backward(rollout)
        report = self.optimizer.report
        assert report is not None
        return {**self.method.record(report), "kl": kl}

    def backward(self, rollout: Rollout) -> float:
        """Leave the balanced gradient of a rollout in `.grad`; returns the mean KL (0 if its weight is 0).

        All counts and means are over the whole step, so micro-batches change the memory and not the gradient.
        """
        settings = self.config.loss
        advantages = self._advantages(rollout)
        counts = self.counts(advantages)
        self._apply_levers(counts, rollout)
        total_kl = 0.0
        for part in self.parts(rollout, generator(self.config.seed, "train", self.done)):
            constants = nft_coefficients(
                advantages[:, part.pictures], counts, beta=settings.beta, advantage_clip=settings.advantage_clip
            )
            self.optimizer.backward(
                AffineLoss(part.terms, constants, names=self.method.names),
                regularizer=None if part.kl is None else settings.kl * part.share * part.kl,
                accumulate=not part.last,
            )
            total_kl += 0.0 if part.kl is None else part.share * float(part.kl.detach())
        return total_kl

    def _advantages(self, rollout: Rollout) -> torch.Tensor:
        groups = torch.arange(len(rollout.prompts)) // self.config.rollout.images_per_prompt
        return self.method.advantages(rollout.rewards, groups)

    def counts(self, advantages: torch.Tensor) -> torch.Tensor:
        """n_k, shape (K,): the terms of each objective in the whole step, over all pictures and timesteps."""
        return present_counts(advantages) * self._passes()

    def parts(self, rollout: Rollout, draw: torch.Generator) -> Iterator[Part]:
        """The forwards of a rollout, one micro-batch at one timestep after the other, in a random order."""
        count, passes = len(rollout.prompts), self._passes()
        order = torch.randperm(count, generator=draw)
        times = self._timesteps(count, draw)  # (N, T)
        batches = torch.split(order, self.config.loss.micro_batch)
        for b, batch in enumerate(batches):
            fresh = noise((passes, *self.latents.shape), len(batch), draw)
            embeddings = self.latents.embed([rollout.prompts[i].text for i in batch.tolist()])
            for j in range(passes):
                self._check()
                terms, kl = self._forward(rollout.latents[batch], times[batch, j], fresh[:, j], embeddings)
                last = b == len(batches) - 1 and j == passes - 1
                yield Part(batch, terms, kl, len(batch) / (count * passes), last)

    def _passes(self) -> int:
        """T, the timesteps that each picture is trained on."""
        settings = self.config.loss
        passes = max(1, int(settings.timestep_fraction * self.config.rollout.steps))
        return passes if settings.train_timesteps is None else min(passes, settings.train_timesteps)

    def _apply_levers(self, counts: torch.Tensor, rollout: Rollout) -> None:
        """Make absent who sits this step out, and the common part present; changes the counts in place."""
        rewards = counts[: len(self.rewards)]  # a view
        rewards[self.levers.sit_out(rewards > 0, rollout.rewards, self.done)] = 0
        if self.method.has_common and rewards.any():
            counts[-1] = len(rollout.prompts) * self._passes()

    def _timesteps(self, count: int, draw: torch.Generator) -> torch.Tensor:
        """Noise levels to train on, (N, T): each picture's own random order of the sampling levels, cut to T."""
        levels = self.latents.levels(self.config.rollout.steps)[:-1]
        orders = torch.rand(count, len(levels), generator=draw).argsort(1)[:, : self._passes()]
        return levels[orders.to(levels.device)]

    def _forward(
        self, clean: torch.Tensor, t: torch.Tensor, fresh: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The terms [P; N] and the mean KL of one micro-batch at one timestep: up to three forwards."""
        level = t.to(clean).view(-1, 1, 1, 1)
        noisy = (1 - level) * clean + level * fresh.to(clean)
        old = None
        if not self.policy.is_on_policy:
            with torch.no_grad(), self.policy.sampling():
                old = self.latents.velocity(noisy, t, embeddings)
        reference = None
        if self.config.loss.kl > 0:
            with torch.no_grad(), self.policy.base():
                reference = self.latents.velocity(noisy, t, embeddings)
        velocity = self.latents.velocity(noisy, t, embeddings)
        kl = None if reference is None else velocity_kl(velocity, reference)
        old = velocity.detach() if old is None else old
        return nft_terms(velocity, old, noisy, clean, t, self.config.loss.beta), kl

    def save(self, folder: RunFolder, seconds: float) -> Path:
        """Write a checkpoint of the last complete step."""
        return folder.save_checkpoint(
            self.done,
            self.policy.export,
            self.policy.state_dict(),
            self.optimizer.state_dict(),
            {"seconds": seconds, "objectives": self.method.names, "levers": self.levers.state_dict()},
        )

    def load(self, checkpoint: Path) -> float:
        """Go on from a checkpoint; returns the seconds the run had taken."""
        policy, optimizer, state = load_checkpoint(checkpoint)
        self.policy.load_state_dict(policy)
        self.optimizer.load_state_dict(optimizer)
        self.done = state["step"]
        self.levers = self.levers.loaded(state["levers"]) if "levers" in state else self.levers
        return float(state["seconds"])


def present_counts(advantages: torch.Tensor) -> torch.Tensor:
    """Valid pictures of each objective, 0 for an objective that says nothing in this step.

    Where all advantages are 0 (no picture spells anything, or all do) the loss only pulls towards `old`. Its gradient
    is next to nothing, and a method that normalises gradients would give this nothing a full vote: it counts as absent.

    Args:
        advantages: Shape (K, N), NaN where an objective does not apply.
    """
    valid = ~advantages.isnan()
    return valid.sum(1) * (advantages.nan_to_num(0.0) != 0).any(1)
