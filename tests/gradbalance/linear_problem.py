"""Linear losses under any balancer: the geometry of K given gradients, and the balancers that keep a promise."""

import pytest
import torch
from torch.optim import SGD

from gradbalance import BalancedOptimizer
from gradbalance.balancers import available
from tests.gradbalance.balancers.catalogue import EVERY
from tests.gradbalance.models import LinearLosses


def those(promise=lambda entry: True):
    """The balancers that promise something; not those whose options say how many objectives there are, or whose last
    objective is of another kind."""
    names = [name for name in available() if name not in ("sequential", "grouped", "common_part")]
    return pytest.mark.parametrize("balancer", [name for name in names if promise(EVERY[name])])


every_balancer = those()
solving = those(lambda entry: entry.solves)
ignoring_inactive = those(lambda entry: entry.drops_zero)
of_degree_0 = those(lambda entry: entry.degree == 0 and entry.one == 1)  # one objective alone has λ = 1
both_modes = pytest.mark.parametrize("refresh_every", [1, 3], ids=["exact", "amortised"])


class Problem(LinearLosses):
    """Linear losses with value 1 at the start: some methods divide by the loss."""

    def losses(self):
        return [1.0 + loss for loss in super().losses()]


def make(rows, balancer="marble", *, dtype=torch.float64, lr=0.0, **options):
    problem = Problem(rows, dtype)
    return problem, BalancedOptimizer(SGD([problem.x], lr=lr), balancer, **options)


def steps(problem, optimizer, count=4, losses=None):
    """The update direction of each of ``count`` steps."""
    directions = []
    for _ in range(count):
        optimizer.zero_grad()
        optimizer.backward((losses or Problem.losses)(problem))
        directions.append(problem.x.grad.clone())
        optimizer.step()
    return torch.stack(directions)


ACTIVE = [[1.0, 0.0, 0.0], [-0.5, 4.0, 1.0]]
