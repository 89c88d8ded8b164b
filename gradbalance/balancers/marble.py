"""MARBLE's harmonising: the min-norm point of the unit gradients, given back the gradients' mean length."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.solvers import SOLVERS, min_norm
from gradbalance.solvers.checks import active_rows


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
            conflict for never losing sight of an objective.
        solver: see :func:`gradbalance.solvers.min_norm`.

    References:
        MARBLE, arXiv 2605.06507.
        J.-A. Désidéri. Multiple-gradient descent algorithm (MGDA). Comptes Rendus Mathématique 350, 2012 (normalised
        gradients, equal directional derivatives).
    """

    simplex = True

    def __init__(
        self, preference: Sequence[float] | Tensor | None = None, floor: float = 0.0, solver: str = "exact"
    ) -> None:
        if isinstance(floor, bool) or not isinstance(floor, float | int) or not 0.0 <= floor <= 1.0:
            raise ValueError(f"floor must be a number in [0, 1/K], got {floor!r}")
        if solver not in SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(map(repr, SOLVERS))}, got {solver!r}")
        self.preference = None if preference is None else _normalised(preference)
        self.floor = floor
        self.solver = solver

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return α, non-negative with sum 1; 0 for objectives without gradient, uniform if none has one."""
        m = _numpy(gramian)
        scale = self._lengths(np.sqrt(m.diagonal()))
        return min_norm(torch.from_numpy(m / (scale[:, None] * scale)), floor=self.floor, solver=self.solver)

    def scale(self, weights: Tensor, norms: Tensor) -> Tensor:
        """Return λ_k = n̄ α_k / (p_k ‖g_k‖), 0 for objectives without gradient; n̄ is the mean over the others."""
        lengths = _numpy(norms)
        active = active_rows(lengths)
        mean = lengths[active].sum() / max(np.count_nonzero(active), 1)
        return torch.from_numpy(mean * _numpy(weights) / self._lengths(lengths))

    def _lengths(self, norms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return p_k ‖g_k‖, infinite for objectives without gradient."""
        lengths = np.where(active_rows(norms), norms, np.inf)
        if self.preference is None:
            return lengths
        if len(self.preference) != len(norms):
            raise ValueError(f"preference has {len(self.preference)} values, but there are {len(norms)} objectives")
        return lengths * np.array(self.preference, dtype=np.float64)


def _numpy(tensor: Tensor) -> NDArray[np.float64]:
    """Return the values in float64; on K numbers numpy takes a third of torch's time."""
    values: NDArray[np.float64] = tensor.detach().to("cpu", torch.float64).numpy()
    return values


def _normalised(preference: Sequence[float] | Tensor) -> list[float]:
    try:
        values = torch.as_tensor(preference, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError) as error:
        raise TypeError(f"preference must be K numbers such as [1.0, 2.0], got {preference!r}") from error
    if values.dim() != 1 or not len(values) or not bool((values.isfinite() & (values > 0)).all()):
        raise ValueError(f"preference must hold one finite number > 0 per objective, got {values.tolist()}")
    return (values / values.mean()).tolist()
