"""The gradients of a refresh, from the reverse passes that find them until they become one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbalance.devices import together
from gradbalance.dtensor import copies, is_dtensor, local, placed
from gradbalance.gramian import gramian

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class ObjectiveGradients:
    """Rows of gradients, one for each objective (and part), one entry a parameter, summed over micro-batches.

    Args:
        count: The number of rows.
        parameters: The parameters, in a fixed order.

    Attributes:
        rows: ``rows[k][p]``, None where parameter p is not reached.
    """

    def __init__(self, count: int, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.rows: list[list[Tensor | None]] = [[None] * len(parameters) for _ in range(count)]
        self._ours = [[False] * len(parameters) for _ in range(count)]

    def add(self, k: int, gradients: list[Tensor | None]) -> None:
        """Add one micro-batch's gradient of objective k. The list is emptied, so that nothing is held twice.

        Args:
            k: The row.
            gradients: One gradient for each parameter that requires grad, as autograd returned them.
        """
        row, ours = self.rows[k], self._ours[k]
        trainable = [p for p, parameter in enumerate(self.parameters) if parameter.requires_grad]
        for i, p in enumerate(trainable):
            gradient, gradients[i] = gradients[i], None
            if gradient is None:
                continue
            gradient = placed(gradient, self.parameters[p])
            held = row[p]
            if held is None:
                row[p] = gradient
            elif ours[p] and not held.is_sparse:
                held.add_(gradient)
            else:
                # Autograd's own tensors are never written into; float32 keeps long sums of bf16 and fp16 from stalling.
                dense, other = (gradient, held) if held.is_sparse else (held, gradient)
                row[p] = wide(dense) + other
                ours[p] = True

    def reached(self) -> list[list[int]]:
        """For each row and parameter: 0 not reached, 1 reached, 2 reached by a sparse gradient.

        Structural: a gradient of zeros counts as reached.
        """
        return [[0 if g is None else 2 if g.is_sparse else 1 for g in row] for row in self.rows]

    def nonzero(self, rows: slice) -> list[list[int]]:
        """For some rows and each parameter, 1 if the gradient is there and not all zeros. Copies flags to the host."""
        chosen = self.rows[rows]
        some = {(k, p): local(g).any() for k, row in enumerate(chosen) for p, g in enumerate(row) if g is not None}
        result = [[0] * len(self.parameters) for _ in chosen]
        flags = list(some.values())
        if flags:
            for (k, p), flag in zip(some, torch.stack([f.to(flags[0].device) for f in flags]).tolist(), strict=True):
                result[k][p] = int(flag)
        return result

    def drop(self, keep: Sequence[Sequence[bool | int]]) -> None:
        """Forget the gradients that are not to be kept."""
        for row, kept in zip(self.rows, keep, strict=True):
            row[:] = [g if wanted else None for g, wanted in zip(row, kept, strict=True)]

    def gramian(
        self,
        chosen: Sequence[bool],
        rows: slice = slice(None),
        *,
        ranks: int = 1,
        others: Sequence[Sequence[Tensor | None]] = (),
    ) -> Tensor:
        """The Gramian of some rows over the chosen parameters, float64, on the gradients' device.

        Args:
            chosen: For each parameter, whether it counts.
            rows: Which rows.
            ranks: With more than one, the result is this rank's part: the sum over the ranks is the Gramian.
            others: More rows, held elsewhere.
        """
        counted = [*self.rows[rows], *others]
        total: Tensor | None = None
        counts = [copies(parameter, ranks) for parameter in self.parameters]
        for count in sorted({c for c, wanted in zip(counts, chosen, strict=True) if wanted}):
            here = [p for p, wanted in enumerate(chosen) if wanted and counts[p] == count]
            part = gramian([[None if (g := row[p]) is None else local(g) for p in here] for row in counted])
            part = part / count if count > 1 else part
            total = part if total is None else torch.add(*together(total, part))
        return gramian([[] for _ in counted]) if total is None else total

    def write(self, weights: Sequence[float], shared: Sequence[bool]) -> None:
        """Add Σ_k w_k g_k (shared parameters) and Σ_k g_k (all others) to ``.grad``, freeing each g_k on the way.

        Args:
            weights: One for each row.
            shared: For each parameter, whether it is balanced.
        """
        with torch.no_grad():
            self._write_low_precision(weights, shared)
            for row, weight in zip(self.rows, weights, strict=True):
                for factor, of_shared in ((weight, True), (1.0, False)):
                    _add_scaled(
                        [
                            (self.parameters[p], gradient)
                            for p, gradient in enumerate(row)
                            if gradient is not None and shared[p] is of_shared
                        ],
                        factor,
                    )
                row.clear()

    def _write_low_precision(self, weights: Sequence[float], shared: Sequence[bool]) -> None:
        """bf16 and fp16 parameters: the K terms are added in float32 and rounded once."""
        for p, parameter in enumerate(self.parameters):
            if parameter.dtype not in _LOW_PRECISION:
                continue
            total: Tensor | None = None
            for row, weight in zip(self.rows, weights, strict=True):
                gradient, row[p] = row[p], None
                if gradient is not None:
                    term = wide(gradient) * (weight if shared[p] else 1.0)
                    total = term if total is None else total + term
            if total is not None:
                add_to_grad(parameter, total)


def wide(gradient: Tensor) -> Tensor:
    """A gradient of bf16 or fp16 as float32, any other as it is."""
    return gradient.float() if gradient.dtype in _LOW_PRECISION else gradient


def add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    """``parameter.grad += gradient``, which may be more precise than the parameter, sparse, or both."""
    held = parameter.grad
    # torch lets a parameter name another dtype for its gradient.
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    if held is None:
        parameter.grad = gradient.to(dtype)
    elif held.is_sparse or gradient.is_sparse:
        dense, other = (gradient, held) if held.is_sparse else (held, gradient)
        parameter.grad = (dense + other).to(dtype)
    else:
        held.copy_(held + gradient)


def _add_scaled(pairs: Sequence[tuple[Tensor, Tensor]], weight: float) -> None:
    """``parameter.grad += weight · gradient`` for all pairs, by foreach kernels where they can be had."""
    fresh, held = [], []
    for parameter, gradient in pairs:
        if gradient.is_sparse or (parameter.grad is not None and parameter.grad.is_sparse):
            add_to_grad(parameter, gradient * weight)
        elif parameter.grad is None:
            fresh.append((parameter, gradient))
        else:
            held.append((parameter.grad, gradient))
    for distributed in (False, True):  # the kernels take one kind at a time
        some = [pair for pair in held if is_dtensor(pair[1]) is distributed]
        if some:
            torch._foreach_add_([grad for grad, _ in some], [gradient for _, gradient in some], alpha=weight)
        some = [pair for pair in fresh if is_dtensor(pair[1]) is distributed]
        if some:
            scaled = torch._foreach_mul([gradient for _, gradient in some], weight)
            for (parameter, _), gradient in zip(some, scaled, strict=True):
                parameter.grad = gradient
