"""Sequential: a schedule by hand, one set of coefficients after the other."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import integer, sized, vector


class Sequential(Balancer):
    """Use fixed coefficients for a number of calls, then the next ones: curricula such as "first A, then A and B".

    λ = the weights of the stage that the count of calls is in. Neither losses nor gradients have any influence. It is
    the practice of training on one reward after the other, with its known fault: what an earlier stage won may be lost
    in a later one.

    Stages are counted in calls: an optimizer asks at every step, as this method needs no gradients.

    Args:
        stages: pairs (calls, weights), weights being λ as K numbers. The last stage goes on for ever.
    """

    uses_gradients = False
    STATE: ClassVar[tuple[str, ...]] = ("calls",)

    def __init__(self, stages: Sequence[tuple[int, Sequence[float] | Tensor]]) -> None:
        if not isinstance(stages, Sequence) or not stages or not all(_is_pair(stage) for stage in stages):
            raise ValueError(f"stages must be pairs (calls, weights) like [(100, [1, 0]), (1, [1, 1])], got {stages!r}")
        self.stages = [
            (integer(f"calls of stage {i}", calls, least=1), vector(f"weights of stage {i}", weights))
            for i, (calls, weights) in enumerate(stages)
        ]
        self.calls = 0

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return the weights of the stage that runs. Advances the count of calls."""
        stage, left = 0, self.calls
        while stage < len(self.stages) - 1 and left >= self.stages[stage][0]:
            left -= self.stages[stage][0]
            stage += 1
        weights = sized(f"weights of stage {stage}", self.stages[stage][1], len(gramian))
        self.calls += 1
        return torch.from_numpy(weights)


def _is_pair(stage: object) -> bool:
    return isinstance(stage, tuple | list) and len(stage) == 2
