"""A slow, readable twin of the engine with the Marble balancer: flat vectors, no reuse of anything, scipy's NNLS.

It follows the method's text line by line and shares no code with the library, so that agreement means something.
"""

import numpy as np
import torch
from scipy.optimize import nnls


def min_norm(rows: np.ndarray) -> np.ndarray:
    """argmin ‖Σ α_k rows_k‖ on the simplex, as the non-negative least squares problem min ‖[rowsᵀ; 1ᵀ] β − e_last‖."""
    count, size = rows.shape
    beta, _ = nnls(np.vstack([rows.T, np.ones(count)]), np.append(np.zeros(size), 1.0))
    return beta / beta.sum()


class ReferenceMarble:
    """Balances like MarbleOptimizer; the caller applies ``gradient`` to the parameters."""

    def __init__(self, parameters, count, *, shared, ema_decay=0.0, refresh_every=1, refresh_micro_batches=None):
        self.parameters, self.count, self.shared = parameters, count, shared
        self.ema_decay, self.refresh_every, self.refresh_micro_batches = ema_decay, refresh_every, refresh_micro_batches
        self.step, self.alpha, self.norms = 0, np.full(count, 1 / count), np.zeros(count)
        self.lam, self.seen = np.zeros(count), np.zeros(count, bool)

    def gradient(self, micro_batches, regularizers=None):
        """The balanced gradient of one optimizer step; ``micro_batches`` is a list of lists of K losses or None."""
        jacobians = [[self._flat(loss) for loss in losses] for losses in micro_batches]
        present = np.array([any(losses[k] is not None for losses in micro_batches) for k in range(self.count)])
        if self.step % self.refresh_every == 0 or (present & ~self.seen).any():
            self._solve(sum(np.stack(j) for j in jacobians[: self.refresh_micro_batches]), present)
        total = sum(np.stack(j) for j in jacobians)
        mask = np.concatenate([np.full(p.numel(), s) for p, s in zip(self.parameters, self.shared, strict=True)])
        result = np.where(mask, self.lam @ total, total.sum(0))
        for regularizer in regularizers or []:
            result = result + self._flat(regularizer)
        self.step += 1
        return torch.from_numpy(result)

    def _solve(self, jacobian, present):
        mask = np.concatenate([np.full(p.numel(), s) for p, s in zip(self.parameters, self.shared, strict=True)])
        jacobian = jacobian[:, mask]
        norms = np.linalg.norm(jacobian, axis=1)
        active = present & (norms > 0)
        unit = jacobian[active] / norms[active, None]
        fresh = np.zeros(self.count)
        fresh[active] = min_norm(unit) * max(1 - self.alpha[~present].sum(), 1 / self.count)
        decay = self.ema_decay if self.seen.any() else 0.0
        self.alpha[present] = decay * self.alpha[present] + (1 - decay) * fresh[present]
        self.lam[present] = 0.0
        self.lam[active] = norms[active].mean() * self.alpha[active] / norms[active]
        self.seen |= present

    def _flat(self, loss):
        if loss is None:
            return np.zeros(sum(p.numel() for p in self.parameters))
        grads = torch.autograd.grad(loss, self.parameters, retain_graph=True, allow_unused=True)
        pairs = zip(self.parameters, grads, strict=True)
        return np.concatenate(
            [(torch.zeros_like(p) if g is None else g).double().reshape(-1).numpy() for p, g in pairs]
        )
