"""The two-objective landscape on which most papers of the field draw their paths, with its Pareto set known.

Source: Yu et al., PCGrad (arXiv 2001.06782), in the form of Liu et al., CAGrad (arXiv 2110.14048); the start points and
the small scale of the first objective are those of Liu et al., FAMO (arXiv 2306.03792).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbalance.balancers import Balancer

STARTS = ((-8.5, 7.5), (0.0, 0.0), (9.0, 9.0), (-7.5, -0.5), (9.0, -1.0))
FRONT = -8.3552  # x_2 on the Pareto set, x_1 is in [−7, 7]
LOWER = 5e-6
SCALE = 0.1
LEAST = (-20.0 * SCALE, -20.0)  # just below the least values: balancers are given losses from here, so that all are > 0


def objectives(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two losses of points x, shape (..., 2)."""
    x1, x2 = x.unbind(-1)
    u1 = (0.5 * (-x1 - 7) - torch.tanh(-x2)).abs().clamp(min=LOWER).log() + 6
    u2 = (0.5 * (-x1 + 3) + torch.tanh(-x2) + 2).abs().clamp(min=LOWER).log() + 6
    q1 = ((-x1 + 7).square() + 0.1 * (-x2 - 8).square()) / 10 - 20
    q2 = ((-x1 - 7).square() + 0.1 * (-x2 - 8).square()) / 10 - 20
    upper, lower = torch.tanh(0.5 * x2).clamp(min=0), torch.tanh(-0.5 * x2).clamp(min=0)
    return SCALE * (u1 * upper + q1 * lower), u2 * upper + q2 * lower


@dataclass(frozen=True)
class Paths:
    """Where the methods went from every start.

    Attributes:
        points: Shape (steps recorded, methods, starts, 2).
        arrived: Whether the end is on the Pareto front, shape (methods, starts).
    """

    points: Tensor
    arrived: Tensor


def descend(make: list[Callable[[], Balancer]], *, steps: int, lr: float, record: int = 100) -> Paths:
    """Follow Adam along the balanced direction from every start, all methods side by side.

    Args:
        make: for each method, what makes a fresh balancer; every start has its own.
        steps: of Adam.
        lr: its learning rate.
        record: keep every so many-th point.
    """
    balancers = [[fresh() for _ in STARTS] for fresh in make]
    x = torch.tensor(STARTS, dtype=torch.float64).repeat(len(make), 1, 1).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=lr)  # elementwise, so that no path sees another
    points = []
    for step in range(steps):
        if step % record == 0:
            points.append(x.detach().clone())
        losses = objectives(x)
        gradients = torch.stack([torch.autograd.grad(loss.sum(), x, retain_graph=True)[0] for loss in losses], -2)
        gramians, values = gradients @ gradients.mT, torch.stack(losses, -1).detach() - x.new_tensor(LEAST)
        coefficients = [
            torch.stack([balancer.coefficients(m, v) for balancer, m, v in zip(row, *of_method, strict=True)])
            for row, *of_method in zip(balancers, gramians, values, strict=True)
        ]
        x.grad = (torch.stack(coefficients)[..., None] * gradients).sum(-2)
        optimizer.step()
    end = x.detach()
    arrived = ((end[..., 1] - FRONT).abs() < 0.15) & (end[..., 0].abs() < 7.05)
    return Paths(torch.stack([*points, end]), arrived)
