"""Every balancer with its options, and what its documentation promises: the tests of all balancers go through here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from gradbalance.balancers import (
    CRMOGM,
    DBMTL,
    DWA,
    EPO,
    FAMO,
    IMTLG,
    IMTLL,
    MGDA,
    RLW,
    STCH,
    AlignedMTL,
    Balancer,
    CAGrad,
    CommonPart,
    ConFIG,
    DualProj,
    ExcessMTL,
    FairGrad,
    GradNorm,
    GradVac,
    Grouped,
    ImprovementTracking,
    Marble,
    MoCo,
    MoDo,
    NashMTL,
    NoiseAware,
    PCGrad,
    SDMGrad,
    Sequential,
    Specialist,
    UncertaintyWeighting,
    Uniform,
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
        no_conflict: No objective has a negative cosine with the update; "independent": if the gradients are linearly
            independent.
        stationary: The update vanishes where a convex combination of the gradients does.
        equivariant: Exchanging objectives exchanges the coefficients; "update": leaves the update as it is, where
            several coefficients give it.
        nonnegative: No coefficient is negative.
        drops_zero: An objective without gradient gets 0, and the others what they get without it.
        one: λ of a single objective whose gradient has norm 1 and whose loss is 1; None: it changes from call to call.
        one_degree: That λ goes with this power of the norm (the loss stays).
    """

    make: Callable[[int], Balancer]
    degree: float | None = 0
    invariant: bool = False
    no_conflict: bool | Literal["independent"] = False
    stationary: bool = False
    equivariant: bool | Literal["update"] = True
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
    "marble, ceiling": Entry(
        lambda k: Marble(ceiling=min(1.0, 1.5 / k)), invariant=True, equivariant="update", drops_zero=False
    ),
    "mgda": Entry(lambda k: MGDA(), no_conflict=True, stationary=True),
    "mgda, l2": Entry(lambda k: MGDA("l2"), invariant=True, no_conflict=True, stationary=True),
    "mgda, loss": Entry(lambda k: MGDA("loss"), no_conflict=True, stationary=True),
    "mgda, loss+": Entry(lambda k: MGDA("loss+"), no_conflict=True, stationary=True),
}

NOISE_AWARE = {
    "noise_aware": Entry(lambda k: NoiseAware(), invariant=True, no_conflict=True, stationary=True),
    "noise_aware, preference": Entry(
        lambda k: NoiseAware(preference=[1.0 + i for i in range(k)]),
        invariant=True,
        no_conflict=True,
        equivariant=False,
        stationary=True,
        drops_zero=False,
    ),
    "noise_aware, hold": Entry(lambda k: NoiseAware(stationary="hold"), invariant=True),
    "noise_aware, nash": Entry(lambda k: NoiseAware(1.0), invariant=True, no_conflict=True, stationary=True),
    "noise_aware, 0.5": Entry(lambda k: NoiseAware(0.5), invariant=True, no_conflict=True, stationary=True),
    "noise_aware, 3": Entry(lambda k: NoiseAware(3.0), invariant=True, no_conflict=True, stationary=True),
    "noise_aware, nash and preference": Entry(
        lambda k: NoiseAware(1.0, preference=[1.0 + i for i in range(k)]),
        invariant=True,
        no_conflict=True,
        equivariant=False,
        stationary=True,
        drops_zero=False,
    ),
}
"""No signal is handed in here, so N = U; with noise the promises are about expected gradients, in their own tests."""

PROJECTING = {
    "pcgrad": Entry(lambda k: PCGrad(), equivariant=False, drops_zero=False),
    "grad_vac": Entry(lambda k: GradVac(), equivariant=False, drops_zero=False),
    "grad_vac, beta": Entry(lambda k: GradVac(beta=1.0), equivariant=False, drops_zero=False),
}

LOSS_DRIVEN = {
    "uniform": Entry(lambda k: Uniform(), drops_zero=False),
    "specialist": Entry(lambda k: Specialist(), equivariant=False, drops_zero=False),
    "sequential": Entry(
        lambda k: Sequential([(2, [1.0] * k), (1, [1.0 + i for i in range(k)])]), equivariant=False, drops_zero=False
    ),
    "rlw": Entry(lambda k: RLW(), equivariant=False, drops_zero=False),
    "rlw, dirichlet": Entry(lambda k: RLW("dirichlet"), equivariant=False, drops_zero=False),
    "dwa": Entry(lambda k: DWA(period=1), drops_zero=False),
    "dwa, period": Entry(lambda k: DWA(period=2, temperature=0.5), drops_zero=False),
    "uncertainty_weighting": Entry(lambda k: UncertaintyWeighting(), degree=None, drops_zero=False, one=0.5),
    "imtl_l": Entry(lambda k: IMTLL(lr=0.1), degree=None, drops_zero=False),
    "famo": Entry(lambda k: FAMO(), invariant=True, drops_zero=False),
    "famo, bounds": Entry(
        lambda k: FAMO(min_losses=[-1.0 - i for i in range(k)]), degree=None, equivariant=False, drops_zero=False
    ),
    "stch": Entry(lambda k: STCH(), degree=None, drops_zero=False),
    "stch, preference": Entry(
        lambda k: STCH(0.1, [1.0 + i for i in range(k)], [-float(i) for i in range(k)]),
        degree=None,
        equivariant=False,
        drops_zero=False,
    ),
    "improvement_tracking": Entry(lambda k: ImprovementTracking(), drops_zero=False),
}
"""The losses alone, chance or time decide."""

