"""``min_norm``: the point of least norm in the convex hull of K vectors, with all its options, on any device."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from gradbalance.solvers import constrained, convex, enumeration, exact
from gradbalance.solvers.checks import active_rows, check_gramian
from gradbalance.solvers.constraints import Constraints, LinearConstraint, prepared
from gradbalance.solvers.derivative import differentiable
from gradbalance.solvers.exact import Array
from gradbalance.solvers.mixing import group, prefer
from gradbalance.solvers.polytope import FEASIBLE, EmptyError, Polytope, simplex_with
from gradbalance.solvers.standard import ALL_FLOOR, min_norm_with_floor, raise_floor, standard_form

SOLVERS = ("exact", "cvxpy", "cvxpylayers")
"""Those that take any K and every option; "enumeration" is for K ≤ 8 without ceiling and constraints."""


def min_norm(
    gramian: Tensor,
    *,
    floor: float = 0.0,
    ceiling: float = 1.0,
    preference: Sequence[float] | Tensor | None = None,
    constraints: Constraints | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    solver: str = "exact",
) -> Tensor:
    """Find the point of least norm in the convex hull of K vectors.

    Computes α = argmin αᵀMα over {floor ≤ α_k ≤ ceiling, Σ_k α_k = 1, constraints}. The vector d = Σ_k α_k g_k is
    unique; if several α give it, "exact" returns the one with the least Σ_k (α_k ‖g_k‖)², whatever the order of the
    vectors.

    Args:
        gramian: M_kl = ⟨g_k, g_l⟩, positive semidefinite, shape (K, K) or, for a batch, (…, K, K), any floating dtype
            and device; norms may differ by many orders of magnitude. Rows that are zero, relative to the largest, leave
            the problem.
        floor: smallest α_k of an objective that has a gradient, in [0, 1/K].
        ceiling: largest α_k, at least 1/K.
        preference: p, K positive numbers: the vectors are g_k / p_k. A tensor may require grad.
        constraints: a :class:`LinearConstraint` lower ≤ Aα ≤ upper (or scipy's), a sequence of them, or a function
            that takes a cvxpy variable of size K and returns cvxpy constraints, such as
            ``lambda alpha: [alpha[0] >= 2 * alpha[1]]``. Affine ones suit every solver, others the conic two.
        groups: lists of indices that partition 0 … K−1. The vectors are then the means of the groups' gradients, and
            floor, ceiling, preference and constraints speak of the groups; α_k is its group's weight over the number of
            members. Members without gradient do not count.
        solver: "exact" (active-set methods: fast, and differentiable), "cvxpy" (a conic interior-point method; its
            result carries no gradient), "cvxpylayers" (the same, differentiable), which are for comparison and for
            constraints that are not affine and need ``pip install gradbalance[solvers]``, or "enumeration" (K ≤ 8, all
            sets of objectives at once, without ceiling and constraints, see Note).

    Returns:
        α, float64. For a shape of (K, K): (K,), on the CPU. For a batch: (…, K), on the Gramian's device. 0 for zero
        rows, or if the ceiling or the constraints rule that out, the least they allow; 1/K everywhere (or the nearest
        to it that is allowed) if all rows are zero.

    Raises:
        ValueError: ``gramian`` is not square, symmetric and finite, an option is out of range, or no α meets floor,
            ceiling and constraints.
        RuntimeError: a conic solver failed.
        ImportError: the package of ``solver``, or cvxpy for a function as constraints, is not installed.

    Note:
        *Accuracy.* On unit gradients the residual of the optimality conditions (:func:`kkt_residual`) is about 1e-13 or
        less, under ceiling and constraints 1e-10. On raw ones it is the same relative to the sum of the lengths
        Σ α_k ‖g_k‖, but whether long gradients cancel to within 1e-8 of their length or exactly is a matter of
        rounding, which short ones among them then depend on. Under ceiling and constraints this is for norms within six
        decades of each other. Beyond, α still meets them, but of gradients shorter than 1e-5 of the longest one may be
        taken for another: scale to unit gradients first.

        *Derivative*, with respect to ``gramian`` and ``preference``: that of the optimality conditions with the set of
        the inequalities that hold with equality kept fixed. It can be taken once. Where α has none, the answer is still
        finite: if an inequality holds with equality but is not needed (an α_k just about to leave the floor), the
        one-sided derivative of changes under which it goes on to hold; for linearly dependent vectors, that of the
        pseudo-inverse: the derivative of d under changes that keep the dependence, the part of α that does not move d
        held still.

        *Devices.* Without ceiling and constraints a batch on an accelerator with K ≤ 8 is solved there, by
        "enumeration", without waiting for a value: the call can be captured in a CUDA graph and compiled without a
        break. Nothing about the values is checked then; a Gramian that is not finite gives NaN. Every other batch is
        copied to the CPU at once, solved matrix by matrix and copied back. "enumeration" never leaves the device and
        returns one of the optimal α with the fewest objectives; its derivative can be taken any number of times.

    References:
        P. Wolfe. Finding the nearest point in a polytope. Mathematical Programming 11, 1976.
    """
    if solver not in SOLVERS and solver != "enumeration":
        raise ValueError(f"solver must be one of {', '.join(map(repr, (*SOLVERS, 'enumeration')))}, got {solver!r}")
    options = Options(floor, ceiling, preference, constraints, groups, solver)
    if solver == "enumeration" or (isinstance(gramian, Tensor) and gramian.dim() > 2):
        return _batch(gramian, options)
    return _single(gramian, options)


NARROWED = 1e-5
"""Shorter gradients, relative to the longest, count as so long where ceiling or constraints are lost in rounding."""


MISSED = 1e-3
"""A conic solver that misses the constraints by more has failed; it ends within about 1e-6, or 1e-4 for cvxpylayers."""


class Options(NamedTuple):
    """What ``min_norm`` was called with."""

    floor: float
    ceiling: float
    preference: Sequence[float] | Tensor | None
    constraints: Constraints | None
    groups: Sequence[Sequence[int]] | None
    solver: str

    def mixed(self, gramian: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the Gramian of the vectors to balance, and the objectives' shares in their groups."""
        shares = None
        if self.groups is not None:
            gramian, shares = group(gramian, self.groups)
        if self.preference is not None:
            gramian = prefer(gramian, self.preference)
        return gramian, shares

    def check_range(self, size: int) -> None:
        """Raise TypeError if floor or ceiling is no number, ValueError if they leave no α."""
        for name, value in (("floor", self.floor), ("ceiling", self.ceiling)):
            if not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0.0 <= self.floor * size <= 1.0 + 1e-12:
            raise ValueError(f"floor must be in [0, 1/K] = [0, {1 / size:g}] for K = {size}, got {self.floor!r}")
        if not self.ceiling * size >= 1.0 - 1e-12:
            raise ValueError(f"ceiling must be at least 1/K = {1 / size:g} for K = {size}, got {self.ceiling!r}")

    def region(self, size: int) -> "Region":
        """Return where α may be."""
        self.check_range(size)
        if self.constraints is None:
            return Region(self.floor, self.ceiling, None, None)
        known = prepared(self.constraints, size, self.solver)
        if isinstance(known, LinearConstraint):
            return Region(self.floor, self.ceiling, known, None)
        return Region(self.floor, self.ceiling, None, cast(Callable[[Any], Any], known))


def _single(gramian: Tensor, options: Options) -> Tensor:
    """Solve for a Gramian of shape (K, K), on the CPU."""
    gramian, shares = options.mixed(check_gramian(gramian))
    region = options.region(gramian.shape[-1])
    m = gramian.detach().numpy()
    exactly = options.solver == "exact" or not m.any()
    if not exactly and options.solver == "cvxpylayers":
        alpha = _differentiable_conic(gramian, region)
    elif exactly and torch.is_grad_enabled() and gramian.requires_grad:
        alpha = differentiable(gramian, region.floor, lambda values: _exact(values, region))
    else:
        alpha = torch.from_numpy(_exact(m, region)[0] if exactly else _conic(m, region))
    return alpha if shares is None else alpha @ shares


def _batch(gramian: Tensor, options: Options) -> Tensor:
    """Solve for any leading dimensions: on the Gramian's device if that can be, else matrix by matrix on the CPU."""
    if not isinstance(gramian, Tensor) or not gramian.is_floating_point():
        found = gramian.dtype if isinstance(gramian, Tensor) else type(gramian).__name__
        raise TypeError(f"gramian must be a real floating-point tensor of shape (…, K, K), got {found}")
    if gramian.dim() < 2 or gramian.shape[-1] != gramian.shape[-2] or gramian.shape[-1] == 0:
        raise ValueError(f"gramian must be of shape (…, K, K) with K ≥ 1, got {tuple(gramian.shape)}")
    size = gramian.shape[-1] if options.groups is None else len(options.groups)
    suits = size <= enumeration.MOST and options.constraints is None and options.ceiling >= 1.0
    if options.solver == "enumeration" and not suits:
        raise ValueError(
            f"solver='enumeration' takes at most {enumeration.MOST} objectives, no ceiling and no constraints: "
            "use solver='exact'"
        )
    if options.solver == "enumeration" or (options.solver == "exact" and gramian.device.type != "cpu" and suits):
        options.check_range(size)
        mixed, shares = options.mixed(enumeration.widened(gramian))
        alpha = enumeration.solve(mixed, options.floor)
        return alpha if shares is None else (alpha[..., None, :] @ shares).squeeze(-2)
    if options.constraints is not None:
        options = options._replace(constraints=prepared(options.constraints, size, options.solver))  # once for all
    matrices = gramian.to("cpu", torch.float64).reshape(-1, *gramian.shape[-2:])
    solved = [_single(m, options) for m in matrices]
    alpha = torch.stack(solved) if solved else matrices.new_empty(0)
    return alpha.reshape(gramian.shape[:-1]).to(gramian.device)


class Region(NamedTuple):
    """Where α may be, apart from the simplex."""

    floor: float
    ceiling: float
    linear: LinearConstraint | None  # the affine constraints
    others: Callable[[Any], Any] | None  # the user's function, if what it makes is not affine

    @property
    def limited(self) -> bool:
        """Whether there is more than a floor."""
        return self.ceiling < 1.0 or self.linear is not None or self.others is not None

    def lower(self, m: Array) -> Array:
        """Return the least α for this Gramian: floors are for rows with a gradient."""
        return np.where(active_rows(np.sqrt(m.diagonal())), self.floor, 0.0)

    def polytope(self, m: Array) -> Polytope:
        """Return the set of α for this Gramian."""
        return simplex_with(self.lower(m), self.ceiling, self.linear)

    def empty(self) -> ValueError:
        """Return the error to raise when no α is allowed."""
        linear = "" if self.linear is None and self.others is None else " and the constraints"
        return ValueError(f"no α with sum 1 meets floor={self.floor:g}, ceiling={self.ceiling:g}{linear}")


def _exact(m: Array, region: Region) -> tuple[Array, Polytope | None]:
    """Return α, and the polytope that it was looked for in if there is more than a floor."""
    alpha = min_norm_with_floor(m, region.floor, exact.solve)
    if not region.limited:
        return alpha, None
    polytope = region.polytope(m)
    if not polytope.has(alpha):  # else: optimal in the larger set, optimal in the smaller one
        try:
            alpha = np.clip(_within(m, polytope, alpha), region.lower(m), region.ceiling)  # rounding
        except EmptyError:
            raise region.empty() from None
    return alpha, polytope


def _within(m: Array, polytope: Polytope, guess: Array) -> Array:
    """Return the best α of a polytope; always one of it, whatever rounding does to norms that are far apart."""
    found = constrained.solve(m, polytope, guess)
    if polytope.missed(found) > FEASIBLE:
        shortest = np.where(active_rows(np.sqrt(m.diagonal())), NARROWED**2 * m.diagonal().max(), 0.0)
        found = constrained.solve(m + np.diag(np.maximum(shortest - m.diagonal(), 0.0)), polytope, guess)
    return found if polytope.missed(found) <= FEASIBLE else polytope.nearest(found)


def _conic(m: Array, region: Region) -> Array:
    if not region.limited:
        return min_norm_with_floor(m, region.floor, convex.solve)
    norms, c, restriction = _limited_form(m, region)
    try:
        alpha = c * convex.solve_within(m / (norms[:, None] * norms), restriction)
    except EmptyError:
        raise _lost("cvxpy") if region.others is None else region.empty() from None
    _check_met(alpha, region, m, "cvxpy")
    return np.clip(alpha, region.lower(m), region.ceiling)


def _check_met(alpha: Array, region: Region, m: Array, solver: str) -> None:
    if not region.polytope(m).missed(alpha) <= MISSED:
        raise _lost(solver)


def _lost(solver: str) -> RuntimeError:
    return RuntimeError(
        f"solver={solver!r} found no α that meets ceiling and constraints, though there is one: the norms of the "
        "gradients are too far apart for it. Scale them to unit norm, or use solver='exact'"
    )


def _limited_form(m: Array, region: Region) -> tuple[Array, Array, convex.Restriction]:
    """Return ‖g_k‖ (infinite for rows without gradient), c, and what α = c β has to meet."""
    try:
        polytope, even = region.polytope(m), np.full(len(m), 1.0 / len(m))
        polytope.nearest(even)  # cvxpylayers' solver would not say why it fails
        norms, c, polytope, _ = constrained.scaled_form(m, polytope, even)
    except EmptyError:
        raise region.empty() from None
    return norms, c, convex.restriction(polytope, c, region.others)


def _differentiable_conic(gramian: Tensor, region: Region) -> Tensor:
    """Take the steps of ``_conic`` in torch, so that gradients flow through them and through the solver."""
    m, floor = gramian.detach().numpy(), region.floor
    symmetric = (gramian + gramian.T) / 2  # changes nothing but the derivative, which is that of a symmetric matrix
    if region.limited:
        norms, c, restriction = _limited_form(m, region)
        inverse = torch.from_numpy(1.0 / norms)
        try:
            if region.others is not None:
                convex.solve_within(m / (norms[:, None] * norms), restriction)  # raises if there is no solution
            beta = convex.solve_within_differentiable(symmetric * inverse[:, None] * inverse, restriction)
        except EmptyError:
            raise region.empty() from None
        alpha = torch.from_numpy(c) * beta
        _check_met(alpha.detach().numpy(), region, m, "cvxpylayers")
        return alpha
    rows, lengths, weights, _ = (torch.from_numpy(part) for part in standard_form(m, floor))
    if len(rows) == 0:
        return torch.full_like(gramian[0], 1.0 / len(gramian))
    reduced = symmetric[rows][:, rows]
    share = 1.0 - len(rows) * floor
    if floor > 0:
        reduced = raise_floor(reduced, floor, share)
    if share > ALL_FLOOR:
        gamma = weights * convex.solve_differentiable(reduced / (lengths[:, None] * lengths), weights)
    else:
        gamma = torch.full_like(lengths, 1.0 / len(rows))
    return torch.zeros_like(gramian[0]).index_put((rows,), floor + share * gamma)
