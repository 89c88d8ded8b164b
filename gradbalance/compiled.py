"""Passing more than once through a graph that ``torch.compile`` made.

A compiled backward may overwrite the tensors that the forward saved for it ("donated buffers"): it is made to run once.
torch refuses to keep such a graph, and its setting against that does not reach code that is in the compiler's cache
already. So what was saved is copied before a pass after which another one comes, and put back after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradbalance.dtensor import local


class Saved:
    """What the compiled parts of a graph saved for their backward, and copies of it.

    Args:
        nodes: The compiled nodes of the graph.
    """

    def __init__(self, nodes: Sequence[Any]) -> None:
        self._nodes = nodes
        saved = [t for n in nodes for t in (*n.saved_tensors, *getattr(n, "_tensors_no_vc_check", ()))]
        # Parameters are never overwritten.
        saved = [local(t) for t in saved if isinstance(t, Tensor) and not (t.is_leaf and t.requires_grad)]
        self._pairs = [(tensor, tensor.detach().clone()) for tensor in saved]
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in saved}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a pass with ``retain_graph=True``: afterwards all is as before."""
        functions = [type(node)._forward_cls for node in self._nodes]
        donated = [function.metadata.bw_donated_idxs for function in functions]
        for function in functions:
            function.metadata.bw_donated_idxs = []  # what torch looks at to refuse the pass
        try:
            yield
        finally:
            for function, indices in zip(functions, donated, strict=True):
                function.metadata.bw_donated_idxs = indices
            with torch.no_grad():
                for tensor, copy in self._pairs:
                    with torch.autograd._unsafe_preserve_version_counter(tensor):  # type: ignore[attr-defined]
                        tensor.copy_(copy)

    def apart(self, gradient: Tensor) -> Tensor:
        """The gradient, copied if it lies in memory that is about to be put back."""
        part = local(gradient)
        inside = part.layout == torch.strided and part.untyped_storage().data_ptr() in self._memory
        return gradient.clone() if inside else gradient