NORM_DRIVEN = {
    "grad_norm": Entry(lambda k: GradNorm()),
    "excess_mtl": Entry(lambda k: ExcessMTL()),
    "db_mtl": Entry(lambda k: DBMTL(), degree=-1, invariant=True),
}
"""Of the gradients only the norms are looked at."""

CLOSED_FORMS = {
    "imtl_g": Entry(lambda k: IMTLG(), nonnegative=False),
    "aligned_mtl": Entry(lambda k: AlignedMTL(), nonnegative=False),
    "aligned_mtl, median": Entry(lambda k: AlignedMTL(scale_mode="median"), nonnegative=False),
    "aligned_mtl, rmse": Entry(lambda k: AlignedMTL(scale_mode="rmse"), nonnegative=False),
    "aligned_mtl, preference": Entry(
        lambda k: AlignedMTL([1.0 + i for i in range(k)]), nonnegative=False, equivariant=False, drops_zero=False
    ),
    "config": Entry(lambda k: ConFIG(), invariant=True, no_conflict="independent", nonnegative=False),
    "config, preference": Entry(
        lambda k: ConFIG([1.0 + i for i in range(k)]),
        invariant=True,
        no_conflict="independent",
        nonnegative=False,
        equivariant=False,
        drops_zero=False,
    ),
}

DESCENDING = {
    "moco": Entry(lambda k: MoCo()),
    "moco, beta": Entry(lambda k: MoCo(beta=0.1, rho=0.5)),
    "modo": Entry(lambda k: MoDo()),
    "modo, as published": Entry(lambda k: MoDo(normalize=False), degree=None),
    "sdm_grad": Entry(lambda k: SDMGrad()),
    "sdm_grad, preference": Entry(
        lambda k: SDMGrad(preference=[1.0 + i for i in range(k)]), equivariant=False, drops_zero=False
    ),
}

WRAPPING = {
    "cr_mogm": Entry(lambda k: CRMOGM()),
    "cr_mogm, marble": Entry(lambda k: CRMOGM(Marble(), decay=0.5), invariant=True),
    "cr_mogm, weighted_sum": Entry(lambda k: CRMOGM("weighted_sum"), drops_zero=False),
    "cr_mogm, modo": Entry(lambda k: CRMOGM(MoDo())),
    "common_part": Entry(lambda k: CommonPart(), equivariant=False, drops_zero=False),
    "common_part, mgda": Entry(lambda k: CommonPart(MGDA()), equivariant=False, drops_zero=False),
    "common_part, pcgrad": Entry(lambda k: CommonPart("pcgrad"), equivariant=False, drops_zero=False),
    "grouped": Entry(lambda k: Grouped("marble", _pairs(k)), equivariant=False, drops_zero=False),
    "grouped, mgda by losses": Entry(lambda k: Grouped(MGDA("loss+"), _pairs(k)), equivariant=False, drops_zero=False),
    "grouped, weighted_sum": Entry(lambda k: Grouped("weighted_sum", _pairs(k)), equivariant=False, drops_zero=False),
    "grouped, pcgrad": Entry(lambda k: Grouped("pcgrad", _pairs(k)), equivariant=False, drops_zero=False),
    "grouped, one each": Entry(
        lambda k: Grouped(Marble(), [[i] for i in range(k)]), invariant=True, no_conflict=True, stationary=True
    ),
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
    "ca_grad, 1": Entry(lambda k: CAGrad(c=1.0), no_conflict=True, stationary=True, one=2.0, equivariant="update"),
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

EVERY: dict[str, Entry] = {
    **FIXED,
    **LOSS_DRIVEN,
    **NORM_DRIVEN,
    **MIN_NORM,
    **NOISE_AWARE,
    **PROJECTING,
    **CLOSED_FORMS,
    **DESCENDING,
    **SOLVING,
    **WRAPPING,
}


def _pairs(k):
    return [list(range(first, min(first + 2, k))) for first in range(0, k, 2)]


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
