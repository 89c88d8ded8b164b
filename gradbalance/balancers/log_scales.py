"""Learned scales e^u of the losses: what uncertainty weighting and IMTL-L have in common.

Both minimise e^u L − u over u, along with the losses, by gradient steps; the minimum is at e^u L = 1, where every
scaled loss is 1.
"""

import numpy as np

from gradbalance.balancers.checks import Array
from gradbalance.balancers.losses import Mask

LARGEST_STEP = 1.0
"""A loss that is large beyond its scale would throw u so far down in one step that it takes thousands to come back."""

BOUND = 50.0
"""On |u|; e^50 is 5e21. A loss that stays ≤ 0 has no minimum and would send u to infinity."""


def advance(u: Array, losses: Array, here: Mask, lr: float) -> Array:
    """Take one gradient step on e^u L − u, for the objectives that are here.

    Args:
        u: shape (K,).
        losses: L, shape (K,).
        here: which objectives are present.
        lr: learning rate.
    """
    step = np.clip(lr * (np.exp(u) * losses - 1.0), -LARGEST_STEP, LARGEST_STEP)
    return np.where(here, np.clip(u - step, -BOUND, BOUND), u)
