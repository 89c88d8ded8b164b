"""A balancer turns the Gramian of K gradients into K coefficients: the update is d = Σ_k λ_k g_k.

The Gramian M_kl = ⟨g_k, g_l⟩ holds all that the methods here need to know about the gradients, so a balancer never
sees the P parameters and can be used, and tested, with no optimizer.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from gradbalance.solvers.checks import check_gramian


class Balancer(ABC):
    """Gramian in, coefficients out.

    The work is in two steps because optimizers that smooth over time smooth the first one's result:
    ``weights`` judges the gradients, ``scale`` turns the (smoothed) weights into coefficients of the raw gradients.

    A row of the Gramian that is zero, relative to the largest, is an objective that is absent or has no gradient: it
    must not change the coefficients of the others.

    What a method remembers from call to call are the attributes that ``STATE`` names: plain numbers or lists of them,
    replaced at each call and never changed in place.

    Attributes:
        simplex: True if ``weights`` are non-negative with sum 1. An objective absent from a step then keeps its share.
        uses_gradients: False if ``weights`` looks at the losses alone. An optimizer then need not measure gradients to
            bring the coefficients up to date.
        uses_signal: True if the method wants both the Gramian of the gradients, noise included, and the ``signal``.
    """

    simplex: bool = False
    uses_gradients: bool = True
    uses_signal: bool = False
    STATE: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Weigh the objectives. ``coefficients`` checks the Gramian first and is the call for direct use.

        Args:
            gramian: ⟨g_k, g_l⟩, shape (K, K), finite.
            losses: the K loss values, NaN where an objective is absent, for the methods that look at them.
            signal: unbiased estimate of the Gramian of the expected gradients, shape (K, K), None where none is
                estimated; methods that need none ignore it.

        Returns:
            The quantity that may be averaged over steps, shape (K,), float64 on the CPU.
        """

    def scale(self, weights: Tensor, gramian: Tensor) -> Tensor:
        """Turn weights into coefficients of the raw gradients.

        Args:
            weights: what ``weights`` returned, or an average of it, shape (K,).
            gramian: ⟨g_k, g_l⟩ of the gradients to be weighted, shape (K, K).

        Returns:
            λ, shape (K,): here the weights themselves.
        """
        return weights

    def coefficients(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Compute the coefficients λ of the update Σ_k λ_k g_k.

        Args:
            gramian: ⟨g_k, g_l⟩, shape (K, K), any floating dtype and device.
            losses: the K loss values, for the methods that look at them.
            signal: unbiased estimate of the Gramian of the expected gradients, shape (K, K), or None.

        Returns:
            λ, shape (K,), float64 on the CPU.

        Raises:
            ValueError: ``gramian`` is not square, symmetric and finite; the message names the row.
        """
        gramian = check_gramian(gramian).detach()
        return self.scale(self.weights(gramian, losses, signal), gramian)

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-equal resume needs, as plain Python values."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned.

        Raises:
            ValueError: the keys are not this balancer's, or a value is not what its key stands for, finite
                numbers or a list of them. Nothing is restored then.
        """
        if state_dict.keys() != set(self.STATE):
            raise ValueError(
                f"state_dict is not one of {type(self).__name__}: expected keys {sorted(self.STATE)}, "
                f"got {sorted(state_dict)}"
            )
        for name in self.STATE:
            value = state_dict[name]
            numbers = value if isinstance(value, list) else [value]
            if type(value) is not type(getattr(self, name)) or not all(map(_finite, numbers)):
                raise ValueError(f"state_dict of {type(self).__name__}: {name} is {value!r}")
        for name in self.STATE:
            setattr(self, name, state_dict[name])

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in inspect.signature(type(self)).parameters)
        return f"{type(self).__name__}({options})"


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
