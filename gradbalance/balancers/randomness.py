"""Chance that a checkpoint keeps: every call has a generator of its own, so the number of calls is all the state."""

import torch

GOLDEN = 0x9E3779B97F4A7C15
"""2⁶⁴ over the golden ratio: keeps the streams of neighbouring seeds apart."""


def generator(seed: int, calls: int) -> torch.Generator:
    """Return the generator of call number ``calls``; torch's global one is left alone."""
    return torch.Generator().manual_seed((seed * GOLDEN + calls) % 2**63)
