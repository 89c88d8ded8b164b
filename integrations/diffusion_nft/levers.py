"""The levers that remember: which rewards sit a step out (caps, dropout), and which prompts the next step draws.

Nothing changes in place: `after` gives the levers as they are one step later, so that a step that fails leaves no mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradbalance import BalanceReport
from integrations.diffusion_nft.allocation import Allocation
from integrations.diffusion_nft.caps import Caps
from integrations.diffusion_nft.config import Config, RunError
from integrations.diffusion_nft.dropout import dropped
from integrations.diffusion_nft.randomness import generator


@dataclass(frozen=True)
class Levers:
    """A config's levers before a step.

    Attributes:
        config: The run's settings.
        caps: Which rewards are good enough.
        allocation: How the step's prompts are spread over the strata; None: by fixed shares.
    """

    config: Config
    caps: Caps
    allocation: Allocation | None

    @classmethod
    def start(cls, config: Config, shares: Sequence[float]) -> Levers:
        """Before the first step.

        Args:
            config: The run's settings.
            shares: Each stratum's fixed share of the prompts.
        """
        by_signal = config.allocate_prompts == "signal"
        allocation = Allocation.start(shares, len(config.rewards)) if by_signal else None
        return cls(config, Caps(config.caps), allocation)

    def sit_out(self, present: torch.Tensor, rewards: torch.Tensor, step: int) -> torch.Tensor:
        """Which of the present rewards are absent from a step, bool (K,).

        Args:
            present: Which have something to say in it, bool (K,).
            rewards: Its pictures' rewards, (K, N), NaN where one does not apply.
            step: Its number.
        """
        satisfied = self._caps_after(rewards).satisfied
        out = present & torch.tensor([name in satisfied for name in self.config.rewards])
        draw = generator(self.config.seed, "reward dropout", step)
        return out | dropped(present & ~out, self.config.reward_dropout, draw)

    def after(self, rewards: torch.Tensor, report: BalanceReport | None) -> Levers:
        """The levers one step later.

        Args:
            rewards: The step's pictures' rewards, (K, N), prompt by prompt; NaN where one does not apply.
            report: The step's; None from a trainer that does not balance.

        Raises:
            RunError: The optimizer's estimator of the Gramian does not tell signal from noise.
        """
        caps = self._caps_after(rewards)
        if self.allocation is None:
            return replace(self, caps=caps)
        signal = None
        if report is not None and report.refreshed:
            signal = report.signal_to_noise[: len(rewards)].clone()
            if bool(signal.isnan().all()):
                raise RunError(
                    "allocate_prompts=signal needs a gramian_estimator that tells signal from noise, such as split"
                )
            signal[torch.tensor([name in caps.satisfied for name in self.config.rewards])] = torch.inf
        prompts = self.config.rollout.prompts
        valid = ~rewards.isnan().view(len(rewards), prompts, -1).all(2)
        return replace(self, caps=caps, allocation=self.allocation.after(prompts, valid, signal))

    def record(self) -> dict[str, Any]:
        """What a step's line of metrics.jsonl says about the levers that are set."""
        record: dict[str, Any] = {}
        if self.config.caps:
            record["satisfied"] = sorted(self.caps.satisfied)
        if self.allocation is not None:
            record["prompt_shares"] = self.allocation.shares
        return record

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs, for JSON."""
        allocation = None if self.allocation is None else self.allocation.state_dict()
        return {"caps": self.caps.state_dict(), "allocation": allocation}

    def loaded(self, state: Mapping[str, Any]) -> Levers:
        """These levers with the state that `state_dict` returned; without an allocation in it, that begins anew."""
        saved = state["allocation"]
        allocation = self.allocation if self.allocation is None or saved is None else Allocation.loaded(saved)
        return replace(self, caps=self.caps.loaded(state["caps"]), allocation=allocation)

    def _caps_after(self, rewards: torch.Tensor) -> Caps:
        return self.caps.after(dict(zip(self.config.rewards, rewards.nanmean(1).tolist(), strict=True)))
