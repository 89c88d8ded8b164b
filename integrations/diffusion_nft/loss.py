r"""DiffusionNFT's loss as terms that carry the graph and constants that carry the rewards.

With v the trained velocity and v_old the sampling policy's, a picture x0 noised to x_t = (1−t) x0 + t ε has an implicit
positive and negative policy v⁺ = β v + (1−β) v_old and v⁻ = (1+β) v_old − β v. Both predict x0 through x̂± = x_t − t v±:

    P = mean (x̂⁺ − x0)² / w⁺,   N = mean (x̂⁻ − x0)² / w⁻,   w± = max(mean |x̂± − x0|, 1e-5) held constant
    L_k = 1/n_k Σ_i m_ki (A_max/β) [r_ki P_i + (1 − r_ki) N_i],   r = ½ + clamp(A, ±A_max) / (2 A_max)

Every objective is linear in the same [P_i; N_i]: `AffineLoss` turns K objectives into one backward, exactly.
Source: DiffusionNFT, arXiv 2509.16117; the affine form and masks: MARBLE, arXiv 2605.06507, made exact.
"""

from __future__ import annotations

import torch


def nft_terms(
    velocity: torch.Tensor,
    old_velocity: torch.Tensor,
    noisy: torch.Tensor,
    clean: torch.Tensor,
    t: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """The per-picture terms [P; N].

    Args:
        velocity: v of the trained policy, shape (n, C, H, W), with graph.
        old_velocity: v of the sampling policy, same shape, a constant.
        noisy: x_t.
        clean: x0.
        t: Noise level of each picture in (0, 1], shape (n,).
        beta: Mixing weight β.

    Returns:
        float64, shape (2, n): row 0 is P, row 1 is N.
    """
    # Both directions at once: v± = v_old ± β (v − v_old).
    step = beta * (velocity - old_velocity.detach())
    mixed = torch.stack([old_velocity.detach() + step, old_velocity.detach() - step])
    error = (noisy - t.to(noisy).view(-1, 1, 1, 1) * mixed - clean).double()
    weight = error.detach().abs().mean(dim=(2, 3, 4)).clamp(min=1e-5)
    return error.square().mean(dim=(2, 3, 4)) / weight


def nft_coefficients(
    advantages: torch.Tensor, counts: torch.Tensor, *, beta: float, advantage_clip: float
) -> torch.Tensor:
    """The constants C with L_k = Σ C[k] · [P; N].

    Each objective's advantage is clamped to r in [0, 1] on its own: clamping after a blend would not be affine.

    Args:
        advantages: Shape (K, n), NaN where the objective does not apply.
        counts: Shape (K,): n_k, the valid terms of objective k in the WHOLE optimizer step, over all its micro-batches
            and timesteps, so that the loss does not depend on how the step is cut up. 0 gives a row of zeros: an
            objective that is absent from the step.
        beta: Mixing weight β.
        advantage_clip: A_max.

    Returns:
        float64, shape (K, 2, n).
    """
    valid = ~advantages.isnan()
    r = 0.5 + advantages.double().nan_to_num(0.0).clamp(-advantage_clip, advantage_clip) / (2 * advantage_clip)
    counted = valid & (counts > 0).unsqueeze(1)
    scale = counted * (advantage_clip / beta) / counts.double().clamp(min=1).unsqueeze(1)
    return torch.stack([scale * r, scale * (1 - r)], dim=1)


def velocity_kl(velocity: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Mean over pictures of mean_CHW (v − v_ref)²: the KL to the base model up to a factor. A float64 scalar."""
    return (velocity - reference.detach()).double().square().mean()
