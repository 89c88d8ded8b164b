"""Random orders for methods that go through pairs of objectives, the same after a resume."""

import numpy as np
import torch
from numpy.typing import NDArray

from gradbalance.balancers.randomness import generator

Orders = NDArray[np.intp]


def random_orders(seed: int, calls: int, size: int) -> Orders:
    """Draw, for every objective, an order of the others.

    Args:
        seed: of the balancer.
        calls: how often the balancer has drawn before.
        size: K.

    Returns:
        Row k holds the other objectives as k meets them, shape (K, K − 1).
    """
    keys = torch.rand(size, size, generator=generator(seed, calls), dtype=torch.float64)
    keys.fill_diagonal_(2.0)  # sorts an objective itself last
    orders: Orders = keys.argsort(dim=1)[:, : size - 1].numpy()
    return orders
