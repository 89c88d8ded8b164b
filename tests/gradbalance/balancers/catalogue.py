"""Every balancer with its options, and what its documentation promises: the tests of all balancers go through here."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gradbalance.balancers import (
    EPO,
    MGDA,
    Balancer,
    CAGrad,
    DualProj,
    FairGrad,
    Marble,
    NashMTL,
    PCGrad,
    UPGrad,
    WeightedSum,
)
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
    degree: float | None = 0
    invariant: bool = False
    no_conflict: bool = False
    stationary: bool = False
    equivariant: bool = True
    nonnegative: bool = True
    drops_zero: bool = True
    one: float | None = 1.0
    one_degree: float = 0

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
    "mgda": Entry(lambda k: MGDA(), no_conflict=True, stationary=True),
    "mgda, l2": Entry(lambda k: MGDA("l2"), invariant=True, no_conflict=True, stationary=True),
    "mgda, loss": Entry(lambda k: MGDA("loss"), no_conflict=True, stationary=True),
    "mgda, loss+": Entry(lambda k: MGDA("loss+"), no_conflict=True, stationary=True),
}

PROJECTING = {
    "pcgrad": Entry(lambda k: PCGrad(), equivariant=False, drops_zero=False),
}

SOLVING = {
    "nash_mtl": Entry(lambda k: NashMTL(), degree=-1, invariant=True, no_conflict=True, stationary=True, one_degree=-1),
    "nash_mtl, max_norm": Entry(
        lambda k: NashMTL(max_norm=0.5),
        degree=-1,
        invariant=True,
        no_conflict=True,
        stationary=True,
        one=0.5,
        one_degree=-1,
    ),
    "fair_grad": Entry(
        lambda k: FairGrad(), degree=-1, invariant=True, no_conflict=True, stationary=True, one_degree=-1
    ),
    "fair_grad, 2": Entry(lambda k: FairGrad(2.0), degree=-4 / 3, no_conflict=True, stationary=True, one_degree=-4 / 3),
    "fair_grad, 0.5": Entry(
        lambda k: FairGrad(0.5), degree=-2 / 3, no_conflict=True, stationary=True, one_degree=-2 / 3
    ),
    "ca_grad": Entry(lambda k: CAGrad(), one=1.5),
    "ca_grad, 0": Entry(lambda k: CAGrad(c=0.0)),
    "ca_grad, 1": Entry(lambda k: CAGrad(c=1.0), no_conflict=True, stationary=True, one=2.0),
    "upgrad": Entry(lambda k: UPGrad(), no_conflict=True, stationary=True),
    "upgrad, preference": Entry(
        lambda k: UPGrad([1.0 + i for i in range(k)]),
        no_conflict=True,
        stationary=True,
        equivariant=False,
        drops_zero=False,
    ),
    "dual_proj": Entry(lambda k: DualProj(), no_conflict=True, stationary=True),
    "dual_proj, preference": Entry(
        lambda k: DualProj([1.0 + i for i in range(k)]),
        no_conflict=True,
        stationary=True,
        equivariant=False,
        drops_zero=False,
    ),
    "epo": Entry(lambda k: EPO(), equivariant=False),
    "epo, preference": Entry(
        lambda k: EPO([1.0 + i for i in range(k)], tolerance=0.1), equivariant=False, drops_zero=False
    ),
}

EVERY: dict[str, Entry] = {**FIXED, **MIN_NORM, **PROJECTING, **SOLVING}


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
