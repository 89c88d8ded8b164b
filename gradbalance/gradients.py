"""Reverse passes, and the K gradients of a refresh until they become one.

Two ways through the graph: :func:`reverse_pass` returns the gradient of one objective and touches no ``.grad``;
:func:`accumulate_pass` adds a weighted gradient to ``.grad`` as a plain ``loss.backward()`` would. Gradients that
autograd returned may be views or shared between parameters, so nothing here writes into them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbalance.gramian import gramian

_LOW_PRECISION = (torch.float16, torch.bfloat16)


def reverse_pass(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], parameters: Sequence[Tensor], *, retain_graph: bool
) -> list[Tensor | None]:
    """The vector-Jacobian product of ``outputs`` with ``cotangents``: one gradient a parameter, None if not reached."""
    return list(torch.autograd.grad(outputs, parameters, cotangents, retain_graph=retain_graph, allow_unused=True))


def accumulate_pass(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], parameters: Sequence[Tensor], *, retain_graph: bool
) -> None:
    """Add the vector-Jacobian product to the ``.grad`` of ``parameters``, and of nothing else, by one reverse pass."""
    if outputs and parameters:
        torch.autograd.backward(outputs, cotangents, retain_graph=retain_graph, inputs=list(parameters))


class ObjectiveGradients:
    """The gradient of every objective for every parameter, summed over the micro-batches of a refresh.

    Args:
        count: The number of objectives K.
        parameters: The P parameters, in a fixed order.
    """

    def __init__(self, count: int, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.rows: list[list[Tensor | None]] = [[None] * len(parameters) for _ in range(count)]

    def add(self, k: int, gradients: list[Tensor | None], *, more: bool) -> None:
        """Add one micro-batch's gradient of objective k. The list is emptied, so that nothing is held twice.

        Args:
            k: The objective.
            gradients: One gradient for each parameter that requires grad, as autograd returned them.
            more: Further micro-batches will be added, so the sum must be ours to write to.
        """
        row = self.rows[k]
        trainable = [p for p, parameter in enumerate(self.parameters) if parameter.requires_grad]
        for i, p in enumerate(trainable):
            gradient, gradients[i] = gradients[i], None
            held = row[p]
            if gradient is None:
                continue
            if held is not None:
                held.add_(gradient)
            elif more:
                # float32 keeps long sums of bf16 and fp16 gradients from stalling.
                row[p] = gradient.to(torch.float32 if gradient.dtype in _LOW_PRECISION else gradient.dtype, copy=True)
            else:
                row[p] = gradient

    def reached(self) -> list[list[bool]]:
        """For each parameter and objective, whether it is reached: structural, a zero gradient counts as reached."""
        return [[gradient is not None for gradient in column] for column in zip(*self.rows, strict=True)]

    def gramian(self, shared: Sequence[bool]) -> Tensor:
        """The K×K Gramian over the parameters marked as shared, float64 on the CPU."""
        return gramian([[g for g, s in zip(row, shared, strict=True) if s] for row in self.rows])

    def extra_norms(self, shared: Sequence[bool]) -> Tensor:
        """Each objective's gradient norm over the parameters that are *not* shared, shape (K,): to find infinities."""
        heads = [[g for g, s in zip(row, shared, strict=True) if not s] for row in self.rows]
        return torch.cat([gramian([row]).diagonal() for row in heads]).sqrt()

    def write(self, coefficients: Sequence[float], shared: Sequence[bool]) -> None:
        """Add Σ_k λ_k g_k (shared parameters) and Σ_k g_k (all others) to ``.grad``, freeing each g_k on the way."""
        with torch.no_grad():
            self._write_low_precision(coefficients, shared)
            for row, coefficient in zip(self.rows, coefficients, strict=True):
                for weight, of_shared in ((coefficient, True), (1.0, False)):
                    _add_scaled(
                        [
                            (self.parameters[p], gradient)
                            for p, gradient in enumerate(row)
                            if gradient is not None and shared[p] is of_shared
                        ],
                        weight,
                    )
                row.clear()

    def _write_low_precision(self, coefficients: Sequence[float], shared: Sequence[bool]) -> None:
        """bf16 and fp16 parameters: the K terms are added in float32 and rounded once."""
        for p, parameter in enumerate(self.parameters):
            if parameter.dtype not in _LOW_PRECISION:
                continue
            total: Tensor | None = None
            for row, coefficient in zip(self.rows, coefficients, strict=True):
                gradient, row[p] = row[p], None
                if gradient is not None:
                    term = gradient.float() * (coefficient if shared[p] else 1.0)
                    total = term if total is None else total.add_(term)
            if total is not None and parameter.grad is not None:
                parameter.grad.copy_(total.add_(parameter.grad))
            elif total is not None:
                parameter.grad = total.to(parameter.dtype)


def _add_scaled(pairs: Sequence[tuple[Tensor, Tensor]], weight: float) -> None:
    """``parameter.grad += weight · gradient`` for all pairs, by foreach kernels."""
    fresh = [(parameter, gradient) for parameter, gradient in pairs if parameter.grad is None]
    held = [(parameter.grad, gradient) for parameter, gradient in pairs if parameter.grad is not None]
    if held:
        torch._foreach_add_([grad for grad, _ in held], [gradient for _, gradient in held], alpha=weight)
    if fresh:
        scaled = torch._foreach_mul([gradient for _, gradient in fresh], weight)
        for (parameter, _), gradient in zip(fresh, scaled, strict=True):
            parameter.grad = gradient
