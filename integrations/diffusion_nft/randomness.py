"""Every random draw is a function of the seed and of what it is for.

So a run needs no generator state to be resumed, and a picture's noise does not depend on batch sizes or on order.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch


def generator(seed: int, purpose: str, *indices: int) -> torch.Generator:
    """A CPU generator for one purpose, e.g. `generator(seed, "rollout", step)`."""
    state = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *indices]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


def noise(shape: tuple[int, ...], count: int, source: torch.Generator) -> torch.Tensor:
    """Standard normal noise (count, *shape), drawn one item at a time: any split of the items draws the same."""
    return torch.stack([torch.randn(shape, generator=source) for _ in range(count)])
