"""The optimizer step under way, from its first ``backward`` to ``step``: gather, solve, write the one gradient.

Nothing here changes what the optimizer has committed. A window holds the micro-batches' K gradients while a refresh
gathers them and the state that ``step`` will commit; dropping the window drops the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor
from torch import distributed as dist

from gradbalance.balancers import Balancer
from gradbalance.coefficients import solve
from gradbalance.compiled import Saved
from gradbalance.gradients import ObjectiveGradients
from gradbalance.matching import Pass, matched_passes
from gradbalance.objectives import Objectives
from gradbalance.passes import accumulate_pass, reverse_pass, walk
from gradbalance.ranks import Ranks, is_dtensor, local
from gradbalance.reduction import average_grads, mean_gramian
from gradbalance.report import BalanceReport
from gradbalance.state import BalanceState

# How far apart the ranks' gradients may be, relatively, and still be the same: rounding, not another batch.
_SAME = 1e-4


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

    Attributes:
        state: What ``step`` is to commit.
        open: Whether more micro-batches are to come.
        nonfinite: Names of what was found NaN or infinite.
    """

    def __init__(
        self,
        state: BalanceState,
        parameters: Sequence[Tensor],
        shared_of: Callable[[BalanceState], list[bool]],
        ranks: Ranks,
        *,
        refresh: bool,
    ) -> None:
        self.state = replace(state, reentrant=False, compiled=False) if refresh else state
        self.refresh = refresh
        self.open = True
        self.nonfinite: list[str] = []
        self._parameters = parameters
        self._device = parameters[0].device
        self._shared_of = shared_of
        self._ranks = ranks
        # One row an objective, and one for the regularizer.
        self._gradients = ObjectiveGradients(len(state.names) + 1, parameters) if refresh else None
        self._blurred = False
        self._micro_batches = 0
        self._presence: Tensor | None = None
        self._values: Tensor | None = None
        self._regularizer: Tensor | None = None
        self._agreed: tuple[list[bool], list[list[int]]] | None = None
        self._touched: set[int] = set()
        self._watched: tuple[Tensor, Tensor, dist.Work | None] | None = None

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
        if self._presence is None or self._values is None:
            self._presence, self._values = given.presence, given.values
        else:
            self._presence = torch.logical_or(*_together(self._presence, given.presence))
            self._values = torch.add(*_together(self._values, given.values))
        if regularizer is not None:
            value = regularizer.detach().reshape(())
            self._regularizer = value if self._regularizer is None else self._regularizer + value
        if self._gradients is None:
            self._weighted_passes(given, regularizer)
            if last:
                self._average_unsynced()
                self._watch()
            return False
        self._micro_batches += 1
        self._measuring_passes(given, regularizer, self._gradients)
        return (last or (limit is not None and self._micro_batches >= limit)) and self._all_ready(self._gradients, last)

    def evaluate_again(self, given: Objectives, regularizer: Tensor | None, *, last: bool) -> None:
        """One more evaluation of the step at other parameter values, with the coefficients as they are."""
        if not self.open:
            self._presence = self._values = self._regularizer = None
        self.add(given, regularizer, last=last, limit=None)

    # --- Passes -----------------------------------------------------------------------------------------------------

    def _measuring_passes(self, given: Objectives, regularizer: Tensor | None, gradients: ObjectiveGradients) -> None:
        """One reverse pass an objective; the graph serves them all and is freed by the last."""
        extra = [regularizer] if regularizer is not None and regularizer.requires_grad else []
        graph = walk([*given.outputs, *extra])
        self._blurred |= bool(graph.compiled) or given.joint
        if graph.reentrant and any(self._ranks.synced) and not self._ranks.sharded:
            raise RuntimeError(
                "backward: activation checkpointing with use_reentrant=True does not work under "
                "DistributedDataParallel, which would average the first objective's gradient only; use_reentrant=False"
            )
        self.state = replace(
            self.state,
            reentrant=self.state.reentrant or graph.reentrant,
            compiled=self.state.compiled or bool(graph.compiled),
        )
        trainable = [p for p in self._parameters if p.requires_grad]
        self._touched = set()
        if self._ranks.sharded:
            passes = matched_passes(given, self._ranks, self._device)
        else:
            active = [k for k, connected in enumerate(given.connected) if connected and given.present[k]]
            passes = [Pass(k, *given.single(k)) for k in active]
        passes = [Pass(len(given.names), extra, [torch.ones_like(r) for r in extra])] * len(extra) + passes
        saved = Saved(graph.compiled) if graph.compiled and len(passes) > 1 else None
        for i, (row, outputs, cotangents) in enumerate(passes):
            found = reverse_pass(
                outputs,
                cotangents,
                trainable,
                retain_graph=i + 1 < len(passes),
                whole=self._whole(graph.reentrant),
                saved=saved,
            )
            if self._ranks.sharded and all(gradient is None for gradient in found):
                name = given.names[row] if row < len(given.names) else "regularizer"
                raise RuntimeError(
                    f"backward: {name!r} gave no parameter a gradient. Leave gradient sync on while gradients are "
                    "accumulated (set_requires_gradient_sync(True); accelerate: sync_each_batch=True): FSDP2 would "
                    "add the objectives' gradients up before they can be told apart"
                )
            self._touched |= {id(p) for p, gradient in zip(trainable, found, strict=True) if gradient is not None}
            gradients.add(row, found)

    def _weighted_passes(self, given: Objectives, regularizer: Tensor | None) -> None:
        """One plain backward of Σ_k λ_k L_k + regularizer over the shared parameters, Σ_k L_k over the heads."""
        if self._ranks.sharded:
            matched_passes(given, self._ranks, self._device)
        shared = self._shared_of(self.state)
        connected = sum(1 << k for k, here in enumerate(given.connected) if here)
        # DDP waits for a gradient of every parameter, also where the objectives of this rank do not reach it.
        waiting = [
            awaited and not reach & connected
            for awaited, reach in zip(self._ranks.awaited, self.state.reach, strict=True)
        ]
        untouched = [p for p, wait in zip(self._parameters, waiting, strict=True) if wait and p.grad is None]
        if untouched and regularizer is not None:
            regularized = {id(leaf) for leaf in walk([regularizer]).leaves}
            untouched = [p for p in untouched if id(p) not in regularized]
        trunk = [p for p, parameter in enumerate(self._parameters) if shared[p] and parameter.requires_grad]
        heads = [p for p, parameter in enumerate(self._parameters) if not shared[p] and parameter.requires_grad]
        for chosen, others, weights in (
            # The pass over the heads stops at their inputs: it repeats no work of the trunk's.
            (heads, trunk, [1.0] * len(given.names)),
            (trunk, heads, self.state.coefficients),
        ):
            outputs, cotangents = given.products(weights)
            if regularizer is not None and regularizer.requires_grad:
                outputs, cotangents = [*outputs, regularizer], [*cotangents, torch.ones_like(regularizer)]
            zeros = [self._parameters[p] for p in chosen if waiting[p]]
            outputs, cotangents = [*outputs, *zeros], [*cotangents, *map(_zeros, zeros)]
            kept: list[Tensor] | None = None
            if self._whole(self.state.reentrant):
                kept = [self._parameters[p] for p in others]
                if not self._ranks.sharded:
                    own = {id(p) for p in self._parameters}
                    kept += [leaf for leaf in walk(outputs).leaves if id(leaf) not in own]
            again = chosen is heads and bool(trunk) and bool(heads)
            accumulate_pass(
                outputs,
                cotangents,
                [self._parameters[p] for p in chosen],
                retain_graph=again,
                whole_but=kept,
                saved=Saved(walk(outputs).compiled) if again and self.state.compiled else None,
            )
        self._forget_zeros(untouched)

    def _whole(self, reentrant: bool) -> bool:
        return self._ranks.sharded or reentrant

    def _finish_measured(self) -> None:
        """At the end of a step whose passes were all measured: let DDP average what was written.

        A pass of zeros tells it that every gradient is there; measuring passes it does not see.
        """
        ranks = self._ranks
        here = [
            p
            for p, awaited, synced in zip(self._parameters, ranks.awaited, ranks.synced, strict=True)
            if p.requires_grad and (awaited or (synced and not ranks.sharded and id(p) in self._touched))
        ]
        untouched = [p for p in here if p.grad is None]
        accumulate_pass(here, [_zeros(p) for p in here], here, retain_graph=False)
        self._forget_zeros(untouched)

    def _forget_zeros(self, parameters: Sequence[Tensor]) -> None:
        """Take the zeros back from parameters that no objective on any rank reaches: unused ones stay None."""
        reach = dict(zip(map(id, self._parameters), self.state.reach, strict=True))
        for parameter in parameters:
            if reach[id(parameter)] <= 0:
                parameter.grad = None

    def _average_unsynced(self) -> None:
        """Average what no wrapper averages, at the end of a step."""
        if self._ranks.size > 1:
            synced = self._ranks.synced
            unsynced = [p for p, q in enumerate(self._parameters) if q.requires_grad and not synced[p]]
            average_grads(unsynced, self._parameters, self._ranks)

    # --- Solving ----------------------------------------------------------------------------------------------------

    def _all_ready(self, gradients: ObjectiveGradients, last: bool) -> bool:
        """Agree with the other ranks on whether to solve, and on which objectives are there and what they reach.

        An objective that no solve has seen would have no coefficient after this one: wait for it.
        """
        assert self._presence is not None
        present = [int(here) for here in self._presence.tolist()]
        count, width = len(present), len(self._parameters)
        while True:
            reached = [code for row in self._reached(gradients) for code in row]
            more, *agreed = self._ranks.agree([int(not last), *present, *reached], self._device)
            here = [bool(flag) for flag in agreed[:count]]
            if not more or all(p or known for p, known in zip(here, self.state.solved, strict=True)):
                codes = agreed[count:]
                self._agreed = here, [codes[k * width : (k + 1) * width] for k in range(count + 1)]
                return True
            if not last:
                return False

    def _reached(self, gradients: ObjectiveGradients) -> list[list[int]]:
        """For each row and parameter, whether and how it is reached.

        A compiled graph, and losses that share a last tensor, give zeros instead of None where an objective does not
        reach. There all zeros is taken for not reached, unless every objective's gradient is (a layer that starts at
        zero). It takes one more copy from the device, and is done only if it may tell something new.
        """
        reached = gradients.reached()
        if not self._blurred:
            return reached
        seen = self.state.reach
        new = any(
            hit and not max(seen[p], 0) >> k & 1 for k, row in enumerate(reached[:-1]) for p, hit in enumerate(row)
        )
        if not new and self._ranks.size == 1:
            return reached
        count, width = len(reached) - 1, len(seen)
        flags = self._ranks.agree([flag for row in gradients.nonzero(slice(count)) for flag in row], self._device)
        nonzero = [flags[k * width : (k + 1) * width] for k in range(count)]
        somewhere = [any(column) for column in zip(*nonzero, strict=True)]
        keep = [[flag or not some for flag, some in zip(row, somewhere, strict=True)] for row in nonzero]
        gradients.drop([*keep, [True] * width])
        return gradients.reached()

    def solve(self, balancer: Balancer, ema_decay: float) -> None:
        """End the measuring: Gramian and coefficients. If something is not finite, ``nonfinite`` names it."""
        gradients, state = self._gradients, self.state
        assert gradients is not None
        assert self._agreed is not None
        present, reached = self._agreed
        before = self._shared_of(state)
        state = replace(state, reach=self._reach(state, reached[:-1]))
        shared = self._shared_of(state)
        if shared != before:
            # Norms measured over other parameters say nothing about these.
            state = replace(state, solved=[False] * len(state.names))
        gramian, squares, losses, regularizer = self._to_host(
            self._part_of_gramian(gradients, reached, shared), self._left_out(gradients, shared)
        )
        finite = gramian.diagonal().isfinite() & squares[:-1].isfinite() & losses.isfinite()
        self.nonfinite += [
            name for name, here, ok in zip(state.names, present, finite.tolist(), strict=True) if here and not ok
        ]
        if not isfinite(squares[-1].tolist() + regularizer.tolist()[0]):
            self.nonfinite.append("regularizer")
        self._presence, self._values = torch.tensor(present), losses
        if not self.nonfinite:
            losses = torch.where(self._presence, losses, torch.nan)
            state = solve(state, balancer, gramian, present=present, losses=losses, ema_decay=ema_decay)
        self.state = state

    def _part_of_gramian(
        self, gradients: ObjectiveGradients, reached: Sequence[Sequence[int]], shared: Sequence[bool]
    ) -> Tensor:
        """This rank's part of the Gramian of the averaged gradients; with one rank, the Gramian."""
        count, ranks = len(self.state.names), self._ranks
        if ranks.size == 1:
            return gradients.gramian(shared, slice(count))
        averaged = [is_dtensor(parameter) for parameter in self._parameters]
        here = [p for p, balanced in enumerate(shared) if balanced and not averaged[p]]
        there = [balanced and done for balanced, done in zip(shared, averaged, strict=True)]
        part = mean_gramian(gradients.rows[:count], reached[:count], here, self._parameters, ranks)
        other = gradients.gramian(there, slice(count), ranks=ranks.size)
        return part.to(self._device) + other.to(self._device)

    def _left_out(self, gradients: ObjectiveGradients, shared: Sequence[bool]) -> Tensor:
        """Squared norms of all that is not in the Gramian, heads and regularizer, to find a NaN there; (K+1,)."""
        count = len(self.state.names)
        heads = [not balanced for balanced in shared]
        squares = [gradients.gramian(heads, slice(k, k + 1)) for k in range(count)]
        squares.append(gradients.gramian([True] * len(shared), slice(count, count + 1)))
        return torch.cat([square.reshape(1).to(self._device) for square in squares])

    def _to_host(self, gramian: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All that the solve needs, summed over the ranks (losses: averaged), by one copy from the device."""
        assert self._values is not None
        count, size = len(self.state.names), self._ranks.size
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        regularizer = torch.zeros(1) if self._regularizer is None else self._regularizer.reshape(1)
        parts = [gramian.reshape(-1), squares, self._values.to(dtype) / size, regularizer.to(dtype)]
        packed = self._ranks.total(torch.cat([part.to(self._device, dtype) for part in parts]))
        host = packed.to("cpu", torch.float64)
        first, second, third, fourth = torch.split(host, [count * count, count + 1, count, 1])
        return first.view(count, count), second, third, fourth

    def write(self) -> None:
        """Add the balanced gradient to ``.grad``, and let go of the K gradients.

        One that is not finite is written as it is, so that a GradScaler sees it and backs off.
        """
        gradients, self._gradients = self._gradients, None
        assert gradients is not None
        gradients.write([*self.state.coefficients, 1.0], self._shared_of(self.state))
        if not self.open and self._ranks.size > 1:
            self._finish_measured()
            self._average_unsynced()
            self._watch()

    def _reach(self, state: BalanceState, reached: Sequence[Sequence[int]]) -> list[int]:
        """The objectives that reach each parameter, as far as known; of frozen parameters nothing is learned."""
        masks = [sum(1 << k for k, hit in enumerate(hits) if hit) for hits in zip(*reached, strict=True)]
        return [
            max(old, 0) | new if parameter.requires_grad else old
            for parameter, old, new in zip(self._parameters, state.reach, masks, strict=True)
        ]

    # --- Watching ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """After the last plain backward: queue the numbers that ``step`` looks at, without waiting for them.

        They are a flag for each loss, for the regularizer and for the gradient that is not finite, and a checksum of
        the gradient, which must be the same on all ranks.
        """
        assert self._values is not None
        device = self._device
        grads = [local(p.grad) for p in self._parameters if p.grad is not None]
        grads = [g._values() if g.is_sparse else g for g in grads]
        # Largest absolute values: unlike sums and 2-norms they cannot overflow.
        sizes = torch._foreach_norm([g for g in grads if g.numel()] or [torch.zeros(1, device=device)], torch.inf)
        checksum = torch.stack([size.to(device, torch.float32) for size in sizes]).sum()
        regularizer = torch.zeros(()) if self._regularizer is None else self._regularizer
        numbers = [self._values.to(device), regularizer.reshape(1).to(device), checksum.reshape(1)]
        flags = torch.cat([(~n.isfinite()).to(torch.float32) for n in numbers])
        mine = torch.cat([flags, checksum.reshape(1)])
        total, work = mine, None
        if self._ranks.size > 1:
            total = mine.clone()
            work = dist.all_reduce(total, group=self._ranks.group, async_op=True)
        self._watched = mine, total, work

    def check(self) -> list[str]:
        """Names of what is not finite on any rank, by one look at what :meth:`_watch` queued.

        Raises:
            RuntimeError: If the ranks' gradients differ, so that their models would drift apart.
        """
        if self._watched is None:
            return self.nonfinite
        (mine, total, work), self._watched = self._watched, None
        if work is not None:
            work.wait()
        *flags, gradient, checksum, own = torch.cat([total, mine[-1:]]).tolist()
        names = [*self.state.names, "regularizer"]
        self.nonfinite += [name for name, flag in zip(names, flags, strict=True) if flag]
        if gradient and not self.nonfinite and self._presence is not None:
            # One backward gave one gradient: any of them may be the culprit.
            there = [*self._presence.tolist(), self._regularizer is not None]
            self.nonfinite += [name for name, here in zip(names, there, strict=True) if here]
        size = self._ranks.size
        if not self._ranks.sharded and not gradient and abs(checksum - size * own) > _SAME * abs(checksum):
            raise RuntimeError(
                "step: the gradient is not the same on all ranks. DistributedDataParallel did not average it: the last "
                "micro-batch's forward ran under no_sync(), or not through the DDP module (Lightning's manual "
                "optimization: call manual_backward), or a parameter was unfrozen after the model was wrapped"
            )
        return self.nonfinite

    def objective(self) -> Tensor:
        """Σ_k λ_k L_k + regularizer, averaged over the ranks: what an inner optimizer with a line search minimises."""
        assert self._values is not None
        value = self._values @ self._values.new_tensor(self.state.coefficients)
        if self._regularizer is not None:
            value = value + self._regularizer.to(value)
        return self._ranks.total(value) / self._ranks.size

    def report(self) -> BalanceReport:
        """What the step did so far."""
        assert self._values is not None
        assert self._presence is not None
        return BalanceReport(
            self.state, self._values, presence=self._presence, refreshed=self.refresh, skipped=self.nonfinite
        )


def _zeros(parameter: Tensor) -> Tensor:
    """A gradient of zeros that takes no memory."""
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand_as(parameter)


def _together(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both on one device, and never copied to the host for it."""
    if first.device.type == "cpu":
        return first.to(second.device), second
    return first, second.to(first.device)
