"""DB-MTL, dual balancing: log losses, and their gradients brought to the longest one's norm."""

import numpy as np
import torch
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import array
from gradbalance.balancers.losses import check_nonnegative, seen
from gradbalance.solvers.checks import active_rows


class DBMTL(Balancer):
    """Add the gradients of the log losses, each brought to the norm of the longest.

    With v_k = ∇ log L_k = g_k / L_k, the update is max_j ‖v_j‖ Σ_k v_k / ‖v_k‖, that is λ_k = max_j (‖g_j‖ / L_j) /
    ‖g_k‖. So its direction is the sum of the unit gradients: the logarithm decides its length alone. Multiplying any
    loss by a positive number changes nothing at all in the update. Objectives may be in conflict with it for K ≥ 3; two
    never are.

    The paper smooths the gradients v_k over the calls before it takes their norms, which needs all K × P numbers. From
    a Gramian one can smooth λ: the optimizer's ``ema_decay`` does. Without smoothing (its β = 0) both are the same but
    for the 1e-8 that published code adds to losses and norms.

    Losses must be ≥ 0. One that is 0 has no logarithm and is left out of the maximum.

    References:
        B. Lin et al. Dual-balancing for multi-task learning. 2023, arXiv 2308.12029.
    """

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return λ; 0 for objectives without gradient. Raises ValueError if a loss is negative."""
        values, here = seen(losses, len(gramian), "DBMTL")
        check_nonnegative("DBMTL: losses", values)
        norms = np.sqrt(array(gramian).diagonal())
        active = here & active_rows(norms)
        longest = np.where(active & (values > 0), norms / np.where(values > 0, values, 1.0), 0.0).max()
        return torch.from_numpy(np.where(active, longest / np.where(active, norms, 1.0), 0.0))
