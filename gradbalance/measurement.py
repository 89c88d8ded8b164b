"""The measuring of a refresh: one reverse pass an objective and micro-batch, and the Gramian of what they add up to.

An estimator that compares micro-batches wants A parts: micro-batch i adds to part i mod A, and the Gramian is that of
the parts' A·K gradients. The passes are the same; the memory is that of A·K gradients instead of K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradbalance.compiled import Saved
from gradbalance.devices import sent
from gradbalance.dtensor import is_dtensor
from gradbalance.gradients import ObjectiveGradients
from gradbalance.matching import Pass, matched_passes, sync_is_off
from gradbalance.objectives import Objectives, nothing_to_differentiate
from gradbalance.passes import reverse_pass, walk
from gradbalance.ranks import Ranks
from gradbalance.reduction import mean_gramian


class Numbers(NamedTuple):
    """What a solve needs to know, on the host, float64.

    Attributes:
        products: Inner products over the shared parameters of the parts' gradients, part after part, (A·K, A·K); with a
            past K more rows and columns.
        counts: In how many micro-batches of each part each objective was present, on all ranks together, (A, K). With
            one part nobody asks how many, and it is only whether.
        squares: Squared norms of what it leaves out, (K+1,): each objective's heads, and the regularizer. They show
            what is not finite there.
        losses: The K loss values, averaged over the ranks.
        regularizer: The regularizer's value, (1,).
        micro_batches: How many were measured, the mean over the ranks, (1,).
    """

    products: Tensor
    counts: Tensor
    squares: Tensor
    losses: Tensor
    regularizer: Tensor
    micro_batches: Tensor


class Measurement:
    """The gradients of one refresh.

    Args:
        names: The K objective names.
        parameters: All parameters.
        ranks: The processes that train together.
        parts: A.
        past: K rows of averages of past gradients, if inner products with them are wanted too.

    Attributes:
        touched: The ``id`` of each parameter that the last micro-batch reached.
        zeros: For each parameter a bit mask of the objectives that were taken not to reach it, because a compiled graph
            gave zeros.
        present: Once ready, whether each objective is present on some rank.
        reached: Once ready, ``reached[k][p]``: whether and how objective k reaches parameter p on some rank, the
            regularizer last; see :meth:`ObjectiveGradients.reached`.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        ranks: Ranks,
        *,
        parts: int = 1,
        past: Sequence[Sequence[Tensor | None]] = (),
    ) -> None:
        self.touched: set[int] = set()
        self.zeros = [0] * len(parameters)
        self.present: list[bool] = []
        self.reached: list[list[int]] = []
        self._codes: list[list[int]] = []  # the same for each row of the parts
        self._names, self._count = names, len(names)
        self._parameters, self._ranks = parameters, ranks
        self._device = parameters[0].device
        self._parts, self._past = parts, past
        self._micro_batches = 0
        self._counts = torch.zeros(parts, len(names))
        # One row an objective and part, and one for the regularizer.
        self._rows = slice(parts * len(names))
        self._gradients = ObjectiveGradients(parts * len(names) + 1, parameters)
        self._blurred = False

    def add(self, given: Objectives, regularizer: Tensor | None) -> None:
        """Measure one micro-batch. Its graph serves all passes and is freed by the last."""
        extra = [regularizer] if regularizer is not None and regularizer.requires_grad else []
        graph = walk([*given.outputs, *extra])
        self._ranks.refuse(graph)
        whole = self._ranks.sharded or graph.reentrant
        leaves = given.leaves()
        # Under FSDP2, in a checkpoint and in a compiled graph the leaves are not the parameters, or not all of them.
        self._blurred |= bool(graph.compiled) or (whole and leaves is not None)
        leaves = None if whole or graph.compiled else leaves
        visible = {id(leaf) for leaf in graph.leaves}
        passes = [Pass(self._count, [loss], [torch.ones_like(loss)]) for loss in extra]
        passes += self._passes(given)
        saved = Saved(graph.compiled) if graph.compiled and len(passes) > 1 else None
        trainable = [p for p in self._parameters if p.requires_grad]
        part = self._micro_batches % self._parts
        self._micro_batches += 1
        if self._parts > 1:
            here = zip(given.connected, given.present, strict=True)
            self._counts[part] += torch.tensor([float(connected and present) for connected, present in here])
        self.touched = set()
        for i, (row, outputs, cotangents) in enumerate(passes):
            more = i + 1 < len(passes)
            found = reverse_pass(outputs, cotangents, trainable, retain_graph=more, whole=whole, saved=saved)
            if self._ranks.sharded and all(gradient is None for gradient in found):
                raise sync_is_off(repr([*given.names, "regularizer"][row]))
            if leaves is not None and row < self._count:
                foreign = visible - leaves[row]
                found = [None if id(p) in foreign else g for p, g in zip(trainable, found, strict=True)]
            self.touched |= {id(p) for p, gradient in zip(trainable, found, strict=True) if gradient is not None}
            self._gradients.add(-1 if row == self._count else part * self._count + row, found)

    def put(self, row: int, gradients: list[Tensor | None]) -> None:
        """Put in what no pass has to find, one entry for each parameter that requires grad; the list is emptied."""
        self._gradients.add(row, gradients)

    def ready(self, presence: Tensor, solved: Sequence[bool], *, last: bool) -> bool:
        """Agree with the other ranks on whether to solve, and on which objectives are there and what they reach.

        An objective that no solve has seen would have no coefficient after this one: wait for it.

        Args:
            presence: The objectives that were present on this rank.
            solved: The objectives that a solve has seen.
            last: Whether this rank has no more micro-batches.
        """
        here, width = [int(p) for p in presence.tolist()], len(self._parameters)
        while True:
            codes = [code for row in self._reached() for code in row]
            more, *agreed = self._ranks.agree([int(not last), *here, *codes], self._device)
            self.present = [bool(flag) for flag in agreed[: self._count]]
            if not more or all(p or known for p, known in zip(self.present, solved, strict=True)):
                codes = agreed[self._count :]
                if any(self.present) and not any(codes):
                    raise nothing_to_differentiate(self._names)
                self._codes = [codes[start : start + width] for start in range(0, len(codes), width)]
                self.reached = [*self._over_parts(self._codes), self._codes[-1]]
                return True
            if not last:
                return False

    def numbers(self, shared: Sequence[bool], values: Tensor, regularizer: Tensor | None) -> Numbers:
        """All that the solve needs, summed over the ranks (losses: averaged), by one copy from the device.

        Args:
            shared: For each parameter, whether it is balanced.
            values: This rank's K loss values; 0 where absent.
            regularizer: This rank's regularizer, if there is one.
        """
        count = self._count
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        extra = torch.zeros(1) if regularizer is None else regularizer.reshape(1)
        counts = self._counts.reshape(-1) if self._parts > 1 else torch.zeros(0)
        products = self._gramian(shared)
        measured = torch.tensor([self._micro_batches / self._ranks.size])
        numbers = [products.reshape(-1), counts, self._squares(shared), values / self._ranks.size, extra, measured]
        packed = self._ranks.total(torch.cat([sent(part, self._device, dtype) for part in numbers]))
        host = packed.to("cpu", torch.float64)
        sizes = [products.numel(), len(counts), count + 1, count, 1, 1]
        found, totals, *others = torch.split(host, sizes)
        totals = totals if self._parts > 1 else torch.tensor(self.present, dtype=torch.float64)
        return Numbers(found.view_as(products), totals.view(self._parts, count), *others)

    def kept(self, shared: Sequence[bool]) -> list[list[Tensor | None]]:
        """The first part's K gradients over the shared parameters, for whoever needs them after :meth:`write`."""
        rows = self._gradients.rows[: self._count]
        return [[g for g, balanced in zip(row, shared, strict=True) if balanced] for row in rows]

    def write(self, coefficients: Sequence[float], shared: Sequence[bool]) -> None:
        """Add the balanced gradient to ``.grad``, and let go of the gradients."""
        self._gradients.write([*coefficients] * self._parts + [1.0], shared)

    def _passes(self, given: Objectives) -> list[Pass]:
        if self._ranks.sharded:
            return matched_passes(given, self._ranks, self._device)
        active = [k for k, connected in enumerate(given.connected) if connected and given.present[k]]
        return [Pass(k, *given.single(k)) for k in active]

    def _reached(self) -> list[list[int]]:
        """What this rank's gradients reach, row by row.

        A compiled graph gives zeros instead of None where an objective does not reach, and so does FSDP2 if the losses
        came as one tensor. There all zeros is taken for not reached, unless every objective's gradient is zeros, or all
        that this objective has. It takes one more copy from the device. Zeros may be an accident of this step (a layer
        that starts at zero), so the state has them looked at once more.
        """
        reached = self._gradients.reached()
        if not self._blurred:
            return reached
        width, rows = len(self._parameters), range(self._count)
        nonzero = [flag for row in self._over_parts(self._gradients.nonzero(self._rows)) for flag in row]
        agreed = self._ranks.agree(nonzero, self._device)
        flags = [agreed[k * width : (k + 1) * width] for k in rows]
        somewhere = [any(column) for column in zip(*flags, strict=True)]
        keep = [
            [bool(flag or not some or not any(row)) for flag, some in zip(row, somewhere, strict=True)] for row in flags
        ]
        found = self._over_parts(reached)
        dropped = [sum(1 << k for k in rows if found[k][p] and not keep[k][p]) for p in range(width)]
        self.zeros = [old | new for old, new in zip(self.zeros, dropped, strict=True)]
        self._gradients.drop([*keep * self._parts, [True] * width])
        return self._gradients.reached()

    def _over_parts(self, codes: Sequence[Sequence[int]]) -> list[list[int]]:
        """The largest code of each objective over its parts."""
        rows = codes[self._rows]
        if self._parts == 1:
            return [list(row) for row in rows]
        return [[max(column) for column in zip(*rows[k :: self._count], strict=True)] for k in range(self._count)]

    def _gramian(self, shared: Sequence[bool]) -> Tensor:
        """This rank's part of the Gramian of the averaged gradients; with one rank, the Gramian."""
        rows, ranks = self._rows, self._ranks
        if ranks.size == 1:
            return self._gradients.gramian(shared, rows, others=self._past)
        averaged = [is_dtensor(parameter) for parameter in self._parameters]
        plain = [p for p, balanced in enumerate(shared) if balanced and not averaged[p]]
        part = mean_gramian(self._gradients.rows[rows], self._codes[rows], plain, self._parameters, ranks)
        sharded = [balanced and done for balanced, done in zip(shared, averaged, strict=True)]
        other = self._gradients.gramian(sharded, rows, ranks=ranks.size)
        return sent(part, self._device) + sent(other, self._device)

    def _squares(self, shared: Sequence[bool]) -> Tensor:
        heads, last = [not balanced for balanced in shared], self._rows.stop
        squares = [self._gradients.gramian(heads, slice(row, row + 1)) for row in range(last)]
        squares.append(self._gradients.gramian([True] * len(shared), slice(last, last + 1)))
        of_rows = torch.cat([sent(square.reshape(1), self._device) for square in squares])
        return torch.cat([of_rows[:-1].view(self._parts, -1).sum(0), of_rows[-1:]])
