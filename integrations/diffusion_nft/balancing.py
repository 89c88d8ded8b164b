"""The method: which objectives a set of rewards makes, and which optimizer turns their gradients into one update.

* A balancer (`marble`, `mgda`, `pcgrad`, …): one objective per reward, each with its own advantages.
* `weighted_sum`: the usual practice, one more objective with the advantages of Σ_k w_k R_k of the raw rewards. The
  update is that objective's gradient alone (λ = 1 on it, 0 elsewhere); every `measure_every`-th step also measures the
  rewards' own gradients, so that its conflicts can be compared. That costs K extra reverse passes on those steps.
* `gdpo`: the same with one difference, the sum is that of the rewards' advantages: normalise each, then sum.

With `loss.signal_gradients` one more objective, the last, is the part that all rewards share: the loss at r = ½.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch

from gradbalance import BalancedOptimizer, BalanceReport, MarbleOptimizer, balancers, estimators
from integrations.diffusion_nft.advantages import group_advantages, summed_advantages, weighted_sum
from integrations.diffusion_nft.config import Config, UserError, check_rewards
from integrations.diffusion_nft.named_options import all_groups, resolve

WEIGHTED_SUM, GDPO = "weighted_sum", "gdpo"
SUMS = (WEIGHTED_SUM, GDPO)  # methods with one objective for all rewards
COMMON = "common"  # the objective of `loss.signal_gradients`
MARBLE_EMA_DECAY = 0.7  # `MarbleOptimizer`'s own, for a Marble that is wrapped
CONFLICT = -1e-6  # a cosine below this counts as a conflict; above it, it is rounding


class Method:
    """A config's method.

    Args:
        config: `method`, `balance`, `weighted_sum` and `rewards` are read.

    Raises:
        UserError: The method is unknown, or an option is wrong or does not fit the number of rewards.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.rewards = list(config.rewards)
        self.is_sum = config.method in SUMS
        self.has_common = config.loss.signal_gradients
        extra = [config.method] if self.is_sum else [COMMON] if self.has_common else []
        self.names = [*self.rewards, *extra]
        check_rewards("caps", config.caps, self.rewards)
        self._groups = all_groups(config.reward_groups, self.rewards)
        count = len(self.rewards)
        weights = config.weighted_sum.weights
        if config.method == WEIGHTED_SUM and weights is not None and len(weights) != count:
            raise UserError(
                f"weighted_sum.weights={weights} has {len(weights)} values for {count} rewards "
                f"({', '.join(self.rewards)})"
            )
        self._weights = torch.tensor([1.0] * count if weights is None else weights, dtype=torch.float64)
        self._balancer = self._build_balancer()
        try:
            self.optimizer([torch.nn.Parameter(torch.zeros(1))])
        except ValueError as error:
            raise UserError(f"method {config.method}: {' '.join(str(error).split())}") from None

    def _build_balancer(self) -> balancers.Balancer:
        method, options = self._config.method, dict(self._config.balance.options)
        known = sorted({*balancers.available(), *SUMS})
        if method not in known:
            close = difflib.get_close_matches(method, known, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise UserError(f"unknown method {method!r}{hint} (known: {', '.join(known)})")
        if self.is_sum:
            self._refuse_levers()
            if options:
                hint = "; set weighted_sum.weights" if method == WEIGHTED_SUM else ""
                raise UserError(f"balance.options={options}: {method} takes none{hint}")
            return balancers.get(WEIGHTED_SUM, weights=[0.0] * len(self.rewards) + [1.0])
        try:
            self._options = resolve(method, options, self._groups)
            balancer = self._wrapped()
            balancer.coefficients(torch.eye(len(self.names), dtype=torch.float64), torch.ones(len(self.names)))
        except UserError:
            raise
        except (ValueError, TypeError) as error:
            given = f"method {method} with balance.options={options} and {len(self.names)} rewards"
            raise UserError(f"{given}: {' '.join(str(error).split())}") from None
        # A fresh one: some balancers count their calls or draw from a generator.
        return self._wrapped()

    def _wrapped(self) -> balancers.Balancer:
        """The balancer, around it the groups, around these the common part."""
        balancer = balancers.get(self._config.method, **self._options)
        if self._config.reward_groups:
            members = [[self.rewards.index(name) for name in group] for group in self._groups]
            balancer = balancers.Grouped(balancer, members)
        return balancers.CommonPart(balancer) if self.has_common else balancer

    def _refuse_levers(self) -> None:
        """Raise if a setting would change what the comparison method is."""
        config = self._config
        levers = {
            "loss.signal_gradients": config.loss.signal_gradients,
            "balance.uniform_after": config.balance.uniform_after is not None,
            "caps": config.caps,
            "reward_dropout": config.reward_dropout,
            "reward_groups": config.reward_groups,
        }
        for key, is_set in levers.items():
            if is_set:
                raise UserError(f"{key} is a lever of balancing methods; method {config.method} has no use for it")

    def _estimator(self) -> estimators.GramianEstimator:
        name, options = self._config.balance.gramian_estimator, self._config.balance.estimator_options
        try:
            estimator = estimators.get(name, **options)
        except (ValueError, TypeError) as error:
            raise UserError(f"balance.estimator_options={options}: {' '.join(str(error).split())}") from None
        rollout, size = self._config.rollout, self._config.loss.micro_batch
        pictures = rollout.prompts * rollout.images_per_prompt
        if -(-pictures // size) < estimator.least_micro_batches:
            raise UserError(
                f"balance.gramian_estimator={name} compares micro-batches, but loss.micro_batch={size} puts all "
                f"{pictures} pictures of a step into one: choose a smaller one, or gramian_estimator=history"
            )
        return estimator

    def optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> BalancedOptimizer:
        """AdamW on the parameters, balanced by the method."""
        settings, balance = self._config.optimizer, self._config.balance
        adamw = torch.optim.AdamW(
            parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
        )
        options: dict[str, Any] = {
            "objective_names": self.names,
            "shared_parameters": parameters,  # all of them, also in a step that only one objective is part of
            "refresh_every": self._config.weighted_sum.measure_every if self.is_sum else balance.refresh_every,
            "refresh_micro_batches": balance.refresh_micro_batches,
            "gramian_estimator": self._estimator(),
        }
        if balance.ema_decay is not None and not self.is_sum:
            options["ema_decay"] = balance.ema_decay
        if balance.uniform_after is not None:
            options["uniform_after"] = balance.uniform_after
        if isinstance(self._balancer, balancers.Marble):
            return MarbleOptimizer(adamw, **self._options, **options)
        if self._config.method == "marble":
            options.setdefault("ema_decay", MARBLE_EMA_DECAY)
        return BalancedOptimizer(adamw, self._balancer, **options)

    def advantages(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Advantages of every objective, (len(names), N), from rewards (K, N); NaN where one does not apply."""
        advantages = group_advantages(rewards, groups)
        if self.has_common:  # no picture is better than another: r = ½
            return torch.cat([advantages, torch.zeros_like(advantages[:1])])
        if not self.is_sum:
            return advantages
        if self._config.method == GDPO:
            return torch.cat([advantages, summed_advantages(advantages).unsqueeze(0)])
        summed = weighted_sum(rewards, self._weights).unsqueeze(0)
        return torch.cat([advantages, group_advantages(summed, groups)])

    def nothing(self, coefficients: torch.Tensor) -> dict[str, Any]:
        """The balance of a step with nothing to learn: the coefficients in use, if there are any yet."""
        known = coefficients.tolist() or [None] * len(self.names)
        unmeasured = ("losses", "weights", "signal_to_noise", "gradient_norms", "cosines", "update_cosines")
        return {
            "coefficients": dict(zip(self.names, known, strict=True)),
            "refreshed": False,
            **dict.fromkeys((*unmeasured, "min_cosine", "conflicts")),
        }

    def record(self, report: BalanceReport) -> dict[str, Any]:
        """A step's balance for metrics.jsonl; what was not measured in this step is null."""
        count, measured = len(self.rewards), report.refreshed
        estimated = self._config.balance.gramian_estimator != "plain"
        cosines = report.update_cosines[:count]

        def by_name(values: torch.Tensor) -> dict[str, float]:
            return dict(zip(self.names, values.tolist(), strict=True))

        return {
            "losses": by_name(report.losses),
            "coefficients": by_name(report.coefficients),
            "weights": by_name(report.weights),
            "refreshed": measured,
            "micro_batches": report.micro_batches if measured else None,
            "signal_to_noise": by_name(report.signal_to_noise) if measured and estimated else None,
            "gradient_norms": by_name(report.gradient_norms) if measured else None,
            "cosines": report.cosines[:count, :count].tolist() if measured else None,
            "update_cosines": dict(zip(self.rewards, cosines.tolist(), strict=True)) if measured else None,
            "min_cosine": float(torch.nan_to_num(cosines, nan=1.0).min()) if measured else None,
            "conflicts": int((cosines < CONFLICT).sum()) if measured else None,
        }
