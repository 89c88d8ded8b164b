"""Averages over data-parallel ranks, for gradients that no wrapper has averaged.

The Gramian of a mean is not the mean of the Gramians, so the K gradients themselves must be averaged first; but no rank
needs all of them. A reduce-scatter leaves each rank with 1/W of every mean gradient, enough for its part of the
Gramian: K·P·(W−1)/W numbers sent a rank, half of what K all-reduces send, and 1/W of their memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from gradbalance.devices import together
from gradbalance.gramian import gramian
from gradbalance.ranks import Ranks

# Numbers in one message: large enough to fill a link, small enough to be held beside the gradients.
_BUCKET = 2**22


class Bucket:
    """Some parameters' gradients as one flat vector, padded so that each rank can own an equal part.

    Args:
        parameters: The parameters, of one dtype on one device.
        ranks: Who takes part.
    """

    def __init__(self, parameters: Sequence[Tensor], ranks: Ranks) -> None:
        self._parameters, self._ranks = parameters, ranks
        first = parameters[0]
        self._dtype = torch.float64 if first.dtype in (torch.float64, torch.complex128) else torch.float32
        self._sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
        self._part = -(-sum(self._sizes) // ranks.size)

    def mean_part(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """This rank's part of the mean over the ranks; None counts as zero."""
        full = self._flatten(gradients)
        part = full.new_empty(self._part)
        # torch 2.13 gives the call a new name and deprecates the old.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce_scatter(part, full, group=self._ranks.group)
        return part / self._ranks.size

    def mean(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The mean over the ranks, in the parameters' shapes and dtypes."""
        flat = self._ranks.total(self._flatten(gradients)) / self._ranks.size
        result = []
        for parameter, piece in zip(self._parameters, self._split(flat), strict=True):
            piece = torch.view_as_complex(piece.view(-1, 2)) if parameter.is_complex() else piece
            result.append(piece.to(parameter.dtype, copy=True).view(parameter.shape))
        return result

    def _flatten(self, gradients: Sequence[Tensor | None]) -> Tensor:
        length = self._part * self._ranks.size
        flat = torch.zeros(length, dtype=self._dtype, device=self._parameters[0].device)
        for gradient, piece in zip(gradients, self._split(flat), strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
                piece.copy_(dense.reshape(-1))
        return flat

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        return torch.split(flat[: sum(self._sizes)], self._sizes)


def mean_gramian(
    rows: Sequence[Sequence[Tensor | None]],
    reached: Sequence[Sequence[int]],
    chosen: Sequence[int],
    parameters: Sequence[Tensor],
    ranks: Ranks,
) -> Tensor:
    """This rank's part of the Gramian of the means over the ranks; the parts sum up to it.

    Args:
        rows: This rank's gradients, ``rows[k][p]``.
        reached: ``reached[k][p]`` is 0 where no rank has a gradient; agreed on by all.
        chosen: The parameters p that count.
        parameters: All parameters.
        ranks: Who takes part.
    """
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for group in _groups(chosen, parameters):
        bucket = Bucket([parameters[p] for p in group], ranks)
        parts = [
            [bucket.mean_part([row[p] for p in group]) if any(known[p] for p in group) else None]
            for row, known in zip(rows, reached, strict=True)
        ]
        product = gramian(parts)
        total = torch.add(*together(total, product))
    return total


def average_grads(chosen: Sequence[int], parameters: Sequence[Tensor], ranks: Ranks) -> None:
    """Average the ``.grad`` of the chosen parameters over the ranks; None counts as zero where another rank has one."""
    if not chosen:
        return
    grads = [parameters[p].grad for p in chosen]
    codes = ranks.agree([0 if g is None else 2 if g.is_sparse else 1 for g in grads], parameters[chosen[0]].device)
    known = {p: code for p, code in zip(chosen, codes, strict=True) if code}
    for group in _groups(list(known), parameters):
        members = [parameters[p] for p in group]
        means = Bucket(members, ranks).mean([parameter.grad for parameter in members])
        for p, mean in zip(group, means, strict=True):
            # A sparse gradient travels densely and arrives sparse, as its optimizer expects.
            parameters[p].grad = mean.to_sparse(1) if known[p] == 2 else mean


def _groups(chosen: Sequence[int], parameters: Sequence[Tensor]) -> list[list[int]]:
    """Parameters of one dtype and device, in order, in groups of bounded size."""
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
