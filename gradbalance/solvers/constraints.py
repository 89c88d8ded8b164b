"""Linear constraints on α in the forms people write them: arrays, scipy's class, a function of a cvxpy variable.

All become one ``LinearConstraint``, so that every solver can use them.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]


class NotAffineError(ValueError):
    """A constraint is not affine in α."""


@dataclass(frozen=True, eq=False)
class LinearConstraint:
    """lower ≤ matrix @ α ≤ upper, as in ``scipy.optimize.LinearConstraint``.

    Args:
        matrix: shape (R, K), or (K,) for one constraint; dense or one of scipy's sparse kinds.
        lower: shape (R,) or a number; −inf for no bound.
        upper: shape (R,) or a number; inf for no bound, the same as ``lower`` for an equation.

    Raises:
        TypeError: something is not made of numbers.
        ValueError: the shapes do not fit, a bound is NaN, no number is within the bounds, or ``matrix`` is not finite.
    """

    matrix: Any
    lower: Any = -np.inf
    upper: Any = np.inf

    def __post_init__(self) -> None:
        matrix = np.atleast_2d(_numbers("matrix", _dense(self.matrix)))
        lower, upper = _numbers("lower", self.lower), _numbers("upper", self.upper)
        if matrix.ndim != 2 or not np.isfinite(matrix).all():
            raise ValueError(f"matrix of a constraint must be finite and of shape (R, K), got {self.matrix!r}")
        try:
            lower, upper = (np.broadcast_to(bound, len(matrix)) for bound in (lower, upper))
        except ValueError as error:
            raise ValueError(
                f"bounds of {len(matrix)} constraints must be numbers or have shape ({len(matrix)},), "
                f"got shapes {lower.shape} and {upper.shape}"
            ) from error
        if not (lower <= upper).all() or np.isposinf(lower).any() or np.isneginf(upper).any():
            raise ValueError(f"constraint that no α can meet: lower={lower.tolist()}, upper={upper.tolist()}")
        for name, value in (("matrix", matrix), ("lower", lower), ("upper", upper)):
            object.__setattr__(self, name, value)


def _dense(matrix: Any) -> Any:
    return matrix.toarray() if hasattr(matrix, "toarray") else matrix


def _numbers(name: str, value: Any) -> Array:
    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} of a constraint must be made of numbers, got {value!r}") from error


Constraints: TypeAlias = LinearConstraint | Sequence[LinearConstraint] | Callable[[Any], Any]
"""What ``min_norm`` takes; scipy's LinearConstraint counts as one of ours."""


def as_arrays(constraints: Constraints, size: int) -> LinearConstraint:
    """Bring constraints of any form to arrays.

    Args:
        constraints: see ``min_norm``.
        size: K.

    Raises:
        NotAffineError: a constraint of cvxpy is not affine in α, or has variables of its own.
        TypeError: it is none of the forms.
        ValueError: it has another number of columns than ``size``.
    """
    if isinstance(constraints, LinearConstraint):
        if constraints.matrix.shape[1] != size:
            raise ValueError(f"constraints are on {constraints.matrix.shape[1]} weights, but there are {size}")
        return constraints
    if all(hasattr(constraints, name) for name in ("A", "lb", "ub")):  # scipy's
        return as_arrays(LinearConstraint(constraints.A, constraints.lb, constraints.ub), size)  # type: ignore[union-attr]
    if callable(constraints):
        return _affine(constraints, size)
    if not isinstance(constraints, Sequence) or isinstance(constraints, str):
        raise TypeError(
            "constraints must be a LinearConstraint, a sequence of them or a function of a cvxpy variable, "
            f"got {constraints!r}"
        )
    return _stacked([as_arrays(each, size) for each in constraints], size)


def prepared(constraints: Constraints, size: int, solver: str) -> Constraints:
    """Return the constraints as arrays, or as they are if they are not affine and ``solver`` can do with that."""
    try:
        return as_arrays(constraints, size)
    except NotAffineError:
        if solver == "exact":
            raise
        return constraints


def _stacked(parts: list[LinearConstraint], size: int) -> LinearConstraint:
    return LinearConstraint(
        np.concatenate([np.empty((0, size)), *(part.matrix for part in parts)]),
        np.concatenate([np.empty(0), *(part.lower for part in parts)]),
        np.concatenate([np.empty(0), *(part.upper for part in parts)]),
    )


def _affine(function: Callable[[Any], Any], size: int) -> LinearConstraint:
    """Find the arrays of constraints written with cvxpy, from their values at 0 and at the unit vectors."""
    alpha = require("cvxpy", "constraints as a function").Variable(size, name="alpha")
    return _stacked([_arrays_of(each, alpha) for each in written(function, alpha)], size)


def written(function: Callable[[Any], Any], alpha: Any) -> list[Any]:
    """Return what the user's function makes of α, as a list of cvxpy constraints."""
    cp = require("cvxpy", "constraints as a function")
    found = function(alpha)
    found = list(found) if isinstance(found, list | tuple) else [found]
    for each in found:
        if not isinstance(each, cp.constraints.constraint.Constraint):
            raise TypeError(f"constraints(alpha) must return cvxpy constraints, got {each!r}")
    return found


def _arrays_of(constraint: Any, alpha: Any) -> LinearConstraint:
    cp = require("cvxpy", "constraints as a function")
    bounds = {
        cp.constraints.Zero: (0.0, 0.0),
        cp.constraints.Equality: (0.0, 0.0),
        cp.constraints.Inequality: (-np.inf, 0.0),
        cp.constraints.NonPos: (-np.inf, 0.0),
        cp.constraints.NonNeg: (0.0, np.inf),
    }
    others = [variable for variable in constraint.variables() if variable is not alpha]
    if type(constraint) not in bounds or not all(argument.is_affine() for argument in constraint.args) or others:
        raise NotAffineError(
            f"constraint {constraint} is not affine in α alone: use solver='cvxpy' or, to differentiate, 'cvxpylayers'"
        )
    expression = constraint.expr if hasattr(constraint, "expr") else constraint.args[0]

    def at(point: Array) -> Array:
        alpha.value = point
        return np.asarray(expression.value, dtype=np.float64).ravel()

    offset = at(np.zeros(alpha.size))
    matrix = np.stack([at(unit) - offset for unit in np.eye(alpha.size)], axis=1)
    lower, upper = bounds[type(constraint)]
    return LinearConstraint(matrix, lower - offset, upper - offset)


def require(module: str, user: str) -> Any:
    """Import an optional package; raises ImportError that says who needs it and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{user} needs a package that is missing ({error.name}): "
            "pip install gradbalance[solvers], or use solver='exact'"
        ) from error
