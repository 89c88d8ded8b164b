"""Random strongly convex quadratics with known conflict, scales and noise, and the best that any method can reach.

f_k(x) = ½ (x − u_k)ᵀ A_k (x − u_k), k = 1 … K, started at x = 0, where ∇f_k = −A_k u_k. The gradients there are drawn
first, then the A_k: eigenvalues spread over a factor of 10, each objective its own. All A_k are diagonal, so that many
problems with many parameters are followed at once. A step sees ∇f_k(x) + ε_k, Gaussian, of the same size all along.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

Array = NDArray[np.float64]

PARAMETERS = 1000
CONDITION = 10.0


@dataclass(frozen=True)
class Cell:
    """A kind of problem.

    Attributes:
        ratio: the largest objective over the smallest; the others lie evenly between in the logarithm, in random order.
        signal_to_noise: ‖∇f_k‖ at the start over the root mean square of ‖ε_k‖, the same for each objective.
        cosine: between the first gradient and each other one, at the start. The others have nothing else in common.
    """

    ratio: float
    signal_to_noise: float
    cosine: float


@dataclass(frozen=True)
class Quadratics:
    """Problems side by side.

    Attributes:
        curvature: eigenvalues of the A_k, shape (problems, K, parameters).
        minima: u_k, of the same shape.
        lengths: ‖∇f_k‖ at the start, shape (problems, K).
        noise: root mean square of ‖ε_k‖, shape (problems, K).
        reachable: the largest min_k of the progress that any x has, shape (problems,).
        seeds: which noise each problem sees, shape (problems,), into ``generators``.
        generators: of the noise, one a seed.
    """

    curvature: Tensor
    minima: Tensor
    lengths: Tensor
    noise: Tensor
    reachable: Tensor
    seeds: Tensor
    generators: list[np.random.Generator]

    def losses(self, x: Tensor) -> Tensor:
        """f_k of points x, shape (problems, points, parameters): shape (problems, points, K)."""
        pull = self.curvature * self.minima
        least = 0.5 * (pull * self.minima).sum(-1)[:, None]
        values = 0.5 * x.square() @ self.curvature.mT - x @ pull.mT + least  # no (points × K × parameters)
        return values.clamp(min=0.0)

    def gradients(self, x: Tensor, noise: Tensor) -> Tensor:
        """∇f_k + ε_k, noise of shape (problems, K, parameters): shape (problems, points, K, parameters)."""
        return torch.addcmul((noise - self.curvature * self.minima)[:, None], self.curvature[:, None], x[:, :, None])

    def draw_noise(self) -> tuple[Tensor, Tensor]:
        """Noise of the next step in each of two halves of its samples: half their sum and half their difference.

        Returns:
            ε, that of the step's gradients, and δ: the halves have ε + δ and ε − δ. Shape (problems, K, parameters).
        """
        shape = (2, *self.minima.shape[1:])
        drawn = np.stack([generator.standard_normal(shape) for generator in self.generators], 1)
        unit = torch.from_numpy(drawn * shape[-1] ** -0.5)
        mean, difference = unit[:, self.seeds] * self.noise[..., None]
        return mean, difference

    def worst_progress(self, x: Tensor) -> Tensor:
        """Progress of the objective that has least, of points x, shape (problems, points).

        The progress 1 − f_k(x) / f_k(0) is 0 at the start and 1 at the objective's own minimum; the smallest one is
        divided by what is reachable. So 1 is the best point there is, 0 the start, and less than 0 harms an objective.
        """
        progress = 1.0 - self.losses(x) / self.losses(torch.zeros_like(x))
        return progress.amin(-1) / self.reachable[:, None]


def draw(cells: Sequence[Cell], seeds: Sequence[int], objectives: int) -> Quadratics:
    """Make one problem a cell and seed, seeds innermost. A seed has the same draws and noise in every cell."""
    problems = [(cell, seed) for cell in cells for seed in seeds]
    shapes = [_shape(seed, objectives, cell.cosine) for cell, seed in problems]
    curvature, minima, reachable = (torch.from_numpy(np.stack(of)) for of in zip(*shapes, strict=True))
    scales = torch.from_numpy(np.stack([_scales(seed, objectives, cell.ratio) for cell, seed in problems]))
    signal_to_noise = torch.tensor([cell.signal_to_noise for cell, _ in problems], dtype=torch.float64)
    return Quadratics(
        curvature=curvature * scales[..., None],
        minima=minima,
        lengths=scales,
        noise=scales / signal_to_noise[:, None],
        reachable=reachable,
        seeds=torch.arange(len(seeds)).repeat(len(cells)),
        generators=[np.random.default_rng([seed, 2]) for seed in seeds],
    )


def _scales(seed: int, objectives: int, ratio: float) -> Array:
    order = np.random.default_rng([seed, 1]).permutation(objectives)
    scales: Array = ratio ** (order / (objectives - 1) - 0.5)
    return scales


@functools.cache
def _shape(seed: int, objectives: int, cosine: float) -> tuple[Array, Array, Array]:
    """Eigenvalues, minima and what is reachable, where each gradient has length 1 at the start."""
    rng = np.random.default_rng([seed, 0])
    axes = np.linalg.qr(rng.standard_normal((PARAMETERS, objectives)))[0].T
    gradients = np.vstack([axes[:1], cosine * axes[0] + np.sqrt(1 - cosine**2) * axes[1:]])
    curvature = CONDITION ** (rng.random((objectives, PARAMETERS)) - 0.5)
    minima = -gradients / curvature
    return curvature, minima, np.array(reachable(curvature, minima))


def reachable(curvature: Array, minima: Array) -> float:
    """Largest min_k (1 − f_k(x) / f_k(0)) over x: 1 − the dual's maximum over the weights of the relative losses.

    Args:
        curvature: eigenvalues of the A_k, shape (K, parameters).
        minima: u_k, of the same shape.
    """
    relative = curvature / (0.5 * (curvature * minima**2).sum(-1, keepdims=True))

    def least(weights: Array) -> tuple[float, Array]:
        weighted = weights @ relative
        x = weights @ (relative * minima) / weighted
        losses = 0.5 * (relative * (x - minima) ** 2).sum(-1)
        return -float(weights @ losses), -losses

    count = len(curvature)
    found = minimize(
        least,
        np.full(count, 1.0 / count),
        jac=True,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * count,
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1.0, "jac": np.ones_like},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    if not found.success:
        raise RuntimeError(f"the best point was not found: {found.message}")
    return 1.0 + float(found.fun)
