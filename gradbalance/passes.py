"""Reverse passes: asking autograd for a gradient, in one of two ways.

By default autograd is asked for the gradients of given parameters and computes nothing else. A *whole* pass is a plain
``.backward()`` through everything, its gradients picked up from ``.grad``: FSDP2 reduces gradients in the hooks of such
a pass, and reentrant activation checkpointing runs one of its own inside; neither can be asked for given parameters.

Gradients that autograd returned may be views or shared between parameters, so nothing may write into them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Graph(NamedTuple):
    """What a walk through a graph found.

    Attributes:
        leaves: The tensors that would get a ``.grad``.
        reentrant: Whether a part of it is checkpointed with ``use_reentrant=True``; what that part reaches is unknown.
        compiled: Whether a part of it is compiled: it returns zeros where an eager graph returns None.
    """

    leaves: list[Tensor]
    reentrant: bool
    compiled: bool


def walk(outputs: Sequence[Tensor]) -> Graph:
    """Walk through the graph of ``outputs``, in Python: about a microsecond a node."""
    leaves = {id(output): output for output in outputs if output.grad_fn is None and output.requires_grad}
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    names = set()
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                nodes.append(child)
    return Graph(list(leaves.values()), "CheckpointFunctionBackward" in names, "CompiledFunctionBackward" in names)


def reverse_pass(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    retain_graph: bool,
    whole: bool = False,
) -> list[Tensor | None]:
    """The vector-Jacobian product of ``outputs`` with ``cotangents``: one gradient a parameter, None if not reached.

    No ``.grad`` is changed.
    """
    if not whole:
        return list(torch.autograd.grad(outputs, parameters, cotangents, retain_graph=retain_graph, allow_unused=True))
    with _grads_kept([*parameters, *walk(outputs).leaves]):
        torch.autograd.backward(outputs, cotangents, retain_graph=retain_graph)
        return [parameter.grad for parameter in parameters]


def accumulate_pass(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    retain_graph: bool,
    whole_but: Sequence[Tensor] | None = None,
) -> None:
    """Add the vector-Jacobian product to the ``.grad`` of ``parameters`` by one reverse pass, as ``.backward()`` would.

    Args:
        outputs: Where the pass starts.
        cotangents: One for each output.
        parameters: Those that get the gradient, and nothing else does.
        retain_graph: Whether another pass follows.
        whole_but: Makes it a whole pass; the ``.grad`` of these stays as it is.
    """
    if not outputs or not parameters:
        return
    if whole_but is None:
        torch.autograd.backward(outputs, cotangents, retain_graph=retain_graph, inputs=list(parameters))
        return
    with _grads_kept(whole_but):
        torch.autograd.backward(outputs, cotangents, retain_graph=retain_graph)


@contextmanager
def _grads_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the ``.grad`` of ``tensors`` is None to begin with; afterwards it is what it was before."""
    before = {id(tensor): (tensor, tensor.grad) for tensor in tensors}
    for tensor, _ in before.values():
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in before.values():
            tensor.grad = grad
