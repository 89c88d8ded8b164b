"""Moving averages of the objectives' past gradients, kept in the inner optimizer's state, where checkpoints keep them.

``optimizer.state[p]["gradbalance_past"]`` holds the K averages for parameter p, shape (K, *p.shape), in p's dtype, to
which torch casts a parameter's state when it loads one. Like the inner optimizer's own buffers they are changed in
place by ``step`` and by nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

KEY = "gradbalance_past"


def past(optimizer: Optimizer, parameters: Sequence[Tensor], count: int) -> list[list[Tensor | None]]:
    """The averages as K rows with one entry a parameter, None where there is none."""
    held = [optimizer.state[p].get(KEY) if p in optimizer.state else None for p in parameters]
    return [[None if averages is None else averages[k] for averages in held] for k in range(count)]


def reserve(optimizer: Optimizer, parameters: Sequence[Tensor], count: int) -> None:
    """Make room: zeros for each parameter that has a gradient and no averages.

    DCP loads only what is there, so what is there must not depend on which parameters are shared. Those without a
    gradient are left alone, as an inner optimizer takes a state that is not empty for its own.
    """
    for p in parameters:
        if p.grad is not None and KEY not in optimizer.state[p]:
            optimizer.state[p][KEY] = torch.zeros((count, *p.shape), dtype=p.dtype, device=p.device)


def remember(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    rows: Sequence[Sequence[Tensor | None]],
    newest: Sequence[float],
) -> None:
    """Move the averages of those parameters that have them.

    Args:
        optimizer: The inner optimizer, after its step.
        parameters: The parameters whose past counts.
        rows: The K gradients, one entry for each of these; None is zero.
        newest: The weight of each objective's gradient in its new average; 0 leaves it.
    """
    with torch.no_grad():
        for parameter, column in zip(parameters, zip(*rows, strict=True), strict=True):
            averages = optimizer.state[parameter].get(KEY) if parameter in optimizer.state else None
            for k, (gradient, weight) in enumerate(zip(column, newest, strict=True)):
                if averages is not None and weight > 0:
                    target = torch.zeros_like(averages[k]) if gradient is None else _dense(gradient).to(averages)
                    averages[k].lerp_(target, weight)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
