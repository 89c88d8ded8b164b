"""Moving small tensors about without making the host wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on ``device``, in ``dtype`` if given. From the host it is sent without waiting for it to arrive.

    What is sent must not be written to afterwards.
    """
    return tensor.to(device, dtype or tensor.dtype, non_blocking=tensor.device.type == "cpu")


def together(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both on one device, and never copied to the host for it."""
    if first.device.type == "cpu":
        return sent(first, second.device), second
    return first, sent(second, first.device)
