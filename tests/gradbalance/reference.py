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
    """Balances like MarbleOptimizer; the caller applies ``gradient``, and makes no call for a step that is skipped."""

    def __init__(self, parameters, count, *, ema_decay=0.0, refresh_every=1, refresh_micro_batches=None):
        self.parameters, self.count = list(parameters), count
        self.ema_decay, self.refresh_every, self.refresh_micro_batches = ema_decay, refresh_every, refresh_micro_batches
        self.step, self.averaged = 0, False
        self.alpha, self.lam, self.solved = np.full(count, 1 / count), np.zeros(count), np.zeros(count, bool)
        self.reach = np.zeros((count, sum(p.numel() for p in self.parameters)), bool)

    def gradient(self, micro_batches, regularizers=()):
        """The balanced gradient of one optimizer step; ``micro_batches`` is a list of lists of K losses or None."""
        jacobians = np.array([[self._flat(loss) for loss in losses] for losses in micro_batches])
        present = np.array([[loss is not None for loss in losses] for losses in micro_batches])
        # A step that begins with, or may come to, an objective that no solve has seen must measure.
        unseen = ~self.solved & (present[0] | (len(micro_batches) > 1))
        if self.step % self.refresh_every == 0 or unseen.any():
            measured = self.refresh_micro_batches or len(micro_batches)
            while measured < len(micro_batches) and not (self.solved | present[:measured].any(0)).all():
                measured += 1
            self._solve(jacobians[:measured], present[:measured].any(0))
        self.step += 1
        total = np.nan_to_num(jacobians).sum(0)
        result = np.where(self._shared(), self.lam @ total, total.sum(0))
        return torch.from_numpy(result + sum(np.nan_to_num(self._flat(regularizer)) for regularizer in regularizers))

    def _solve(self, jacobians, present):
        shared = self._shared()
        self.reach |= ~np.isnan(jacobians).all(0)
        if (self._shared() != shared).any():  # norms over other parameters say nothing about these
            self.solved[:] = False
        jacobian = np.nan_to_num(jacobians).sum(0)[:, self._shared()]
        norms = np.linalg.norm(jacobian, axis=1)
        self.solved |= present
        active = present & (norms > 0)
        if not active.any():
            return
        fresh = np.zeros(self.count)
        fresh[active] = min_norm(jacobian[active] / norms[active, None])
        fresh *= max(1 - self.alpha[~present].sum(), 1 / self.count)  # the absent keep their share
        decay = self.ema_decay if self.averaged else 0.0
        self.alpha[present] = decay * self.alpha[present] + (1 - decay) * fresh[present]
        self.lam[present] = 0.0
        self.lam[active] = norms[active].mean() * self.alpha[active] / norms[active]
        self.averaged = True

    def _shared(self):
        return self.reach.sum(0) >= min(2, self.count)

    def _flat(self, loss):
        """The gradient as one vector, NaN where the loss does not reach."""
        grads = [None] * len(self.parameters)
        if loss is not None and loss.requires_grad:
            grads = torch.autograd.grad(loss, self.parameters, retain_graph=True, allow_unused=True)
        return np.concatenate(
            [
                np.full(p.numel(), np.nan) if g is None else g.double().reshape(-1).numpy()
                for p, g in zip(self.parameters, grads, strict=True)
            ]
        )
