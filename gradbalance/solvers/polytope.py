"""The set that α must lie in, {x: Ex = t, Ax ≥ b}, and the point of it that is nearest to a given one.

The nearest point is Lawson and Hanson's least-distance problem (chapter 23), which is one of non-negative least
squares, and which also finds out whether the set is empty.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradbalance.solvers.constraints import LinearConstraint
from gradbalance.solvers.exact import Array, least_squares, non_negative_least_squares

FEASIBLE = 1e-9
"""A point that misses its constraints (with rows of length 1) by no more is taken to meet them."""

SMALLEST = 1e-18
"""1 / (1 + ‖w‖²) is not smaller for any step w that could be right."""

HELD = 1e-12
"""A constraint holds with equality if there is no more room than this."""


class EmptyError(ValueError):
    """No point meets the constraints."""


class Polytope(NamedTuple):
    """Where α may be: ``equal @ x == target`` and ``rows @ x >= least``; the rows have length 1."""

    equal: Array  # (E, K)
    target: Array  # (E,)
    rows: Array  # (R, K)
    least: Array  # (R,)

    def scaled(self, c: Array) -> "Polytope":
        """Return the set of x for which c x is in this one."""
        equal, rows = self.equal * c, self.rows * c
        return Polytope(
            with_unit_rows(equal), self.target / _lengths(equal), with_unit_rows(rows), self.least / _lengths(rows)
        )

    def with_equal(self, equal: Array, target: Array) -> "Polytope":
        """Return the part of the set where these equations hold too."""
        return self._replace(equal=np.vstack([self.equal, equal]), target=np.append(self.target, target))

    def has(self, x: Array) -> bool:
        """Say whether x is in the set, up to rounding in the equations."""
        inside = (self.rows @ x >= self.least).all() and abs(self.equal @ x - self.target).max(initial=0.0) <= HELD
        return bool(inside)

    def missed(self, x: Array) -> float:
        """Return by how much x is outside, at most over the rows."""
        short = (self.least - self.rows @ x).max(initial=0.0)
        return float(max(short, abs(self.equal @ x - self.target).max(initial=0.0)))

    def held(self, x: Array) -> NDArray[np.bool_]:
        """Say which of the inequalities hold with equality at x."""
        held: NDArray[np.bool_] = self.rows @ x - self.least <= HELD * max(1.0, float(abs(x).max()))
        return held

    def nearest(self, point: Array) -> Array:
        """Return the point of the set that is nearest to ``point``.

        Raises:
            EmptyError: the set has no point.
        """
        if len(self.equal):
            point = point + least_squares(self.equal, self.target - self.equal @ point)
        basis = null_space(self.equal)
        along = self.rows @ basis
        undecided = abs(along).max(axis=1, initial=0.0) > FEASIBLE  # the equations decide the others
        for slack in (0.0, HELD):  # what is left of a set may be too small to survive rounding
            lacking = (self.least - slack - self.rows @ point)[undecided]
            found = point + basis @ _least_step(along[undecided], lacking) if (lacking > 0).any() else point
            if self.missed(found) <= FEASIBLE * max(1.0, float(abs(found).max())):
                return found
        raise EmptyError


def simplex_with(lower: Array, ceiling: float, linear: LinearConstraint | None) -> Polytope:
    """Return {α: Σ α_k = 1, lower ≤ α ≤ ceiling} with linear constraints."""
    size = len(lower)
    equal, target = [np.ones((1, size))], [np.ones(1)]
    rows, least = [np.eye(size)], [lower]
    if ceiling < 1.0:
        rows.append(-np.eye(size))
        least.append(np.full(size, -ceiling))
    if linear is not None:
        same = linear.lower == linear.upper
        equal.append(linear.matrix[same])
        target.append(linear.lower[same])
        for sign, bound in ((1.0, linear.lower), (-1.0, -linear.upper)):
            bounded = np.isfinite(bound) & ~same
            rows.append(sign * linear.matrix[bounded])
            least.append(bound[bounded])
    return Polytope(np.vstack(equal), np.concatenate(target), np.vstack(rows), np.concatenate(least)).scaled(
        np.ones(size)
    )


def null_space(a: Array) -> Array:
    """Return an orthonormal basis, in columns, of {x: ax = 0}, for rows of about length 1."""
    _, singular, right = np.linalg.svd(a)
    return np.asarray(right[np.count_nonzero(singular > 1e-10) :].T)


def _least_step(rows: Array, lacking: Array) -> Array:
    """Return the shortest w with rows @ w >= lacking; anything if there is none."""
    columns = np.vstack([rows.T, lacking])
    aim = np.zeros(len(columns))
    aim[-1] = 1.0
    residual = columns @ non_negative_least_squares(columns, aim, np.maximum(lacking, 0.0)) - aim
    step: Array = residual[:-1] / max(-residual[-1], SMALLEST)
    return step


def with_unit_rows(a: Array) -> Array:
    """Scale each row to length 1; zero rows stay zero."""
    return a / _lengths(a)[:, None]


def _lengths(rows: Array) -> Array:
    lengths = np.sqrt(np.square(rows).sum(axis=1))
    return np.where(lengths > 0, lengths, 1.0)
