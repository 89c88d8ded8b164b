"""The processes that train one model together: who they are, and what they must agree on.

With data parallelism every rank sees its own part of the batch. Each objective's gradient is the mean over the ranks,
and so are the losses; an objective that is absent on one rank counts there as zero. Whatever decides which collective
comes next is agreed on first, so that no rank waits for one that never comes.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from gradbalance.dtensor import is_dtensor
from gradbalance.passes import Graph


class Ranks:
    """The ranks of a process group, seen from one of them.

    Args:
        parameters: The optimizer's parameters.
        group: The process group over which gradients are averaged. Default: that of the ``DistributedDataParallel``
            that wraps the parameters, else the default group.

    Attributes:
        size: The number of ranks; 1 if nothing is distributed.
        sharded: Whether there are DTensor parameters: FSDP2 averages their gradients in the hooks of a whole pass.
        synced: For each parameter, whether some wrapper averages its gradient in a plain backward.
        awaited: For each parameter, whether DDP waits for its gradient in each backward.
        sparse: For each parameter, whether DDP expects sparse gradients.
        unused_allowed: Whether a DDP wrapper has ``find_unused_parameters=True``.

    Raises:
        RuntimeError: If a wrapper is one that balancing cannot work with; the message says what to use instead.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
        self._found_for = _circumstances(parameters)
        self._wrappers: list[weakref.ref[torch.nn.Module]] = []
        self.sharded = any(is_dtensor(p) for p in parameters)
        self.synced = [is_dtensor(p) for p in parameters]
        self.awaited = [False] * len(parameters)
        self.sparse = [False] * len(parameters)
        self.unused_allowed = False
        self.group = group
        self.size = 1
        if _world() is None:
            return
        for wrapper in _wrappers(parameters):
            wrapped = {id(p) for p in wrapper._module_parameters if p.requires_grad}
            foreign = len(wrapped) - sum(id(p) in wrapped for p in parameters)
            if wrapper.static_graph:
                raise RuntimeError(
                    "backward: DistributedDataParallel(static_graph=True) expects the same passes in each step, and "
                    "balancing takes K of them in some and one in others; use static_graph=False"
                )
            if foreign:
                raise RuntimeError(
                    f"backward: {foreign} trainable parameter(s) of the DistributedDataParallel model are not in this "
                    "optimizer. Only the optimizer's parameters get a gradient, so DDP would wait for the others for "
                    "ever: add them to the optimizer, or set requires_grad=False before the model is wrapped"
                )
            self._wrappers.append(weakref.ref(wrapper))
            self.unused_allowed |= bool(wrapper.find_unused_parameters)
            self.group = self.group or wrapper.process_group
            tables = {id(m.weight) for m in wrapper.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
            for i, p in enumerate(parameters):
                self.synced[i] |= id(p) in wrapped
                self.awaited[i] |= id(p) in wrapped and not wrapper.find_unused_parameters
                self.sparse[i] |= id(p) in wrapped and id(p) in tables
        self.size = dist.get_world_size(self.group)
        if self.size < 1:
            raise RuntimeError("backward: this rank is not in the process_group that the optimizer was given")

    def agree(self, values: Sequence[int], device: torch.device) -> list[int]:
        """The element-wise maximum over the ranks of small non-negative integers; reading it waits for the others."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.uint8, device=device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return [int(v) for v in tensor.tolist()]

    def total(self, vector: Tensor) -> Tensor:
        """The element-wise sum over the ranks, the same bits on each of them."""
        if self.size > 1:
            dist.all_reduce(vector, group=self.group)
        return vector

    def refuse(self, graph: Graph) -> None:
        """Raise if the wrappers cannot work with the graph."""
        if graph.reentrant and any(self.synced) and not self.sharded:
            raise RuntimeError(
                "backward: activation checkpointing with use_reentrant=True, or another function that runs a backward "
                "of its own, does not work under DistributedDataParallel, which would average the first objective's "
                "gradient only; checkpoint with use_reentrant=False"
            )

    def refuse_nothing(self, mask: int) -> None:
        """Raise if this rank, which has the objectives of the mask, ends a step with none where DDP needs one."""
        if self.unused_allowed and not mask and self.size > 1:
            raise RuntimeError(
                "backward: this rank has no loss in the step's last micro-batch, and DistributedDataParallel with "
                "find_unused_parameters=True cannot know what to wait for; pass 0 * loss"
            )

    def still_valid(self, parameters: Sequence[Tensor]) -> bool:
        """Whether what was found still holds: the same group, parameters and wrappers, and none newly frozen or not."""
        return self._found_for == _circumstances(parameters) and all(
            wrapper() is not None for wrapper in self._wrappers
        )


def _circumstances(parameters: Sequence[Tensor]) -> tuple[Any, ...]:
    return _world(), *(p.requires_grad for p in parameters)


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _wrappers(parameters: Sequence[Tensor]) -> list[torch.nn.parallel.DistributedDataParallel]:
    """The DDP modules that hold some of the parameters.

    An optimizer never sees the model, and parameters don't know who wraps them. So all living objects are looked
    through, once in an optimizer's life, or when something was frozen, unfrozen or wrapped anew.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    own = {id(p) for p in parameters}
    found = []
    for thing in gc.get_objects():
        kind = type(thing)
        data_parallel = issubclass(kind, torch.nn.parallel.DistributedDataParallel)
        first_fsdp = fsdp is not None and issubclass(kind, fsdp.FullyShardedDataParallel)
        if not (data_parallel or first_fsdp) or not any(id(p) in own for p in thing.parameters()):
            continue
        if first_fsdp:
            raise RuntimeError(
                "backward: the model is wrapped in FullyShardedDataParallel (FSDP1), which hides the gradients of the "
                "single objectives; use torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )
        found.append(thing)
    return found
