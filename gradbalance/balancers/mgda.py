"""MGDA: the min-norm point of the gradients, raw or normalised."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, array, choice, loss_values
from gradbalance.solvers import SOLVERS, min_norm
from gradbalance.solvers.checks import active_rows

NORMALIZE = (None, "l2", "loss", "loss+")


class MGDA(Balancer):
    """Step along the shortest convex combination of the (scaled) gradients.

    With scales s_k, α = argmin ‖Σ_k α_k g_k / s_k‖² over the simplex and λ_k = s̄ α_k / s_k, s̄ the mean of the s_k.
    The update is s̄ times the min-norm point itself, so it conflicts with no objective; for ``normalize=None`` (s_k = 1)
    λ = α lies on the simplex. The factor s̄ leaves the length of the update in the units of the raw gradients.

    Raw MGDA favours the objective with the smallest gradient. ``normalize="l2"`` gives the coefficients of
    :class:`~gradbalance.balancers.Marble`, which differs in that averaging over steps then smooths α, not λ.
    Widely used implementations find α on the scaled gradients but apply it to the raw ones, and approximate it by
    Frank-Wolfe steps; here neither is the case.

    Args:
        normalize: None: s_k = 1 · "l2": s_k = ‖g_k‖ · "loss": s_k = L_k · "loss+": s_k = L_k ‖g_k‖. The last two need
            the loss values, all > 0.
        solver: see :func:`gradbalance.solvers.min_norm`.

    References:
        J.-A. Désidéri. Multiple-gradient descent algorithm (MGDA). Comptes Rendus Mathématique 350, 2012.
        O. Sener, V. Koltun. Multi-task learning as multi-objective optimization. NeurIPS 2018, arXiv 1810.04650.
    """

    def __init__(self, normalize: str | None = None, solver: str = "exact") -> None:
        self.normalize: str | None = choice("normalize", normalize, NORMALIZE)
        self.solver: str = choice("solver", solver, SOLVERS)

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient. Raises ValueError if a loss value is needed and not > 0."""
        m = array(gramian)
        norms = np.sqrt(m.diagonal())
        active = active_rows(norms)
        scales = np.ones_like(norms)
        if self.normalize in ("l2", "loss+"):
            scales = scales * norms
        if self.normalize in ("loss", "loss+"):
            scales = scales * self._positive(losses, active)
        scales = np.where(active, scales, np.inf)
        alpha = array(min_norm(torch.from_numpy(m / (scales[:, None] * scales)), solver=self.solver))
        mean = scales[active].sum() / max(np.count_nonzero(active), 1)
        return torch.from_numpy(np.where(active, mean * alpha / scales, 0.0))

    def _positive(self, losses: Tensor | None, active: NDArray[np.bool_]) -> Array:
        values = loss_values(losses, len(active), f"normalize={self.normalize!r}")
        bad = (active & ~(np.isfinite(values) & (values > 0))).nonzero()[0]
        if len(bad):
            raise ValueError(
                f"normalize={self.normalize!r} needs losses > 0, got {values[bad[0]]} for objective {bad[0]}; "
                "use normalize='l2' for losses of any sign"
            )
        return values
