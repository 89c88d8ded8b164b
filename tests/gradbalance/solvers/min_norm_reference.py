"""A slow, exact twin of the min-norm solver: try every set of objectives, in rational arithmetic."""

from fractions import Fraction
from itertools import combinations


def exact_min_norm(gramian):
    """The min-norm α for a Gramian of Python numbers that is positive semidefinite without rounding.

    For every set S, smallest first: solve (Mα)_S = μ, Σ α_S = 1, and take the first solution with α ≥ 0 and Mα ≥ μ.
    By Carathéodory's theorem some affinely independent set, for which the system has one solution, contains the answer.
    """
    m = [[Fraction(entry) for entry in row] for row in gramian]
    indices = range(len(m))
    for size in range(1, len(m) + 1):
        for subset in combinations(indices, size):
            system = [[m[i][j] for j in subset] + [Fraction(-1), Fraction(0)] for i in subset]
            system.append([Fraction(1)] * size + [Fraction(0), Fraction(1)])
            solution = _solve(system)
            if solution is None or min(solution[:size]) < 0:
                continue
            alpha = [Fraction(0)] * len(m)
            for i, value in zip(subset, solution, strict=False):
                alpha[i] = value
            if all(sum(m[i][j] * alpha[j] for j in indices) >= solution[-1] for i in indices):
                return alpha
    raise AssertionError("a positive semidefinite Gramian has a min-norm point")


def square_norm(gramian, alpha):
    """αᵀMα without rounding."""
    weights = [Fraction(a) for a in alpha]
    return sum(
        a * b * Fraction(entry)
        for a, row in zip(weights, gramian, strict=True)
        for b, entry in zip(weights, row, strict=True)
    )


def _solve(rows):
    """Gauss-Jordan on the augmented rows; None if singular."""
    rows = [row[:] for row in rows]
    size = len(rows)
    for column in range(size):
        pivot = next((r for r in range(column, size) if rows[r][column] != 0), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [entry / rows[column][column] for entry in rows[column]]
        for r in range(size):
            if r != column and rows[r][column] != 0:
                rows[r] = [a - rows[r][column] * b for a, b in zip(rows[r], rows[column], strict=True)]
    return [row[-1] for row in rows]
