"""The Gramian of K gradients, M_kl = ⟨g_k, g_l⟩, without ever laying the K×P matrix out.

The parameters are walked in blocks of columns small enough to stay in cache; each block is copied to float64,
multiplied with its own transpose and added up. float64 is what makes everything downstream safe: no under- or overflow
for losses × 1e±7 or a loss scale, no TF32, no autocast, bf16 gradients included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Gradients = Sequence[Tensor | None]

# Elements of a block over all K rows: about 1 MB of float64 on a CPU (its L2 cache); larger elsewhere, to launch less.
_BLOCK_CPU = 2**17
_BLOCK_ACCELERATOR = 2**23


def gramian(rows: Sequence[Gradients]) -> Tensor:
    """M_kl = Σ_p ⟨rows[k][p], rows[l][p]⟩.

    Args:
        rows: K lists with the gradient of one objective for each parameter, in the same order; None is zero.
            Complex gradients count as pairs of reals, sparse ones are read densely.

    Returns:
        The Gramian, shape (K, K), float64, on the device of the first gradient.
    """
    total: dict[torch.device, Tensor] = {}
    for block in _blocks(rows):
        product = block @ block.T
        total[block.device] = total[block.device] + product if block.device in total else product
    if not total:
        return torch.zeros(len(rows), len(rows), dtype=torch.float64)
    first, *others = total.values()
    for product in others:
        first = first + product.to(first.device)
    return first


def _blocks(rows: Sequence[Gradients]) -> Iterator[Tensor]:
    """The K×P matrix in blocks (K, n) of float64, small parameters packed together and large ones cut."""
    packed: dict[torch.device, list[list[Tensor]]] = {}
    for column in zip(*rows, strict=True):
        some = next((g for g in column if g is not None), None)
        if some is None:
            continue
        flat = [_flatten(g) if g is not None else torch.zeros_like(_flatten(some)) for g in column]
        device, size = some.device, flat[0].numel()
        width = max(1, (_BLOCK_CPU if device.type == "cpu" else _BLOCK_ACCELERATOR) // len(rows))
        if size >= width:
            for start in range(0, size, width):
                yield _stack([[g[start : start + width]] for g in flat])
            continue
        waiting = packed.setdefault(device, [[] for _ in rows])
        for row, g in zip(waiting, flat, strict=True):
            row.append(g)
        if sum(g.numel() for g in waiting[0]) >= width:
            yield _stack(packed.pop(device))
    for waiting in packed.values():
        yield _stack(waiting)


def _flatten(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    if gradient.is_sparse or gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.reshape(-1)


def _stack(pieces: Sequence[Sequence[Tensor]]) -> Tensor:
    flat = torch.cat([piece for row in pieces for piece in row])
    # Apple's MPS has no float64: float32 is the best there is.
    return flat.to(torch.float32 if flat.device.type == "mps" else torch.float64).view(len(pieces), -1)
