"""Bitwise comparison of whatever training leaves behind."""

import copy

import torch
from torch.utils._pytree import tree_flatten


def identical(a, b):
    """The same nested lists and dicts, with the same bits in every tensor."""
    (a, shape), (b, other) = tree_flatten(a), tree_flatten(b)
    return shape == other and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _same(x, y):
    if isinstance(x, torch.Tensor):
        return isinstance(y, torch.Tensor) and x.dtype == y.dtype and torch.equal(x, y)
    return x == y


def snapshot(model, optimizer):
    """Parameters, inner state (moments, counts), balancing state: all that a step may change."""
    return copy.deepcopy((list(model.parameters()), optimizer.state_dict()))
