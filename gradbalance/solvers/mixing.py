"""Groups and preferences: changes of the K vectors before the min-norm problem, as functions of the Gramian alone.

Both are a few tensor operations on whatever device the Gramian is, for any leading dimensions, without looking at a
value, and autograd differentiates them.
"""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral

import torch
from torch import Tensor

from gradbalance.solvers.checks import NEGLIGIBLE_NORM

CANCELLED = 1e-14
"""A group's mean is 0 when its square norm is below this share of that of its members without their directions."""


def prefer(gramian: Tensor, preference: Sequence[float] | Tensor) -> Tensor:
    """Return the Gramian of g_k / p_k.

    Args:
        gramian: shape (…, K, K).
        preference: p, K positive numbers; the values of a tensor on another device than the CPU are not checked.

    Raises:
        ValueError: there are not K of them, or one is not positive and finite.
    """
    size = gramian.shape[-1]
    if isinstance(preference, Tensor):
        known = preference.device.type == "cpu" and not torch.compiler.is_compiling()
        fine = preference.shape == (size,) and (not known or bool(((preference > 0) & preference.isfinite()).all()))
        p = preference.to(gramian)
    else:
        try:
            fine = len(preference) == size and all(0 < value < math.inf for value in preference)
        except TypeError:  # no sequence, or not of numbers
            fine = False
        if fine:  # filled number by number, which a CUDA graph can hold, unlike a copy of a list
            p = torch.cat([gramian.new_full((1,), float(value)) for value in preference])
    if not fine:
        raise ValueError(f"preference must hold {size} finite numbers > 0, got {preference!r}")
    return gramian / (p[:, None] * p)


def group(gramian: Tensor, groups: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the Gramian of the groups' mean gradients, and the share of each objective in its group.

    The mean is over the members that have a gradient.

    Args:
        gramian: shape (…, K, K).
        groups: G lists of indices that partition 0 … K−1.

    Returns:
        The Gramian, shape (…, G, G), and the shares, shape (…, G, K): the means are shares @ gradients.

    Raises:
        ValueError: the lists are not a partition.
    """
    size = gramian.shape[-1]
    members = [list(each) if isinstance(each, Iterable) else [] for each in groups]
    given = [index for each in members for index in each]
    whole = all(members) and all(isinstance(index, Integral) for index in given)
    if not whole or sorted(given) != list(range(size)):
        raise ValueError(
            f"groups must be non-empty lists, such as [[0, 1], [2]], that hold each of 0 … {size - 1} once, "
            f"got {groups!r}"
        )
    indices = torch.arange(size, device=gramian.device)
    inside = torch.stack([torch.stack([indices == index for index in each]).any(0) for each in members])
    norms = gramian.detach().diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
    active = norms > NEGLIGIBLE_NORM * norms.amax(-1, keepdim=True)
    counted = inside & active[..., None, :]
    counted = torch.where(counted.any(-1, keepdim=True), counted, inside)
    shares = counted.to(gramian.dtype) / counted.sum(-1, keepdim=True)
    means = shares @ gramian @ shares.mT
    lengths = (shares * norms[..., None, :]).sum(-1)
    here = means.detach().diagonal(dim1=-2, dim2=-1) > CANCELLED * lengths.square()
    return means * (here[..., :, None] & here[..., None, :]), shares
