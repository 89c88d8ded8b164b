"""What a balanced optimizer remembers from one step to the next, kept where every checkpoint tool looks.

``torch.save``, ``weights_only=True``, accelerate and DCP all keep ``optimizer.param_groups``, and DCP drops every other
key of an optimizer's state without a word. So the state is one dict of plain Python values in ``param_groups[0]``. It
is replaced as a whole when a step commits, never changed in place: a checkpoint taken earlier stays what it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

KEY = "gradbalance"


@dataclass(frozen=True)
class BalanceState:
    """The committed state, plain Python values only.

    Attributes:
        step: Committed balanced steps; a refresh falls on every ``refresh_every``-th.
        names: The K objective names; empty until the first ``backward`` if none were given.
        weights: What the moving average smooths: α on the simplex for Marble, λ for other balancers.
        norms: ‖g_k‖ over the shared parameters, from the last refresh in which objective k was present.
        coefficients: λ.
        gramian: The Gramian of the last refresh; rows of objectives absent from it are zero.
        solved: Whether objective k has been in a solve over the parameters that are shared now.
        averaged: Whether a solve has set ``weights``, so that the next one is averaged with it.
        reach: For each parameter a bit mask of the objectives that reach it; −1 if no refresh has seen it trainable.
        zeros: For each parameter a bit mask of the objectives taken not to reach it, as a compiled graph gave zeros;
            empty if there was none.
        doubtful: Whether ``zeros`` has just changed, so that the next step must look again.
        method: The balancer's class: weights of one method mean nothing to another.
        balancer: The balancer's own state.
        estimator: The Gramian estimator's class; empty in states from before there were any.
        estimates: The estimator's own state.
        signal: U of the last refresh, the Gramian of the expected gradients; empty if the estimator estimates none.
        signal_to_noise: √(U_kk / N_kk) as the estimator knows it; −1 where it does not know it, empty as ``signal``.
        measured: How many micro-batches the last refresh measured, the mean over the ranks.
        most: The largest ``measured`` so far, which stands for the whole step; 0 unless m is chosen from the noise.
        wanted: The m so chosen, for the next refresh; 0: all.
    """

    step: int = 0
    names: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    gramian: list[list[float]] = field(default_factory=list)
    solved: list[bool] = field(default_factory=list)
    averaged: bool = False
    reach: list[int] = field(default_factory=list)
    zeros: list[int] = field(default_factory=list)
    doubtful: bool = False
    method: str = ""
    balancer: dict[str, Any] = field(default_factory=dict)
    estimator: str = ""
    estimates: dict[str, Any] = field(default_factory=dict)
    signal: list[list[float]] = field(default_factory=list)
    signal_to_noise: list[float] = field(default_factory=list)
    measured: float = 0.0
    most: float = 0.0
    wanted: int = 0

    def named(self, names: Sequence[str], *, simplex: bool) -> BalanceState:
        """The state for K named objectives that have not been seen: equal shares on the simplex, else zeros."""
        count = len(names)
        return replace(
            self,
            names=list(names),
            weights=[1.0 / count if simplex else 0.0] * count,
            norms=[0.0] * count,
            coefficients=[0.0] * count,
            gramian=[[0.0] * count for _ in names],
            solved=[False] * count,
        )

    def to_dict(self) -> dict[str, Any]:
        """The state as a plain dict. Its lists are shared, since none is ever changed in place."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BalanceState:
        """The state from :meth:`to_dict`; keys a later version added are ignored, missing ones take their default."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})

    def check(self) -> BalanceState:
        """The state itself, if it holds what it should: one that was loaded may hold anything.

        Raises:
            ValueError: If a value is not what the key stands for; the message names the key.
        """
        default = BalanceState()
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is not type(getattr(default, f.name)):
                raise ValueError(f"{f.name} of the balancing state is {value!r}, which is no {f.type}")
        count = len(self.names)
        for name in ("weights", "norms", "coefficients", "solved", "gramian", "signal", "signal_to_noise"):
            row = getattr(self, name)
            square = name in ("gramian", "signal")
            numbers = [number for part in row for number in part] if square else row
            wanted = count * count if square else count
            if not numbers and name in ("signal", "signal_to_noise"):
                continue
            if len(numbers) != wanted or not all(isinstance(number, float | int) for number in numbers):
                raise ValueError(f"{name} of the balancing state is {row!r}, which is not {wanted} numbers")
        return self


def why_foreign(saved: Mapping[str, Any], method: str, estimator: str, names: Sequence[str]) -> str | None:
    """Why a saved state is not of an optimizer with this balancer, estimator and objectives; None if it is.

    Args:
        saved: A dict of :meth:`BalanceState.to_dict`, perhaps of an earlier version.
        method: The balancer's class.
        estimator: The Gramian estimator's class.
        names: The objective names; empty if they are not known yet.
    """
    if saved["method"] != method:
        return f"the checkpoint's balancer is {saved['method']}, this optimizer's is {method}"
    theirs = saved.get("estimator", "")
    if theirs not in ("", estimator):
        return f"the checkpoint's Gramian estimator is {theirs}, this optimizer's is {estimator}"
    if not isinstance(saved["names"], list):
        return f"names of the balancing state is {saved['names']!r}, which is no list"
    if saved["names"] and names and list(saved["names"]) != list(names):
        return (
            f"the checkpoint balances {list(saved['names'])}, this optimizer {list(names)}; build the optimizer "
            "with the checkpoint's objective_names, or load into a fresh one"
        )
    return None
