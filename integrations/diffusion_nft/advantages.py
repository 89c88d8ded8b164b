"""Rewards to advantages: one independent estimator per reward, and missing rewards left out exactly.

A reward that does not apply to a picture is NaN; it stays NaN in the advantages and enters no mean, std or count.
"""

from __future__ import annotations

import torch

STD_FLOOR = 1e-4  # of the largest |R_k|; published as an absolute number, which is the same at a reward scale of 1


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    r"""A_k = (R_k − mean of R_k over the picture's prompt) / (std of R_k over all valid pictures + 1e-4 max |R_k|).

    The mean is the prompt's own, the std is the whole epoch's (population std): dividing by a group's own std would
    blow up groups that nearly agree. A group with one valid picture, or whose pictures agree, gets exactly 0.

    A reward in other units (multiplied by a positive factor) has the same advantages. The published floor is 1e-4
    itself: the same where the largest |R_k| is 1, but it drowns a reward whose numbers are small.

    Args:
        rewards: Shape (K, N), NaN where a reward does not apply.
        groups: Shape (N,), integer prompt index of each picture.

    Returns:
        float64 advantages (K, N), NaN exactly where `rewards` is.
    """
    rewards = rewards.double()
    valid = ~rewards.isnan()
    values = rewards.nan_to_num(0.0)
    one_hot = torch.nn.functional.one_hot(groups).double()  # (N, G)
    sums = values @ one_hot
    counts = valid.double() @ one_hot
    mean = (sums / counts.clamp(min=1)) @ one_hot.T
    total = valid.sum(1, keepdim=True).clamp(min=1)
    centre = values.sum(1, keepdim=True) / total
    std = (((values - centre) ** 2 * valid).sum(1, keepdim=True) / total).sqrt()
    deviation = values - mean
    scale = values.abs().amax(1, keepdim=True)
    spread = std + STD_FLOOR * scale
    advantages = deviation.masked_fill(deviation.abs() <= 1e-12 * scale, 0.0) / spread.where(spread > 0, 1.0)
    return advantages.masked_fill(~valid, torch.nan)


def summed_advantages(advantages: torch.Tensor) -> torch.Tensor:
    r"""GDPO's single advantage: A = Σ_k A_k over the rewards that apply, divided by its std over all pictures.

    Each reward is normalised before the sum, so that none is drowned by the units or the spread of another (GDPO, arXiv
    2601.05242).

    Args:
        advantages: Shape (K, N), NaN where a reward does not apply.

    Returns:
        Shape (N,); NaN where no reward applies.
    """
    total = advantages.nan_to_num(0.0).sum(0)
    applies = ~advantages.isnan().all(0)
    std = total[applies].std(correction=0)
    return (total / std.where(std > 0, 1.0)).masked_fill(~applies, torch.nan)


def weighted_sum(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The usual single reward Σ_k w_k R_k of the raw rewards, skipping those that do not apply.

    Args:
        rewards: Shape (K, N), NaN where a reward does not apply.
        weights: Shape (K,).

    Returns:
        Shape (N,); NaN where no reward applies.
    """
    total = weights.to(rewards) @ rewards.nan_to_num(0.0)
    return total.masked_fill(rewards.isnan().all(0), torch.nan)
