"""The optimizer step under way, from its first ``backward`` to ``step``: gather, solve, write the one gradient.

Nothing here changes what the optimizer has committed. A window holds what a refresh measures and the state that
``step`` will commit; dropping the window drops the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import isfinite

import torch
from torch import Tensor

from gradbalance.balancers import Balancer
from gradbalance.coefficients import follow, measured, solve
from gradbalance.devices import together
from gradbalance.estimators import GramianEstimator
from gradbalance.estimators.base import in_blocks, total
from gradbalance.matching import match
from gradbalance.measurement import Measurement
from gradbalance.micro_batches import needed
from gradbalance.objectives import Objectives
from gradbalance.ranks import Ranks
from gradbalance.reduction import average_grads
from gradbalance.report import BalanceReport
from gradbalance.state import BalanceState
from gradbalance.watch import Watch
from gradbalance.weighted import complete, take_back, weighted_passes


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
        ranks: The processes that train together.
        refresh: Whether the step measures the gradients and solves; else it uses the state's coefficients.
        look: Whether it measures only to see who reaches what, and solves only if that has changed.
        parts: In how many parts a refresh keeps the micro-batches' gradients.
        past: K rows of averages of past gradients, for an estimator that compares a refresh's gradients with them.

    Attributes:
        state: What ``step`` is to commit.
        open: Whether more micro-batches are to come.
        nonfinite: Names of what was found NaN or infinite.
        newest: The weight of each objective's gradient in the new average of its past ones; None if there is none.
        gradients: The K gradients that go into these averages, one entry a parameter, over the shared ones.
    """

    def __init__(
        self,
        state: BalanceState,
        parameters: Sequence[Tensor],
        shared_of: Callable[[BalanceState], list[bool]],
        ranks: Ranks,
        *,
        refresh: bool,
        look: bool = False,
        parts: int = 1,
        past: Sequence[Sequence[Tensor | None]] = (),
    ) -> None:
        self.state = state
        self.refresh = refresh
        self._look = look
        self.open = True
        self.nonfinite: list[str] = []
        self._parameters = parameters
        self._trainable = [p for p in parameters if p.requires_grad]
        self._shared_of = shared_of
        self._ranks = ranks
        self.newest: list[float] | None = None
        self.gradients: list[list[Tensor | None]] = []
        self._measurement = Measurement(state.names, parameters, ranks, parts=parts, past=past) if refresh else None
        self._micro_batches = 0
        self._presence: Tensor
        self._values: Tensor
        self._regularizer: Tensor | None
        self._forget()
        self._mask = 0
        self._lent: list[int] = []
        self._losses_to_come = False
        self._watch: Watch | None = None

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
        self._micro_batches += 1
        self._note(given, regularizer)
        if self._measurement is None:
            if self._ranks.sharded:
                match(given, self._ranks, self._parameters[0].device)
            shared = self._shared_of(self.state)
            lent = weighted_passes(given, regularizer, self.state, self._parameters, shared, self._ranks, self._lent)
            # Of those that no objective ever reaches nothing more need be known; of the others once the step is made.
            self._lent = take_back(lent, self._parameters, self.state.reach, mask=-1)
            if last:
                self._finish()
            return False
        self._measurement.add(given, regularizer)
        enough = last or (limit is not None and self._micro_batches >= limit)
        return enough and self._measurement.ready(self._presence, self.state.solved, last=last)

    def refuse_new(self, parameters: Sequence[Tensor]) -> None:
        """Raise if there are parameters that this step does not know."""
        known = {id(p) for p in self._trainable}
        if any(p.requires_grad and id(p) not in known for p in parameters):
            raise RuntimeError(
                "backward: parameters were added or unfrozen between the micro-batches of one step; do it after "
                "step(), or call zero_grad() and begin the step anew"
            )

    def evaluate_again(self, given: Objectives, regularizer: Tensor | None, *, last: bool) -> None:
        """One more evaluation of the step at other parameter values, with the coefficients as they are."""
        if not self.open:
            self._forget()
        self.add(given, regularizer, last=last, limit=None)

    def solve(self, balancer: Balancer, estimator: GramianEstimator, ema_decay: float, *, choose: bool) -> None:
        """End the measuring: Gramian and coefficients. If something is not finite, ``nonfinite`` names it.

        Args:
            balancer: Makes the coefficients of what the estimator makes of the Gramian.
            estimator: Loaded with the state's estimates here.
            ema_decay: ρ of the moving average of the coefficients.
            choose: Whether to choose from the noise how many micro-batches the next refresh measures.
        """
        measurement, state = self._measurement, self.state
        assert measurement is not None
        before = self._shared_of(state)
        zeros = measurement.zeros if any(measurement.zeros) else []
        doubtful = any(new & ~old for new, old in zip_longest(zeros, state.zeros, fillvalue=0))
        reach = self._reach(state, measurement.reached[:-1])
        state = replace(state, reach=reach, zeros=zeros, doubtful=doubtful)
        shared = self._shared_of(state)
        if shared != before:
            # What was measured over other parameters says nothing about these.
            estimates = estimator.fresh().state_dict()
            state = replace(state, solved=[False] * len(state.names), estimates=estimates)
        numbers = measurement.numbers(shared, self._values, self._regularizer)
        products, counts, squares, losses, regularizer, micro_batches = numbers
        count = float(micro_batches)
        gramian = torch.from_numpy(total(in_blocks(products.numpy(), len(state.names)), estimator.parts))
        finite = gramian.diagonal().isfinite() & squares[:-1].isfinite() & losses.isfinite()
        checked = zip(state.names, measurement.present, finite.tolist(), strict=True)
        self.nonfinite += [name for name, here, ok in checked if here and not ok]
        if not isfinite(squares[-1].tolist() + regularizer.tolist()[0]):
            self.nonfinite.append("regularizer")
        self._presence, self._values = torch.tensor(measurement.present), losses
        if self._look and shared == before:
            self.refresh = False
        elif not self.nonfinite and not bool((gramian.diagonal() > 0).any()):
            state = measured(state, gramian, measurement.present)  # no gradient is left: there is nothing to solve
        elif not self.nonfinite and self.open and not balancer.uses_gradients:
            self._losses_to_come = True  # some of them, and a method that lives on losses must see whole sums
            state = measured(state, gramian, measurement.present)
        elif not self.nonfinite:
            estimator.load_state_dict(state.estimates)
            most = max(state.most, count) if choose else 0.0
            estimate = estimator.estimate(products.numpy(), counts.numpy(), count / most if choose else 1.0)
            wanted = needed(estimate, most, estimator.least_micro_batches) if choose else 0
            state = replace(state, estimates=estimator.state_dict(), most=most, wanted=wanted)
            losses = torch.where(self._presence, losses, torch.nan)
            present = measurement.present
            state = solve(state, balancer, gramian, estimate, present=present, losses=losses, ema_decay=ema_decay)
            if estimate.newest is not None:
                self.newest = estimate.newest.tolist()
                self.gradients = measurement.kept(shared)
        self.state = replace(state, measured=count) if self.refresh else state

    def write(self) -> None:
        """Add the balanced gradient to ``.grad``, and let go of the K gradients.

        One that is not finite is written as it is, so that a GradScaler sees it and backs off.
        """
        measurement, self._measurement = self._measurement, None
        assert measurement is not None
        measurement.write(self.state.coefficients, self._shared_of(self.state))
        if not self.open and self._ranks.size > 1:
            lent = complete(measurement.touched, self._parameters, self._ranks)
            mask = sum(1 << k for k, here in enumerate(measurement.present) if here)
            self._lent += take_back(lent, self._parameters, self.state.reach, mask)
            self._finish()

    def check(self) -> list[str]:
        """Names of what is not finite on any rank. Steps that were not measured to their end are looked at here.

        Raises:
            RuntimeError: If the ranks' gradients differ.
        """
        if self._watch is None:
            return self.nonfinite
        watch, self._watch = self._watch, None
        names = [*self.state.names, "regularizer"]
        seen = watch.read()
        take_back(self._lent, self._parameters, self.state.reach, seen.mask)
        self.nonfinite += [name for name, bad in zip(names, seen.bad, strict=True) if bad]
        if seen.gradient and not self.nonfinite:
            # One backward gave one gradient: any of them may be the culprit.
            there = [*self._presence.tolist(), self._regularizer is not None]
            self.nonfinite += [name for name, here in zip(names, there, strict=True) if here]
        self._presence, self._values = ~seen.losses.isnan(), seen.losses.nan_to_num()
        return self.nonfinite

    def following(self, balancer: Balancer, ema_decay: float) -> BalanceState:
        """What to commit of a step that is found finite: the state that the next step goes on from.

        A balancer that looks at losses alone learns from every step's: now, if the solve has not seen all of them.
        """
        state = self.state
        if not balancer.uses_gradients and (not self.refresh or self._losses_to_come):
            losses = torch.where(self._presence, self._values, torch.nan)
            state = follow(state, balancer, losses=losses, ema_decay=ema_decay)
        return replace(state, step=state.step + 1)

    def objective(self) -> Tensor:
        """Σ_k λ_k L_k + regularizer, averaged over the ranks: what an inner optimizer with a line search minimises."""
        value = self._values @ self._values.new_tensor(self.state.coefficients)
        if self._regularizer is not None:
            value = value + self._regularizer.to(value)
        return self._ranks.total(value) / self._ranks.size

    def report(self) -> BalanceReport:
        """What the step did so far."""
        return BalanceReport(
            self.state, self._values, presence=self._presence, refreshed=self.refresh, skipped=self.nonfinite
        )

    def _forget(self) -> None:
        """Start to add up the losses."""
        self._presence = torch.zeros(len(self.state.names), dtype=torch.bool)
        self._values = torch.zeros(len(self.state.names), device=self._parameters[0].device)
        self._regularizer = None

    def _note(self, given: Objectives, regularizer: Tensor | None) -> None:
        """Add up the micro-batches' losses."""
        self._presence = torch.logical_or(*together(self._presence, given.presence))
        self._values = torch.add(*together(self._values, given.values))
        self._mask |= given.mask
        if regularizer is not None:
            value = regularizer.detach().reshape(())
            self._regularizer = value if self._regularizer is None else self._regularizer + value

    def _finish(self) -> None:
        """After the last pass: average what no wrapper has averaged, and queue a look at the result."""
        if self._ranks.size > 1:
            pairs = enumerate(zip(self._parameters, self._ranks.synced, strict=True))
            unsynced = [i for i, (p, synced) in pairs if p.requires_grad and not synced]
            average_grads(unsynced, self._parameters, self._ranks)
        self._watch = Watch(self._values, self._presence, self._mask, self._regularizer, self._parameters, self._ranks)

    def _reach(self, state: BalanceState, reached: Sequence[Sequence[int]]) -> list[int]:
        """The objectives that reach each parameter, as far as known; of frozen parameters nothing is learned."""
        masks = [sum(1 << k for k, hit in enumerate(hits) if hit) for hits in zip(*reached, strict=True)]
        return [
            max(old, 0) | new if parameter.requires_grad else old
            for parameter, old, new in zip(self._parameters, state.reach, masks, strict=True)
        ]
