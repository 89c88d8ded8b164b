"""What balancers check: their options when they are made, vectors and losses when they are used."""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

NUMBER = (float, int, np.floating, np.integer)


def number(name: str, value: Any, interval: str) -> float:
    """Check that an option is a number in an interval.

    Args:
        name: of the option, for the message.
        value: what the user passed.
        interval: in the notation of mathematics, such as ``"[0, 1)"`` or ``"(0, ∞)"``; ``∞`` itself is never allowed.

    Raises:
        ValueError: it is not; the message names option, interval and value.
    """
    low, high = (float(end.replace("∞", "inf")) for end in interval[1:-1].split(","))
    if isinstance(value, NUMBER) and not isinstance(value, bool) and math.isfinite(value):
        above = value >= low if interval[0] == "[" else value > low
        below = value <= high if interval[-1] == "]" else value < high
        if above and below:
            return float(value)
    raise ValueError(f"{name} must be a number in {interval}, got {value!r}")


def integer(name: str, value: Any, *, least: int = 0) -> int:
    """Check that an option is an integer of at least ``least``; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer ≥ {least}, got {value!r}")
    return int(value)


def choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Check that an option is one of the choices; raises ValueError."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def vector(name: str, values: Sequence[float] | Tensor, *, positive: bool = False) -> list[float]:
    """Check that an option holds one finite number for each objective.

    Args:
        name: of the option, for the message.
        values: K numbers, as a sequence or a tensor of shape (K,).
        positive: whether they must be > 0.

    Returns:
        The numbers as a list, which is easy to print and to save.

    Raises:
        TypeError: ``values`` holds something else than numbers.
        ValueError: it has another shape, or a number that is not finite or not positive.
    """
    try:
        found = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be K numbers such as [1.0, 2.0], got {values!r}") from error
    fine = found.isfinite() & (found > 0) if positive else found.isfinite()
    if found.dim() != 1 or not len(found) or not bool(fine.all()):
        kind = "finite number > 0" if positive else "finite number"
        raise ValueError(f"{name} must hold one {kind} per objective, got {found.tolist()}")
    return list(map(float, found.tolist()))


def normalised(name: str, values: Sequence[float] | Tensor) -> list[float]:
    """Check that an option holds K numbers > 0, of which only ratios matter, and scale them to mean 1."""
    found = vector(name, values, positive=True)
    mean = sum(found) / len(found)
    return [value / mean for value in found]


def sized(name: str, values: Sequence[float], size: int) -> Array:
    """Return an option's K numbers as an array; raises ValueError if there are not as many as objectives."""
    if len(values) != size:
        raise ValueError(f"{name} has {len(values)} values, but there are {size} objectives")
    return np.array(values, dtype=np.float64)


def parts(name: str, values: Sequence[float] | None, rows: NDArray[np.intp], size: int) -> Array:
    """Return the objectives' parts in a sum over those that have a gradient.

    Args:
        name: of the option, for the message.
        values: one positive number per objective, or None for the mean.
        rows: indices of the objectives that have a gradient.
        size: K.

    Returns:
        The numbers of these objectives, brought to sum 1, or 1 / their count for each.

    Raises:
        ValueError: there are not as many values as objectives.
    """
    if values is None:
        return np.full(len(rows), 1.0 / max(len(rows), 1))
    found = sized(name, values, size)[rows]
    return np.asarray(found / found.sum())


def loss_values(losses: Tensor | None, size: int, user: str) -> Array:
    """Return the K loss values as an array; NaN says that an objective is absent.

    Args:
        losses: what the balancer was given, shape (K,).
        size: K.
        user: the method or option that looks at losses, for the message.

    Raises:
        TypeError: they are no tensor.
        ValueError: there are none, or not K of them.
    """
    if losses is None:
        raise ValueError(f"{user} needs the loss values: pass losses")
    if not isinstance(losses, Tensor):
        raise TypeError(f"losses must be a tensor of shape ({size},), got {type(losses).__name__}")
    if losses.shape != (size,):
        raise ValueError(f"losses must have shape ({size},), got {tuple(losses.shape)}")
    return array(losses)


def signal_values(signal: Tensor, size: int) -> Array:
    """Return the signal as a symmetric array: a Gramian, but for a raw estimate that may be indefinite.

    Raises:
        TypeError: it is not a tensor of real numbers.
        ValueError: it has not the shape (size, size), or an entry that is not finite; the message names the row.
    """
    if not isinstance(signal, Tensor) or not signal.is_floating_point():
        found = signal.dtype if isinstance(signal, Tensor) else type(signal).__name__
        raise TypeError(f"signal must be a real floating-point tensor of shape ({size}, {size}), got {found}")
    if signal.shape != (size, size):
        raise ValueError(f"signal must have the gramian's shape ({size}, {size}), got {tuple(signal.shape)}")
    u = array(signal)
    if np.count_nonzero(np.isfinite(u)) < u.size:
        row = int((~np.isfinite(u)).any(axis=1).argmax())
        raise ValueError(f"signal has non-finite values in row {row}: {u.tolist()}; put 0 where nothing is known")
    return np.asarray((u + u.T) / 2)


def array(tensor: Tensor) -> Array:
    """Return the values in float64; on K numbers numpy takes a third of torch's time."""
    values: Array = tensor.detach().to("cpu", torch.float64).numpy()
    return values
