"""Averages over data-parallel ranks, for gradients that no wrapper averages.

The Gramian of a mean is not the mean of the Gramians, so the K gradients themselves are averaged first; but no rank
needs all of them. A reduce-scatter leaves each rank with 1/W of every mean gradient: enough for its part of the
Gramian, and for its part of the balanced gradient, which an all-gather completes. That is (K+1)·P numbers sent a rank,
against (2K)·P for K all-reduces, and every rank ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from gradbalance.gradients import ObjectiveGradients, add_to_grad, wide
from gradbalance.ranks import Ranks

# Numbers in one message: large enough to fill a link, small enough to be held beside the gradients.
_BUCKET = 2**22


class Bucket:
    """Some parameters' gradients as one flat vector, padded so that each rank can own an equal part.

    Args:
        parameters: The parameters, of one dtype on one device.
        sparse: For each, whether its gradients are sparse; they travel densely.
        ranks: Who takes part.
    """

    def __init__(self, parameters: Sequence[Tensor], sparse: Sequence[bool], ranks: Ranks) -> None:
        self._parameters, self._sparse, self._ranks = parameters, sparse, ranks
        first = parameters[0]
        self._dtype = torch.float64 if first.dtype in (torch.float64, torch.complex128) else torch.float32
        self._sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
        self._part = -(-sum(self._sizes) // ranks.size)
        self._device = first.device

    def empty_part(self) -> Tensor:
        """Room for the part that this rank owns."""
        return torch.empty(self._part, dtype=self._dtype, device=self._device)

    def mean_part(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """This rank's part of the mean over the ranks; None counts as zero."""
        part = self.empty_part()
        _reduce_scatter(part, self._flatten(gradients), self._ranks)
        return part / self._ranks.size

    def add_to_grads(self, part: Tensor) -> None:
        """Put the ranks' parts together and add them to the parameters' ``.grad``."""
        flat = torch.empty(self._part * self._ranks.size, dtype=self._dtype, device=self._device)
        _all_gather(flat, part, self._ranks)
        for parameter, sparse, piece in self._pieces(flat):
            add_to_grad(parameter, piece.to_sparse(1) if sparse else piece.clone())

    def average_grads(self) -> None:
        """Average the parameters' ``.grad`` over the ranks."""
        flat = self._flatten([parameter.grad for parameter in self._parameters])
        flat = self._ranks.total(flat) / self._ranks.size
        for parameter, sparse, piece in self._pieces(flat):
            parameter.grad = None
            add_to_grad(parameter, piece.to_sparse(1) if sparse else piece.clone())

    def _flatten(self, gradients: Sequence[Tensor | None]) -> Tensor:
        flat = torch.zeros(self._part * self._ranks.size, dtype=self._dtype, device=self._device)
        for gradient, piece in zip(gradients, torch.split(flat[: sum(self._sizes)], self._sizes), strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
                piece.copy_(dense.reshape(-1))
        return flat

    def _pieces(self, flat: Tensor) -> Iterator[tuple[Tensor, bool, Tensor]]:
        pieces = torch.split(flat[: sum(self._sizes)], self._sizes)
        for parameter, sparse, piece in zip(self._parameters, self._sparse, pieces, strict=True):
            if parameter.is_complex():
                piece = torch.view_as_complex(piece.view(*parameter.shape, 2))
            yield parameter, sparse, piece.view(parameter.shape)


class AveragedGradients:
    """The mean over the ranks of every objective's gradient, each rank holding its part.

    Args:
        gradients: This rank's gradients. They are emptied.
        reached: ``reached[k][p]`` as in :meth:`ObjectiveGradients.reached`, agreed on by all ranks.
        shared: For each parameter, whether it is balanced. Of the others only the sum over k is needed.
        ranks: Who takes part.
    """

    def __init__(
        self, gradients: ObjectiveGradients, reached: Sequence[Sequence[int]], shared: Sequence[bool], ranks: Ranks
    ) -> None:
        parameters, rows = gradients.parameters, gradients.rows
        sharded = [p for p, synced in enumerate(ranks.synced) if synced and ranks.sharded]
        plain = [p for p in range(len(parameters)) if p not in sharded and any(row[p] for row in reached)]
        self._buckets: list[Bucket] = []
        # The parts take the parameters' place: as far as Gramian and weighted sum are concerned, they are parameters.
        slots: list[Tensor] = []
        parts: list[list[Tensor | None]] = []
        self._shared: list[bool] = []
        for balanced in (True, False):
            for chosen in buckets([p for p in plain if shared[p] is balanced], parameters):
                bucket = Bucket(
                    [parameters[p] for p in chosen], [max(row[p] for row in reached) == 2 for p in chosen], ranks
                )
                if not balanced:
                    gathered = [_sum_of([row[p] for row in rows]) for p in chosen]
                    column: list[Tensor | None] = [bucket.mean_part(gathered)] + [None] * (len(rows) - 1)
                else:
                    column = [
                        bucket.mean_part([row[p] for p in chosen]) if any(known[p] for p in chosen) else None
                        for row, known in zip(rows, reached, strict=True)
                    ]
                for row in rows:
                    for p in chosen:
                        row[p] = None
                self._buckets.append(bucket)
                slots.append(bucket.empty_part())
                parts.append(column)
                self._shared.append(balanced)
        self._slots = slots
        for p in sharded:
            parts.append([row[p] for row in rows])
            self._shared.append(shared[p])
        self._parts = ObjectiveGradients(len(rows), [*slots, *(parameters[p] for p in sharded)])
        self._parts.rows = [list(row) for row in zip(*parts, strict=True)] if parts else self._parts.rows
        for row in rows:
            row.clear()
        self._ranks = ranks

    def gramian(self, rows: slice) -> Tensor:
        """This rank's part of the Gramian over the shared parameters."""
        return self._parts.gramian(self._shared, rows, ranks=self._ranks.size)

    def write(self, weights: Sequence[float]) -> None:
        """Add the balanced gradient to every parameter's ``.grad``."""
        self._parts.write(weights, self._shared)
        for bucket, slot in zip(self._buckets, self._slots, strict=True):
            assert slot.grad is not None
            bucket.add_to_grads(slot.grad)
            slot.grad = None


def buckets(chosen: Sequence[int], parameters: Sequence[Tensor]) -> list[list[int]]:
    """Group parameters of one dtype and device, in order, into buckets of bounded size."""
    result: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for p in chosen:
        key = (parameters[p].dtype, parameters[p].device)
        held = filling.get(key)
        if held is None or sum(parameters[i].numel() for i in held) + parameters[p].numel() > _BUCKET:
            held = filling[key] = []
            result.append(held)
        held.append(p)
    return result


def average_grads(chosen: Sequence[int], parameters: Sequence[Tensor], ranks: Ranks) -> None:
    """Average the ``.grad`` of the chosen parameters over the ranks; None counts as zero where another rank has one."""
    if not chosen:
        return
    grads = [parameters[p].grad for p in chosen]
    codes = ranks.agree([0 if g is None else 2 if g.is_sparse else 1 for g in grads], parameters[chosen[0]].device)
    known = {p: code for p, code in zip(chosen, codes, strict=True) if code}
    for group in buckets(list(known), parameters):
        Bucket([parameters[p] for p in group], [known[p] == 2 for p in group], ranks).average_grads()


def _sum_of(gradients: Sequence[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            dense = wide(gradient.to_dense() if gradient.is_sparse else gradient)
            total = dense if total is None else total + dense
    return total


def _reduce_scatter(output: Tensor, full: Tensor, ranks: Ranks) -> None:
    # torch 2.13 gives the calls new names and deprecates the old.
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(output, full, group=ranks.group)


def _all_gather(full: Tensor, part: Tensor, ranks: Ranks) -> None:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(full, part, group=ranks.group)
