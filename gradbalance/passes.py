"""Reverse passes: asking autograd for a gradient, in one of two ways.

By default autograd is asked for the gradients of given parameters and computes nothing else. A *whole* pass is a plain
``.backward()`` through everything, its gradients picked up from ``.grad``: FSDP2 reduces gradients in the hooks of such
a pass, and reentrant activation checkpointing runs one of its own inside; neither can be asked for given parameters.

Gradients that autograd returned may be views or shared between parameters, so nothing may write into them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradbalance.compiled import Saved

_LEAF = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_WRITTEN_IN_PYTHON = torch.autograd.function.BackwardCFunction
_ELEMENTWISE = ("DivBackward0", "MulBackward0", "AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0")


class Graph(NamedTuple):
    """What a walk through a graph found.

    Attributes:
        leaves: The tensors that would get a ``.grad``, as far as known.
        reentrant: Whether a part of it runs a backward of its own, as checkpoints with ``use_reentrant=True`` do, which
            hides its leaves.
        compiled: The nodes that stand for compiled parts: they return zeros where an eager graph returns None.
    """

    leaves: list[Tensor]
    reentrant: bool
    compiled: list[Any]


def walk(outputs: Sequence[Tensor]) -> Graph:
    """Walk through the graph of ``outputs``, in Python: about half a microsecond a node."""
    graph = _walk_from([output.grad_fn for output in outputs if output.grad_fn is not None])
    leaves = [output for output in outputs if output.grad_fn is None and output.requires_grad]
    return graph._replace(leaves=list({id(leaf): leaf for leaf in [*leaves, *graph.leaves]}.values()))


def _walk_from(nodes: list[Any]) -> Graph:
    leaves: dict[int, Tensor] = {}
    seen = set(nodes)
    reentrant, compiled = False, []
    while nodes:
        node = nodes.pop()
        if type(node) is _LEAF:
            leaves[id(node.variable)] = node.variable
            continue
        if isinstance(node, _WRITTEN_IN_PYTHON):
            if type(node).__name__ == "CompiledFunctionBackward":
                compiled.append(node)
            elif _runs_a_backward(type(node)):  # type: ignore[arg-type]
                reentrant = True
                leaves.update((id(p), p) for p in _hidden(node))
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                nodes.append(child)
    return Graph(list(leaves.values()), reentrant, compiled)


def stacked(losses: Tensor) -> list[set[int]] | None:
    """The ``id`` of the leaves that each entry of a 1-D tensor comes from, if it was stacked from scalars; else None.

    Autograd itself cannot tell: it gives zeros to what an entry alone does not reach.
    """
    node: Any = losses.grad_fn
    while node is not None and type(node).__name__ in _ELEMENTWISE:
        inputs = [child for child, _ in node.next_functions if child is not None]
        node = inputs[0] if len(inputs) == 1 else None
    if type(node).__name__ not in ("StackBackward0", "CatBackward0") or len(node.next_functions) != len(losses):
        return None
    parts = [[child] if child is not None else [] for child, _ in node.next_functions]
    return [{id(leaf) for leaf in _walk_from(part).leaves} for part in parts]


@cache
def _runs_a_backward(kind: type) -> bool:
    """Whether a function's backward is seen to call ``backward``; one that hides it is found by what it leaves."""
    backward: Any = getattr(getattr(kind, "_forward_cls", None), "backward", None)
    code = getattr(inspect.unwrap(backward), "__code__", None) if callable(backward) else None
    return "backward" in getattr(code, "co_names", ())


def _hidden(checkpoint: Any) -> list[Tensor]:
    """The parameters inside a reentrant checkpoint, if what it runs is a module or a module's method."""
    function = getattr(checkpoint, "run_function", None)
    module = getattr(function, "__self__", function)
    return list(module.parameters()) if isinstance(module, torch.nn.Module) else []


def reverse_pass(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    retain_graph: bool,
    whole: bool = False,
    saved: Saved | None = None,
) -> list[Tensor | None]:
    """The vector-Jacobian product of ``outputs`` with ``cotangents``: one gradient a parameter, None if not reached.

    No ``.grad`` is changed.

    Args:
        outputs: Where the pass starts.
        cotangents: One for each output.
        parameters: Whose gradients are wanted.
        retain_graph: Whether another pass follows.
        whole: Whether it must be a whole pass.
        saved: What compiled parts of the graph saved.
    """
    if saved is not None and retain_graph:
        with saved.kept():
            found = reverse_pass(outputs, cotangents, parameters, retain_graph=True, whole=whole)
            return [None if gradient is None else saved.apart(gradient) for gradient in found]
    if not whole:
        with _grads_kept(parameters):
            asked = torch.autograd.grad(outputs, parameters, cotangents, retain_graph=retain_graph, allow_unused=True)
            # A function that runs a backward of its own adds to .grad.
            inside = [parameter.grad for parameter in parameters]
        return [a if b is None else b if a is None else a + b for a, b in zip(asked, inside, strict=True)]
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
    saved: Saved | None = None,
) -> None:
    """Add the vector-Jacobian product to the ``.grad`` of ``parameters`` by one reverse pass, as ``.backward()`` would.

    Args:
        outputs: Where the pass starts.
        cotangents: One for each output.
        parameters: Those that get the gradient, and nothing else does.
        retain_graph: Whether another pass follows.
        whole_but: Makes it a whole pass; the ``.grad`` of these stays as it is.
        saved: What compiled parts of the graph saved.
    """
    if not outputs or not parameters:
        return
    if saved is not None and retain_graph:
        with saved.kept():
            accumulate_pass(outputs, cotangents, parameters, retain_graph=True, whole_but=whole_but)
            for parameter in parameters:
                parameter.grad = None if parameter.grad is None else saved.apart(parameter.grad)
    elif whole_but is None:
        torch.autograd.backward(outputs, cotangents, retain_graph=retain_graph, inputs=list(parameters))
    else:
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
