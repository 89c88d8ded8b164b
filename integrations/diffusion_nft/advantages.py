"""Rewards to advantages: one independent estimator per reward, and missing rewards left out exactly.

A reward that does not apply to a picture is NaN; it stays NaN in the advantages and enters no mean, std or count.
"""

from __future__ import annotations

import torch

STD_FLOOR = 1e-4  # added to the std, as published; rewards live on a scale of about 1


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    r"""A_k = (R_k − mean of R_k over the picture's prompt) / (std of R_k over all valid pictures + 1e-4).

    The mean is the prompt's own, the std is the whole epoch's (population std): dividing by a group's own std would
    blow up groups that nearly agree. A group with one valid picture, or whose pictures agree, gets exactly 0.

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
    rounding = 1e-12 * values.abs().amax(1, keepdim=True)
    advantages = deviation.masked_fill(deviation.abs() <= rounding, 0.0) / (std + STD_FLOOR)
    return advantages.masked_fill(~valid, torch.nan)


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
