"""What the balancers that look at losses share: who is present, what is remembered, shares that sum to 1.

An objective whose loss is NaN (or infinite) is absent: it takes no part and what is remembered of it stays.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradbalance.balancers.checks import Array, loss_values

Mask = NDArray[np.bool_]


def presence(losses: Tensor | None, size: int, user: str) -> Mask:
    """Say which of the K objectives are present: all, where no losses are given; see ``loss_values``."""
    return np.ones(size, dtype=np.bool_) if losses is None else np.isfinite(loss_values(losses, size, user))


def seen(losses: Tensor | None, size: int, user: str) -> tuple[Array, Mask]:
    """Return the K loss values, 0 for absent objectives, and who is present; see ``loss_values``."""
    values = loss_values(losses, size, user)
    here = np.isfinite(values)
    return np.where(here, values, 0.0), here


def check_nonnegative(name: str, values: Array) -> None:
    """Raise ValueError if one of the K values is negative; the message names what it is and the objective."""
    if values.min() < 0:
        worst = int(values.argmin())
        raise ValueError(f"{name} must be ≥ 0, got {values[worst]} for objective {worst}")


def remembered(values: Sequence[float], size: int, start: float = 0.0) -> Array:
    """Return what a balancer keeps for each of the K objectives, ``start`` before the first call.

    Raises:
        ValueError: the calls before had another K.
    """
    if not values:
        return np.full(size, start)
    if len(values) != size:
        raise ValueError(f"the calls before had {len(values)} objectives, this one has {size}")
    return np.array(values, dtype=np.float64)


def softmax(logits: Array, here: Mask) -> Array:
    """Return exp(logits), normalised over the objectives that are here, 0 for others; 1/K each if none is."""
    masked = np.where(here, logits, -np.inf)
    top = masked.max()
    if top == -np.inf:
        return np.full(len(logits), 1.0 / len(logits))
    powers = np.exp(masked - top)
    shares: Array = powers / powers.sum()
    return shares
