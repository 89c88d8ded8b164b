"""Balancers: from the Gramian of K gradients to the K coefficients of the update, one method per file."""

import difflib
import inspect
from typing import Any

from gradbalance.balancers.aligned_mtl import AlignedMTL
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.con_fig import ConFIG
from gradbalance.balancers.cr_mogm import CRMOGM
from gradbalance.balancers.grad_vac import GradVac
from gradbalance.balancers.grouped import Grouped
from gradbalance.balancers.imtl_g import IMTLG
from gradbalance.balancers.marble import Marble
from gradbalance.balancers.mgda import MGDA
from gradbalance.balancers.moco import MoCo
from gradbalance.balancers.modo import MoDo
from gradbalance.balancers.pcgrad import PCGrad
from gradbalance.balancers.sdm_grad import SDMGrad
from gradbalance.balancers.weighted_sum import WeightedSum

__all__ = [
    "CRMOGM",
    "IMTLG",
    "MGDA",
    "AlignedMTL",
    "Balancer",
    "ConFIG",
    "GradVac",
    "Grouped",
    "Marble",
    "MoCo",
    "MoDo",
    "PCGrad",
    "SDMGrad",
    "WeightedSum",
    "available",
    "get",
]

_BALANCERS: dict[str, type[Balancer]] = {
    "aligned_mtl": AlignedMTL,
    "config": ConFIG,
    "cr_mogm": CRMOGM,
    "grad_vac": GradVac,
    "grouped": Grouped,
    "imtl_g": IMTLG,
    "marble": Marble,
    "mgda": MGDA,
    "moco": MoCo,
    "modo": MoDo,
    "pcgrad": PCGrad,
    "sdm_grad": SDMGrad,
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
        TypeError: the balancer has no such option.
    """
    if name not in _BALANCERS:
        near = difflib.get_close_matches(str(name).lower(), available())
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"no balancer is called {name!r}; {hint}available: {', '.join(available())}")
    known = list(inspect.signature(_BALANCERS[name]).parameters)
    for option in options:
        if option not in known:
            raise TypeError(f"balancer {name!r} has no option {option!r}; its options: {', '.join(known)}")
    return _BALANCERS[name](**options)
