"""MARBLE's harmonising: the min-norm point of the unit gradients, given back the gradients' mean length."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, array, choice, normalised, number, sized
from gradbalance.solvers import SOLVERS, min_norm
from gradbalance.solvers.checks import active_rows
from gradbalance.solvers.constraints import Constraints


class Marble(Balancer):
    """Harmonise the gradients: equal progress for all, whatever their norms.

    With unit gradients ĝ_k = g_k / ‖g_k‖, the weights are α = argmin ‖Σ_k α_k ĝ_k / p_k‖² over the simplex and the
    update is d = n̄ Σ_k α_k ĝ_k / p_k, that is λ_k = n̄ α_k / (p_k ‖g_k‖), with n̄ the mean of the ‖g_k‖. It has
    ⟨ĝ_k, d⟩ = p_k c where α_k > 0 and ≥ p_k c elsewhere, c = ‖d‖² / n̄ ≥ 0: no objective is in conflict with the update,
    and d = 0 only where some convex combination of the gradients vanishes (Pareto stationarity). The direction does not
    change when a loss is multiplied by a positive number.

    This holds for weights and norms of the same gradients and ``floor=0``; it is not promised for averaged weights.

    Args:
        preference: p_k > 0, the progress wanted for each objective relative to the others, shape (K,); only ratios
            matter (they are normalised to mean 1). None: all equal.
        floor: smallest α_k of an objective that has a gradient, in [0, 1/K]; above 0 it trades the promise of no
            conflict for never losing sight of an objective, as ceiling and constraints do for what they are about.
        solver: see :func:`gradbalance.solvers.min_norm`.
        ceiling: largest α_k, at least 1/K.
        constraints: linear constraints on α, see :func:`gradbalance.solvers.min_norm`; a function is called at each
            solve, about a millisecond, so that what it refers to may change in between. An objective without gradient
            has α_k = 0 unless they, or the ceiling, rule that out. One that is absent from a step counts as such in the
            solve, although its weight is kept.

    References:
        MARBLE, arXiv 2605.06507.
        J.-A. Désidéri. Multiple-gradient descent algorithm (MGDA). Comptes Rendus Mathématique 350, 2012 (normalised
        gradients, equal directional derivatives).
    """

    simplex = True

    def __init__(
        self,
        preference: Sequence[float] | Tensor | None = None,
        floor: float = 0.0,
        solver: str = "exact",
        ceiling: float = 1.0,
        constraints: Constraints | None = None,
    ) -> None:
        self.preference = None if preference is None else normalised("preference", preference)
        self.floor = number("floor", floor, "[0, 1]")
        self.solver: str = choice("solver", solver, SOLVERS)
        self.ceiling = number("ceiling", ceiling, "(0, 1]")
        if self.floor > self.ceiling:
            raise ValueError(f"floor must not be above ceiling, got floor={floor!r} and ceiling={ceiling!r}")
        self.constraints = constraints

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return α, non-negative with sum 1; 0 for objectives without gradient, uniform if none has one."""
        m = array(gramian)
        scale = self._lengths(np.sqrt(m.diagonal()))
        return min_norm(
            torch.from_numpy(m / (scale[:, None] * scale)),  # with the preference, at half the cost of leaving it to it
            floor=self.floor,
            ceiling=self.ceiling,
            constraints=self.constraints,
            solver=self.solver,
        )

    def scale(self, weights: Tensor, gramian: Tensor) -> Tensor:
        """Return λ_k = n̄ α_k / (p_k ‖g_k‖), 0 for objectives without gradient; n̄ is the mean over the others."""
        lengths = np.sqrt(array(gramian).diagonal())
        active = active_rows(lengths)
        mean = lengths[active].sum() / max(np.count_nonzero(active), 1)
        return torch.from_numpy(mean * array(weights) / self._lengths(lengths))

    def _lengths(self, norms: Array) -> Array:
        """Return p_k ‖g_k‖, infinite for objectives without gradient."""
        lengths = np.where(active_rows(norms), norms, np.inf)
        if self.preference is None:
            return lengths
        return lengths * sized("preference", self.preference, len(norms))
