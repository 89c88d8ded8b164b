"""The processes that train one model together: who they are, and what they must agree on.

With data parallelism every rank sees its own part of the batch. Each objective's gradient is the mean over the ranks,
and so are the losses; an objective that is absent on one rank counts there as zero. Whatever decides which collective
comes next is agreed on first, so that no rank waits for one that never comes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

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

    Raises:
        RuntimeError: If a wrapper is one that balancing cannot work with; the message says what to use instead.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
        self.world = _world()
        self.sharded = any(is_dtensor(p) for p in parameters)
        self.synced = [is_dtensor(p) for p in parameters]
        self.awaited = [False] * len(parameters)
        self.sparse = [False] * len(parameters)
        self.group = group
        self.size = 1
        if self.world is None:
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
                "backward: activation checkpointing with use_reentrant=True does not work under "
                "DistributedDataParallel, which would average the first objective's gradient only; use_reentrant=False"
            )

    def still_valid(self, parameters: Sequence[Tensor]) -> bool:
        """Whether what was found still holds: the process group is the same, and no parameter was added."""
        return self.world is _world() and len(self.synced) == len(parameters)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is distributed over ranks. Nobody can have made one without the module being loaded."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(gradient: Tensor) -> Tensor:
    """This rank's part of a gradient."""
    part: Tensor = gradient.to_local() if is_dtensor(gradient) else gradient  # type: ignore[attr-defined]
    return part


def copies(parameter: Any, ranks: int) -> int:
    """On how many of the ranks each number of a parameter's gradient lies."""
    if not is_dtensor(parameter):
        return 1
    parts = 1
    for dim, placement in enumerate(parameter.placements):
        parts *= parameter.device_mesh.size(dim) if placement.is_shard() else 1
    return max(1, ranks // parts)


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _wrappers(parameters: Sequence[Tensor]) -> list[torch.nn.parallel.DistributedDataParallel]:
    """The DDP modules that hold some of the parameters.

    An optimizer never sees the model, and parameters don't know who wraps them. So all living objects are looked
    through, once in an optimizer's life.
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
