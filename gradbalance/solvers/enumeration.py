"""The min-norm point where the Gramian is: all sets of objectives at once, so that nothing depends on a value.

For up to 8 objectives there are at most 255 sets S that may take part. In the standard form of ``exact.py``, y ≥ 0 and
s = Hy − c ≥ 0 with H = M + c cᵀ, each set has one candidate, H_SS y_S = c_S. All are computed by Gauss–Jordan
elimination without pivoting, which the right set, on which H is positive definite, does not need, and the one that
comes nearest to the conditions is taken. Shapes depend on K alone and no number comes back to the host, so that a whole
training step can be captured in a CUDA graph or compiled without a break.

The derivative is that of the chosen set's linear system, by autograd through a second elimination.
"""

import torch
from torch import Tensor

from gradbalance.solvers.checks import NEGLIGIBLE_NORM
from gradbalance.solvers.standard import ALL_FLOOR, raise_floor

MOST = 8
"""Largest K."""


def solve(gramian: Tensor, floor: float) -> Tensor:
    """Find the min-norm points of a batch of Gramians.

    Args:
        gramian: shape (…, K, K) with K ≤ 8, any floating dtype and device; its values are not checked.
        floor: smallest α_k of an objective that has a gradient.

    Returns:
        α, shape (…, K), on the same device, in float64 (float32 on mps). Where several are optimal, one with the
        fewest objectives. NaN where the Gramian is not finite.
    """
    m = widened(gramian)
    m = (m + m.mT) / 2
    norms = _norms(m)
    active = norms > NEGLIGIBLE_NORM * norms.amax(-1, keepdim=True)
    count = active.sum(-1, keepdim=True, dtype=m.dtype)
    share = 1.0 - count * floor
    if floor > 0:
        m = raise_floor(m, floor, share[..., None])
        # An h_k may vanish although no gradient does: any positive number serves as its norm.
        norms = _norms(m).maximum(torch.finfo(m.dtype).eps ** 0.5 * norms.amax(-1, keepdim=True))
    inverse = torch.where(active, 1.0 / norms, 0.0)
    c = inverse / inverse.amax(-1, keepdim=True).clamp(min=torch.finfo(m.dtype).tiny)
    h = m * (inverse[..., :, None] * inverse[..., None, :]) + c[..., :, None] * c[..., None, :]
    gamma = c * _solve_on(_best_set(h.detach(), c, active), h, c)
    some = count > 0
    gamma = gamma / torch.where(some, gamma.sum(-1, keepdim=True), 1.0)
    gamma = torch.where(share > ALL_FLOOR, gamma, 1.0 / count.clamp(min=1))
    alpha = torch.where(some, torch.where(active, floor + share * gamma, 0.0), 1.0 / m.shape[-1])
    finite = m.detach().isfinite().all(-1).all(-1, keepdim=True)
    return torch.where(finite, alpha, torch.nan)


def widened(gramian: Tensor) -> Tensor:
    """Return the Gramian in the widest format of its device."""
    return gramian.to(torch.float32 if gramian.device.type == "mps" else torch.float64)


def _norms(m: Tensor) -> Tensor:
    return m.detach().diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()


def _best_set(h: Tensor, c: Tensor, active: Tensor) -> Tensor:
    """Return the mask of the set whose candidate is nearest to optimal, (…, K); the smallest of equals."""
    size = c.shape[-1]
    numbers = torch.arange(1, 2**size, device=h.device)
    sets = _members(numbers, size)
    h, c = h[..., None, :, :], c[..., None, :]
    y = _solve_on(sets & active[..., None, :], h, c)
    slack = (h * y[..., None, :]).sum(-1) - c
    residual = y.minimum(slack).abs().amax(-1) / (y.sum(-1).clamp(min=1.0))
    out = (sets & ~active[..., None, :]).any(-1) | ~residual.isfinite()
    rounding = 500 * torch.finfo(h.dtype).eps  # as good as 0: the number of members decides, then the order
    order = 1.0 + 1e-3 * sets.sum(-1) + 1e-6 * numbers
    score = torch.where(out, torch.inf, residual.clamp(min=rounding) * order)
    return _members(score.argmin(-1) + 1, size) & active  # computed anew: a single number as an index would be read


def _members(numbers: Tensor, size: int) -> Tensor:
    """Return the sets that the bits of the numbers stand for, as masks."""
    return (numbers[..., None] >> torch.arange(size, device=numbers.device)) & 1 == 1


def _solve_on(members: Tensor, h: Tensor, c: Tensor) -> Tensor:
    """Solve H_SS y_S = c_S, y = 0 outside of S, with one step of refinement."""
    inside = members[..., :, None] & members[..., None, :]
    system = torch.where(inside, h, torch.eye(c.shape[-1], dtype=h.dtype, device=h.device))
    aim = torch.where(members, c, 0.0)
    y = _eliminate(system, aim)
    return y + _eliminate(system, aim - (system * y[..., None, :]).sum(-1))


def _eliminate(a: Tensor, b: Tensor) -> Tensor:
    """Solve ax = b by Gauss–Jordan elimination without pivoting."""
    size = b.shape[-1]
    rows = torch.arange(size, device=b.device)[:, None]
    work = torch.cat([a, b[..., None]], -1)
    for k in range(size):
        pivot = work[..., k : k + 1, :] / work[..., k : k + 1, k : k + 1]
        work = torch.where(rows == k, pivot, work - work[..., :, k : k + 1] * pivot)
    return work[..., -1]
