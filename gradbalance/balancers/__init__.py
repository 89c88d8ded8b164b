"""Balancers: from the Gramian of K gradients to the K coefficients of the update, one method per file."""

from typing import Any

from gradbalance.balancers.aligned_mtl import AlignedMTL
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.ca_grad import CAGrad
from gradbalance.balancers.common_part import CommonPart
from gradbalance.balancers.con_fig import ConFIG
from gradbalance.balancers.cr_mogm import CRMOGM
from gradbalance.balancers.db_mtl import DBMTL
from gradbalance.balancers.dual_proj import DualProj
from gradbalance.balancers.dwa import DWA
from gradbalance.balancers.epo import EPO
from gradbalance.balancers.excess_mtl import ExcessMTL
from gradbalance.balancers.fair_grad import FairGrad
from gradbalance.balancers.famo import FAMO
from gradbalance.balancers.grad_norm import GradNorm
from gradbalance.balancers.grad_vac import GradVac
from gradbalance.balancers.grouped import Grouped
from gradbalance.balancers.improvement_tracking import ImprovementTracking
from gradbalance.balancers.imtl_g import IMTLG
from gradbalance.balancers.imtl_l import IMTLL
from gradbalance.balancers.marble import Marble
from gradbalance.balancers.mgda import MGDA
from gradbalance.balancers.moco import MoCo
from gradbalance.balancers.modo import MoDo
from gradbalance.balancers.nash_mtl import NashMTL
from gradbalance.balancers.noise_aware import NoiseAware
from gradbalance.balancers.pcgrad import PCGrad
from gradbalance.balancers.rlw import RLW
from gradbalance.balancers.sdm_grad import SDMGrad
from gradbalance.balancers.sequential import Sequential
from gradbalance.balancers.specialist import Specialist
from gradbalance.balancers.stch import STCH
from gradbalance.balancers.uncertainty_weighting import UncertaintyWeighting
from gradbalance.balancers.uniform import Uniform
from gradbalance.balancers.upgrad import UPGrad
from gradbalance.balancers.weighted_sum import WeightedSum
from gradbalance.naming import make

__all__ = [
    "CRMOGM",
    "DBMTL",
    "DWA",
    "EPO",
    "FAMO",
    "IMTLG",
    "IMTLL",
    "MGDA",
    "RLW",
    "STCH",
    "AlignedMTL",
    "Balancer",
    "CAGrad",
    "CommonPart",
    "ConFIG",
    "DualProj",
    "ExcessMTL",
    "FairGrad",
    "GradNorm",
    "GradVac",
    "Grouped",
    "ImprovementTracking",
    "Marble",
    "MoCo",
    "MoDo",
    "NashMTL",
    "NoiseAware",
    "PCGrad",
    "SDMGrad",
    "Sequential",
    "Specialist",
    "UPGrad",
    "UncertaintyWeighting",
    "Uniform",
    "WeightedSum",
    "available",
    "get",
]

_BALANCERS: dict[str, type[Balancer]] = {
    "aligned_mtl": AlignedMTL,
    "ca_grad": CAGrad,
    "common_part": CommonPart,
    "config": ConFIG,
    "cr_mogm": CRMOGM,
    "db_mtl": DBMTL,
    "dual_proj": DualProj,
    "dwa": DWA,
    "epo": EPO,
    "excess_mtl": ExcessMTL,
    "fair_grad": FairGrad,
    "famo": FAMO,
    "grad_norm": GradNorm,
    "grad_vac": GradVac,
    "grouped": Grouped,
    "improvement_tracking": ImprovementTracking,
    "imtl_g": IMTLG,
    "imtl_l": IMTLL,
    "marble": Marble,
    "mgda": MGDA,
    "moco": MoCo,
    "modo": MoDo,
    "nash_mtl": NashMTL,
    "noise_aware": NoiseAware,
    "pcgrad": PCGrad,
    "rlw": RLW,
    "sdm_grad": SDMGrad,
    "sequential": Sequential,
    "specialist": Specialist,
    "stch": STCH,
    "uncertainty_weighting": UncertaintyWeighting,
    "uniform": Uniform,
    "upgrad": UPGrad,
    "weighted_sum": WeightedSum,
}


def available() -> list[str]:
    """Return the names that ``get`` knows, sorted."""
    return sorted(_BALANCERS)


def get(name: str, **options: Any) -> Balancer:
    """Make a balancer by name.

    Args:
        name: one of ``available()``.
        **options: the arguments of its class.

    Raises:
        ValueError: no balancer has this name.
        TypeError: the balancer has no such option, or needs one that is missing.
    """
    return make("balancer", _BALANCERS, name, options)
