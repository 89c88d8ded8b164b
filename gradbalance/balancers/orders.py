"""Random orders for methods that go through pairs of objectives, the same after a resume."""

import numpy as np
import torch
from numpy.typing import NDArray

Orders = NDArray[np.intp]


def random_orders(seed: int, calls: int, size: int) -> Orders:
    """Draw, for every objective, an order of the others.

    A generator is made for every call, so that the number of calls is all the state there is.

    Args:
        seed: of the balancer.
        calls: how often the balancer has drawn before.
        size: K.

    Returns:
        Row k holds the other objectives as k meets them, shape (K, K − 1).
    """
    # The factor keeps the streams of neighbouring seeds apart.
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + calls) % 2**63)
    keys = torch.rand(size, size, generator=generator, dtype=torch.float64)
    keys.fill_diagonal_(2.0)  # sorts an objective itself last
    orders: Orders = keys.argsort(dim=1)[:, : size - 1].numpy()
    return orders
