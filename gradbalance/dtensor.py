"""Tensors that lie in parts on several ranks, as FSDP2 and tensor parallelism make them."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is distributed over ranks. Nobody can have made one without the module being loaded."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(gradient: Tensor) -> Tensor:
    """This rank's part of a gradient."""
    part: Tensor = gradient.to_local() if is_dtensor(gradient) else gradient  # type: ignore[attr-defined]
    return part


def placed(gradient: Any, parameter: Any) -> Tensor:
    """The gradient laid out as its parameter is: tensor parallelism may leave a sum to be done."""
    if is_dtensor(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    result: Tensor = gradient
    return result


def whole(tensor: Any) -> Tensor:
    """The tensor itself, put together from its parts."""
    result: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return result


def copies(parameter: Any, ranks: int) -> int:
    """On how many of the ranks each number of a parameter's gradient lies."""
    if not is_dtensor(parameter):
        return 1
    parts = 1
    for dim, placement in enumerate(parameter.placements):
        parts *= 1 if placement.is_replicate() else parameter.device_mesh.size(dim)
    return max(1, ranks // parts)
