"""Aligned-MTL: the gradients are made orthogonal and equally long with the least change, then averaged."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.active import Rows, over_active
from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, array, choice, parts, vector

RANK = 1e-13
"""Eigenvalues below this share of the largest are rounding."""


class AlignedMTL(Balancer):
    """Align the principal components of the gradients, and average.

    With the eigenvectors V and eigenvalues σ_1² ≥ … ≥ σ_R² > 0 of the Gramian M, the balance matrix is
    B = σ V diag(1 / σ_r) Vᵀ and λ = B w. The rows of B G (G the stack of the g_k) are the aligned gradients ĝ_k. For
    independent gradients they are orthogonal, of length σ, and of all such rows the nearest to the g_k; the update is
    d = Σ_k w_k ĝ_k, so ⟨ĝ_k, d⟩ = σ² w_k > 0.

    Multiplying all losses by one number changes nothing; the objectives' relative norms matter. Coefficients may be
    negative, and the promise is about the aligned gradients: an original one may be in conflict with d.

    **Fails** near dependence: the eigenvectors of the smallest σ_r, which are mostly noise, decide λ, and with
    ``scale_mode="min"`` d is as short as they are; a σ_r² below 1e-13 of σ_1² is left out, and d is long again.

    Args:
        preference: w_k > 0, shape (K,); only ratios matter (they are normalised to sum 1). None: w_k = 1/K.
        scale_mode: σ² is the "min" of the σ_r² (the paper's), their "median" (the lower one of an even number) or, for
            "rmse", their mean.

    References:
        D. Senushkin, N. Patakin, A. Kuznetsov, A. Konushin. Independent component alignment for multi-task learning.
        CVPR 2023, arXiv 2305.19000.
    """

    SCALES: ClassVar[dict[str, Callable[[Array], float]]] = {
        "min": lambda ascending: float(ascending[0]),
        "median": lambda ascending: float(ascending[(len(ascending) - 1) // 2]),
        "rmse": lambda ascending: float(ascending.mean()),
    }

    def __init__(self, preference: Sequence[float] | Tensor | None = None, scale_mode: str = "min") -> None:
        self.preference = None if preference is None else vector("preference", preference, positive=True)
        self.scale_mode: str = choice("scale_mode", scale_mode, tuple(self.SCALES))

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient."""

        def solve(m: Array, rows: Rows) -> Array:
            eigenvalues, vectors = map(array, torch.linalg.eigh(torch.from_numpy(m)))  # faster than numpy's
            first = int(np.searchsorted(eigenvalues, RANK * eigenvalues[-1], side="right"))
            kept, basis = eigenvalues[first:], vectors[:, first:]
            shares = parts("preference", self.preference, rows, len(gramian))
            components = shares @ basis
            return np.asarray(basis @ (components * np.sqrt(self.SCALES[self.scale_mode](kept) / kept)))

        return over_active(gramian, solve)
