"""The optimizer step under way, from its first ``backward`` to ``step``: gather, solve, write the one gradient.

Nothing here changes what the optimizer has committed. A window holds the micro-batches' K gradients while a refresh
gathers them and the state that ``step`` will commit; dropping the window drops the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradbalance.balancers import Balancer
from gradbalance.coefficients import solve
from gradbalance.gradients import ObjectiveGradients, accumulate_pass, reverse_pass
from gradbalance.objectives import Objectives
from gradbalance.report import BalanceReport
from gradbalance.state import BalanceState


class NonFiniteError(FloatingPointError):
    """A loss or gradient was NaN or infinite; the message names the objective."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"the loss or gradient of {', '.join(map(repr, names))} is NaN or infinite; no parameter was changed. With "
            'mixed precision use nonfinite="skip", which drops the step'
        )


class Window:
    """One optimizer step.

    Args:
        state: The committed state, with its objectives named and an entry in ``reach`` for each parameter.
        parameters: All parameters of the optimizer, in order.
        shared_of: For a state, which of the parameters are balanced.
        refresh: Whether the step measures the gradients and solves; else it uses the state's coefficients.

    Attributes:
        state: What ``step`` is to commit.
        open: Whether more micro-batches are to come.
        nonfinite: Names of the objectives found NaN or infinite.
    """

    def __init__(
        self,
        state: BalanceState,
        parameters: Sequence[Tensor],
        shared_of: Callable[[BalanceState], list[bool]],
        *,
        refresh: bool,
    ) -> None:
        self.state = state
        self.refresh = refresh
        self.open = True
        self.nonfinite: list[str] = []
        self._parameters = parameters
        self._shared_of = shared_of
        self._gradients = ObjectiveGradients(len(state.names), parameters) if refresh else None
        self._present = [False] * len(state.names)
        self._values: Tensor | None = None
        self._regularizer: Tensor | None = None
        self._regularizer_norms: list[Tensor] = []
        self._checked = False
        self._micro_batches = 0

    def add(self, given: Objectives, regularizer: Tensor | None, *, last: bool, limit: int | None) -> bool:
        """The reverse passes of one micro-batch.

        Args:
            given: Its objectives.
            regularizer: Its unbalanced loss.
            last: No more micro-batches follow.
            limit: How many micro-batches a refresh measures; None: all.

        Returns:
            Whether all that is to be measured has been, so that it is time to :meth:`solve`.
        """
        self.open = not last
        self._present = [a or b for a, b in zip(self._present, given.present, strict=True)]
        self._values = given.values if self._values is None else self._values + given.values.to(self._values.device)
        self._checked = False
        if regularizer is not None:
            value = regularizer.detach().reshape(())
            self._regularizer = value if self._regularizer is None else self._regularizer + value
        if self._gradients is None:
            self.weighted_pass(given, regularizer)
            return False
        self._micro_batches += 1
        # An objective that no solve has seen would have no coefficient after this one: wait for it.
        known = all(here or known for here, known in zip(self._present, self.state.solved, strict=True))
        enough = last or (limit is not None and self._micro_batches >= limit and known)
        trainable = [p for p in self._parameters if p.requires_grad]
        active = [k for k, wanted in enumerate(given.active) if wanted]
        if regularizer is not None and regularizer.requires_grad:
            accumulate_pass([regularizer], [torch.ones_like(regularizer)], trainable, retain_graph=bool(active))
            self._regularizer_norms += [p.grad.norm() for p in trainable if p.grad is not None]
        for k in active:
            # The graph serves K passes and is freed by the last.
            gradients = reverse_pass(*given.single(k), trainable, retain_graph=k != active[-1])
            self._gradients.add(k, gradients, more=not enough)
        return enough

    def weighted_pass(self, given: Objectives, regularizer: Tensor | None = None) -> None:
        """One plain backward of Σ_k λ_k L_k + regularizer over the shared parameters, Σ_k L_k over the heads."""
        shared = self._shared_of(self.state)
        trunk = [p for p, s in zip(self._parameters, shared, strict=True) if s and p.requires_grad]
        heads = [p for p, s in zip(self._parameters, shared, strict=True) if not s and p.requires_grad]
        for inputs, weights, retain in (
            (heads, [1.0] * len(given.names), bool(trunk)),
            (trunk, self.state.coefficients, False),
        ):
            outputs, cotangents = given.products(weights)
            if regularizer is not None and regularizer.requires_grad:
                outputs, cotangents = [*outputs, regularizer], [*cotangents, torch.ones_like(regularizer)]
            # The pass over the heads stops at their inputs: it repeats no work of the trunk's.
            accumulate_pass(outputs, cotangents, inputs, retain_graph=retain)

    def solve(self, balancer: Balancer, ema_decay: float) -> None:
        """End the measuring: Gramian and coefficients. If something is not finite, ``nonfinite`` names it."""
        gradients, state = self._gradients, self.state
        assert gradients is not None
        before = self._shared_of(state)
        state = replace(state, reach=self._reach(state, gradients.reached()))
        shared = self._shared_of(state)
        if shared != before:
            # Norms measured over other parameters say nothing about these.
            state = replace(state, solved=[False] * len(state.names))
        gramian = gradients.gramian(shared)
        self.check(gramian.diagonal() + gradients.extra_norms(shared))
        if not self.nonfinite:
            losses = self._loss_values()
            state = solve(state, balancer, gramian, present=self._present, losses=losses, ema_decay=ema_decay)
        self.state = state

    def write(self) -> None:
        """Add the balanced gradient to ``.grad``, and let go of the K gradients.

        One that is not finite is written as it is, so that a GradScaler sees it and backs off.
        """
        gradients, self._gradients = self._gradients, None
        assert gradients is not None
        gradients.write(self.state.coefficients, self._shared_of(self.state))

    def _reach(self, state: BalanceState, reached: Sequence[Sequence[bool]]) -> list[int]:
        """The objectives that reach each parameter, as far as known; of frozen parameters nothing is learned."""
        masks = [sum(1 << k for k, hit in enumerate(hits) if hit) for hits in reached]
        return [
            max(old, 0) | new if parameter.requires_grad else old
            for parameter, old, new in zip(self._parameters, state.reach, masks, strict=True)
        ]

    def check(self, measured: Tensor | None = None) -> list[str]:
        """Names of what is not finite, by one look at the losses since the last check.

        Args:
            measured: K numbers that are not finite where an objective's gradient is not.
        """
        if self._checked or self.nonfinite or self._values is None:
            return self.nonfinite
        self._checked = True
        finite = self._loss_values().isfinite() | ~torch.tensor(self._present)
        if measured is not None:
            finite &= measured.isfinite()
        self.nonfinite = [name for name, ok in zip(self.state.names, finite.tolist(), strict=True) if not ok]
        if self._regularizer is not None:
            parts = [self._regularizer, *self._regularizer_norms]
            if not bool(torch.stack([part.to("cpu", torch.float64) for part in parts]).isfinite().all()):
                self.nonfinite.append("regularizer")
        return self.nonfinite

    def report(self) -> BalanceReport:
        """What the completed step did."""
        assert self._values is not None
        return BalanceReport(
            self.state, self._values, present=self._present, refreshed=self.refresh, skipped=list(self.nonfinite)
        )

    def _loss_values(self) -> Tensor:
        """The K losses on the CPU, float64, NaN where absent."""
        assert self._values is not None
        return torch.where(torch.tensor(self._present), self._values.to("cpu", torch.float64), torch.nan)
