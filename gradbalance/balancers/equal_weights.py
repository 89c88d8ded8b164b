"""Equal weights in another balancer's place: the last stage of a run (``uniform_after``)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import array
from gradbalance.balancers.losses import presence
from gradbalance.balancers.wrapping import Wrapping
from gradbalance.solvers.checks import active_rows


class EqualWeights(Wrapping):
    """Weigh all objectives that have a gradient alike and scale the weights as the inner balancer does.

    For :class:`~gradbalance.balancers.Marble` α = 1/K on unit gradients; for a balancer of raw gradients the mean of
    the gradients. The inner balancer's state is this one's, and stays as it is.

    Args:
        balancer: whose place it takes, one with weights on the simplex and without a ``preference``, which equal
            weights would not keep.

    Raises:
        ValueError: ``balancer`` is another one.
    """

    def __init__(self, balancer: Balancer) -> None:
        super().__init__(balancer)
        inner = balancer
        while isinstance(inner, Wrapping):
            inner = inner.balancer
        if not self.simplex:
            raise ValueError(
                f"uniform_after needs a balancer whose weights are non-negative with sum 1, such as 'marble' or "
                f"'modo'; those of {type(inner).__name__} are not"
            )
        if getattr(inner, "preference", None) is not None:
            raise ValueError("uniform_after and preference exclude each other: equal weights keep no preference")

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return 1/n for the n objectives that are present with a gradient, 0 for the others."""
        m = array(gramian)
        active = active_rows(np.sqrt(m.diagonal()))
        if losses is not None:
            active = active & presence(losses, len(m), "EqualWeights")
        return torch.from_numpy(active / max(np.count_nonzero(active), 1))

    def scale(self, weights: Tensor, gramian: Tensor) -> Tensor:
        """Return what the inner balancer makes of the weights."""
        return self.balancer.scale(weights, gramian)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner balancer's state."""
        return self.balancer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the inner balancer's state."""
        self.balancer.load_state_dict(state_dict)
