"""The balancers that look at losses, chance or norms, against independent implementations of the same methods.

Every function returns the largest difference of λ, relative to the largest |λ| of its call, over several numbers of
objectives, seeds and calls in a row. The losses are of order 1: torchjd adds 1e-8 to them.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchjd.aggregation import ExcessMTLWeighting, MeanWeighting, RandomWeighting
from torchjd.scalarization import DWA as TorchjdDWA
from torchjd.scalarization import FAMO as TorchjdFAMO
from torchjd.scalarization import IMTLL as TorchjdIMTLL
from torchjd.scalarization import STCH as TorchjdSTCH
from torchjd.scalarization import UW as TorchjdUW

from gradbalance.balancers import (
    DBMTL,
    DWA,
    FAMO,
    IMTLL,
    RLW,
    STCH,
    Balancer,
    ExcessMTL,
    GradNorm,
    UncertaintyWeighting,
    Uniform,
)
from gradbalance.balancers.randomness import generator

SIZES = (1, 2, 3, 5, 10, 16)
SEEDS = (0, 1, 2)
CALLS = 12


def runs() -> Iterator[tuple[int, np.random.Generator]]:
    """Give each number of objectives with each seed."""
    for size in SIZES:
        for seed in SEEDS:
            yield size, np.random.default_rng(100 * size + seed)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two λ, relative to the largest |λ|."""
    return float((found - expected).abs().max() / expected.abs().max())


def losses_in_a_row(rng: np.random.Generator, size: int) -> list[Tensor]:
    """Draw positive losses of order 1, one set a call."""
    return [torch.from_numpy(rng.uniform(0.5, 2.0, size)) for _ in range(CALLS)]


def coefficients(balancer: Balancer, losses: Tensor) -> Tensor:
    """Return λ where the gradients do not matter."""
    return balancer.coefficients(torch.eye(len(losses), dtype=torch.float64), losses)


def slope(scalarizer: Callable[[Tensor], Tensor], losses: Tensor) -> Tensor:
    """Return λ of a method that is given as a scalar function of the losses: its derivative."""
    values = losses.clone().requires_grad_()
    return torch.autograd.grad(scalarizer(values), values, retain_graph=True)[0]


def uniform() -> float:
    """Compare with torchjd's mean."""
    matrices = [torch.eye(size, dtype=torch.float64) for size in SIZES]
    return max(difference(Uniform().coefficients(m), MeanWeighting()(m)) for m in matrices)


def rlw() -> float:
    """Compare with torchjd's random weighting, whose global generator is given the state of ours."""
    worst = 0.0
    for size in SIZES:
        matrix, own = torch.eye(size, dtype=torch.float64), RLW(seed=size)
        for call in range(CALLS):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(generator(size, call).initial_seed())
                expected = RandomWeighting()(matrix)
            worst = max(worst, difference(own.coefficients(matrix), expected))
    return worst


def dwa() -> float:
    """Compare with torchjd over several periods."""
    worst, period = 0.0, 3
    for size, rng in runs():
        own, other = DWA(period=period), TorchjdDWA()
        for call, losses in enumerate(losses_in_a_row(rng, size), start=1):
            worst = max(worst, difference(coefficients(own, losses), slope(other, losses)))
            if call % period == 0:
                other.step()
    return worst


def uncertainty_weighting() -> float:
    """Compare with torchjd, its log-variances trained by SGD."""
    return _learned(UncertaintyWeighting(lr=0.1), TorchjdUW)


def imtl_l() -> float:
    """Compare with torchjd, its scales trained by SGD."""
    return _learned(IMTLL(lr=0.1), TorchjdIMTLL)


def _learned(balancer: UncertaintyWeighting | IMTLL, peer: Callable[[int], torch.nn.Module]) -> float:
    worst = 0.0
    for size, rng in runs():
        own, other = type(balancer)(balancer.lr), peer(size).double()
        sgd = torch.optim.SGD(other.parameters(), lr=balancer.lr)
        for losses in losses_in_a_row(rng, size):
            worst = max(worst, difference(coefficients(own, losses), slope(other, losses)))
            sgd.zero_grad()
            other(losses).backward()
            sgd.step()
    return worst


def famo() -> float:
    """Compare with torchjd, which is given the next call's losses as those after the step."""
    worst = 0.0
    for size, rng in runs():
        bounds = torch.from_numpy(rng.uniform(-1.0, 0.0, size))
        own, other = FAMO(min_losses=bounds), TorchjdFAMO(size, bounds).double()
        for call, losses in enumerate(losses_in_a_row(rng, size)):
            if call > 0:
                other.update(losses)
            worst = max(worst, difference(coefficients(own, losses), slope(other, losses)))
    return worst


