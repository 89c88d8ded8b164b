"""Balancers: from the Gramian of K gradients to the K coefficients of the update, one method per file."""

import difflib
import inspect
from typing import Any

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.ca_grad import CAGrad
from gradbalance.balancers.dual_proj import DualProj
from gradbalance.balancers.epo import EPO
from gradbalance.balancers.fair_grad import FairGrad
from gradbalance.balancers.marble import Marble
from gradbalance.balancers.mgda import MGDA
from gradbalance.balancers.nash_mtl import NashMTL
from gradbalance.balancers.pcgrad import PCGrad
from gradbalance.balancers.upgrad import UPGrad
from gradbalance.balancers.weighted_sum import WeightedSum

__all__ = [
    "EPO",
    "MGDA",
    "Balancer",
    "CAGrad",
    "DualProj",
    "FairGrad",
    "Marble",
    "NashMTL",
    "PCGrad",
    "UPGrad",
    "WeightedSum",
    "available",
    "get",
]

_BALANCERS: dict[str, type[Balancer]] = {
    "ca_grad": CAGrad,
    "dual_proj": DualProj,
    "epo": EPO,
    "fair_grad": FairGrad,
    "marble": Marble,
    "mgda": MGDA,
    "nash_mtl": NashMTL,
    "pcgrad": PCGrad,
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
