"""Coefficients on the simplex that are moved by a few projected gradient steps at every call, and remembered.

MoCo, MoDo and SDMGrad are of this kind: instead of the min-norm point of one noisy batch they keep λ and move it a
little downhill on ½‖Σ_k λ_k g_k‖², whose gradient is Mλ. What they remember and how they keep objectives out that have
no gradient in a step is the same.
"""

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.active import Rows, only_active
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, array, number, sized
from gradbalance.solvers.checks import active_rows


class SimplexDescent(Balancer):
    """Remember a share for each objective, and move the shares of those that have a gradient.

    Objectives without gradient keep the share they have and get λ = 0; the others' shares are moved on their own
    simplex, and afterwards sum to what they summed to before (at least to 1/K, so that they are not lost).
    """

    simplex = True
    STATE: ClassVar[tuple[str, ...]] = ("shares",)

    def __init__(self, gamma: float, normalize: bool) -> None:
        self.gamma = number("gamma", gamma, "(0, ∞)")
        if not isinstance(normalize, bool):
            raise ValueError(f"normalize must be True or False, got {normalize!r}")
        self.normalize = normalize
        self.shares: list[float] = []

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ ≥ 0 with sum 1, 0 for objectives without gradient (uniform if none has one). Moves the shares."""
        m = array(gramian)
        size = len(m)
        squares = m.diagonal()
        rows = active_rows(np.sqrt(squares)).nonzero()[0]
        if len(rows) == 0:
            return torch.full((size,), 1.0 / size, dtype=torch.float64)
        steps = m if signal is None else array(signal)
        steps = steps[rows[:, None], rows]
        if self.normalize:
            steps = steps / squares[rows].sum()

        shares = sized("shares", self.shares, size) if self.shares else np.full(size, 1.0 / size)
        total = shares[rows].sum()
        start = shares[rows] / total if total > 0 else np.full(len(rows), 1.0 / len(rows))
        moved, result = self._descend(start, steps, rows, size)
        shares[rows] = max(total, 1.0 / size) * moved
        self.shares = shares.tolist()
        weights = np.zeros(size)
        weights[rows] = result
        return torch.from_numpy(weights)

    def scale(self, weights: Tensor, gramian: Tensor) -> Tensor:
        """Return λ: the weights, 0 for objectives without gradient."""
        return only_active(weights, gramian)

    @abstractmethod
    def _descend(self, start: Array, gramian: Array, rows: Rows, size: int) -> tuple[Array, Array]:
        """Move the shares of the A objectives that have a gradient.

        Args:
            start: their shares, with sum 1, shape (A,).
            gramian: the Gramian to descend on, shape (A, A).
            rows: which objectives they are.
            size: K.

        Returns:
            The new shares and the coefficients that follow from them, both on the simplex.
        """
