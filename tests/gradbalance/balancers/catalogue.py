"""Every balancer with its options, and what its documentation promises: the tests of all balancers go through here."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gradbalance.balancers import MGDA, Balancer, Marble, PCGrad, WeightedSum
from tests.gradbalance.gradient_zoo import gramian


@dataclass(frozen=True)
class Entry:
    """A balancer and its promises.

    Attributes:
        make: K -> a fresh balancer.
        degree: λ goes with this power of a common factor of all losses (and so of all gradients); None: no such law.
        invariant: The direction does not change when single losses are multiplied by positive numbers.
        no_conflict: No objective has a negative cosine with the update.
        stationary: The update vanishes where a convex combination of the gradients does.
        equivariant: Exchanging objectives exchanges the coefficients.
        nonnegative: No coefficient is negative.
        drops_zero: An objective without gradient gets 0, and the others what they get without it.
        one: λ of a single objective whose gradient has norm 1 and whose loss is 1; None: it changes from call to call.
        one_degree: That λ goes with this power of the norm (the loss stays).
    """

    make: Callable[[int], Balancer]
    degree: int | None = 0
    invariant: bool = False
    no_conflict: bool = False
    stationary: bool = False
    equivariant: bool = True
    nonnegative: bool = True
    drops_zero: bool = True
    one: float | None = 1.0
    one_degree: int = 0

    @property
    def solves(self):
        """Whether the gradients decide."""
        return self.make(2).uses_gradients


FIXED = {
    "weighted_sum": Entry(lambda k: WeightedSum(), drops_zero=False),
    "weighted_sum, weights": Entry(
        lambda k: WeightedSum([1.0 + i for i in range(k)]), equivariant=False, drops_zero=False
    ),
}

MIN_NORM = {
    "marble": Entry(lambda k: Marble(), invariant=True, no_conflict=True, stationary=True),
    "marble, preference": Entry(
        lambda k: Marble(preference=[1.0 + i for i in range(k)]),
        invariant=True,
        no_conflict=True,
        equivariant=False,
        stationary=True,
        drops_zero=False,
    ),
    "marble, floor": Entry(lambda k: Marble(floor=0.5 / k), invariant=True, drops_zero=False),
    "marble, ceiling": Entry(lambda k: Marble(ceiling=min(1.0, 1.5 / k)), invariant=True, drops_zero=False),
    "mgda": Entry(lambda k: MGDA(), no_conflict=True, stationary=True),
    "mgda, l2": Entry(lambda k: MGDA("l2"), invariant=True, no_conflict=True, stationary=True),
    "mgda, loss": Entry(lambda k: MGDA("loss"), no_conflict=True, stationary=True),
    "mgda, loss+": Entry(lambda k: MGDA("loss+"), no_conflict=True, stationary=True),
}

PROJECTING = {
    "pcgrad": Entry(lambda k: PCGrad(), equivariant=False, drops_zero=False),
}

EVERY: dict[str, Entry] = {**FIXED, **MIN_NORM, **PROJECTING}


def losses_of(gradients):
    """Positive losses that change with the gradients' order and scale: L_k = ‖g_k‖ (1.5 + sin of the first entry)."""
    gradients = np.asarray(gradients)
    norms = np.linalg.norm(gradients, axis=1)
    first = gradients[:, 0] / np.where(norms > 0, norms, 1.0)
    return torch.from_numpy(np.where(norms > 0, norms, 1.0) * (1.5 + np.sin(3 * first)))


def coefficients(name, gradients, balancer=None):
    """λ of a fresh balancer, or of the given one."""
    balancer = balancer or EVERY[name].make(len(gradients))
    return balancer.coefficients(gramian(gradients), losses_of(gradients))