def stch() -> float:
    """Compare with torchjd."""
    worst = 0.0
    for size, rng in runs():
        preference, ideal = (torch.from_numpy(rng.uniform(0.1, 1.0, size)) for _ in range(2))
        own = STCH(0.1, preference, ideal)
        other = TorchjdSTCH(0.1, preference / preference.sum(), ideal)
        for losses in losses_in_a_row(rng, size):
            worst = max(worst, difference(coefficients(own, losses), slope(other, losses)))
    return worst


def excess_mtl_one_parameter() -> float:
    """Compare with torchjd where every gradient is one number, after its warm-up of one call."""
    return _excess(lambda rng, size: np.eye(size))


def excess_mtl_fixed_directions() -> float:
    """Compare with torchjd where every gradient keeps its direction, after its warm-up of one call."""
    return _excess(lambda rng, size: rng.standard_normal((size, 4)))


def _excess(directions: Callable[[np.random.Generator, int], NDArray[np.float64]]) -> float:
    """Take lengths of 1000 and more, next to which the 1e-7 that torchjd adds under its roots is nothing."""
    worst = 0.0
    for size, rng in runs():
        along = directions(rng, size)
        own, other = ExcessMTL(lr=0.3), ExcessMTLWeighting(robust_step_size=0.3, n_warmup_steps=1)
        for _ in range(CALLS):
            gradients = torch.from_numpy(along * rng.uniform(1e3, 3e3, (size, 1)))
            worst = max(worst, difference(own.coefficients(gradients @ gradients.T), other(gradients)))
    return worst


def grad_norm() -> float:
    """Compare with the derivative of the paper's loss by autograd, with our step: in log w and relative to the mean."""
    worst, alpha, lr = 0.0, 1.5, 0.025
    for size, rng in runs():
        own, weights, first = GradNorm(alpha, lr), torch.ones(size, dtype=torch.float64), torch.empty(0)
        for losses in losses_in_a_row(rng, size):
            gradients = torch.from_numpy(rng.standard_normal((size, 2 * size)))
            worst = max(worst, difference(own.coefficients(gradients @ gradients.T, losses), weights))
            first = first if len(first) else losses
            logs = weights.log().requires_grad_()
            norms = (logs.exp()[:, None] * gradients).norm(dim=1)
            ratio = losses / first
            target = (norms.mean() * (ratio / ratio.mean()) ** alpha).detach()
            step = torch.autograd.grad((norms - target).abs().sum(), logs)[0] / norms.mean().detach()
            step = torch.where((norms - target).abs() < 1e-12 * target, 0.0, step)
            weights = (logs.detach() - lr * step).softmax(0) * size
    return worst


def db_mtl() -> float:
    """Compare with gradients of log losses by autograd, brought to the longest one's norm."""
    worst = 0.0
    for size, rng in runs():
        jacobian = torch.from_numpy(rng.standard_normal((size, 2 * size)) * 10.0 ** rng.uniform(-3, 3, (size, 1)))
        offsets = torch.from_numpy(rng.uniform(0.5, 2.0, size))
        point = torch.zeros(2 * size, dtype=torch.float64)
        logs = torch.func.jacrev(lambda x, j=jacobian, o=offsets: torch.log(j @ x + o))(point)
        norms = logs.norm(dim=1)
        expected = (norms.max() / norms) / offsets  # of the raw gradients, g = L ∇ log L
        worst = max(worst, difference(DBMTL().coefficients(jacobian @ jacobian.T, offsets), expected))
    return worst


PAIRS: dict[tuple[str, str], Callable[[], float]] = {
    ("uniform", "torchjd"): uniform,
    ("rlw", "torchjd, the same normal numbers"): rlw,
    ("dwa", "torchjd"): dwa,
    ("uncertainty_weighting", "torchjd and SGD"): uncertainty_weighting,
    ("imtl_l", "torchjd and SGD"): imtl_l,
    ("famo", "torchjd"): famo,
    ("stch", "torchjd"): stch,
    ("excess_mtl", "torchjd, one parameter"): excess_mtl_one_parameter,
    ("excess_mtl", "torchjd, fixed directions"): excess_mtl_fixed_directions,
    ("grad_norm", "its loss by autograd, our step"): grad_norm,
    ("db_mtl", "log losses by autograd"): db_mtl,
}
