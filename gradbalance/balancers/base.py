"""A balancer turns the Gramian of K gradients into K coefficients: the update is d = Σ_k λ_k g_k.

The Gramian M_kl = ⟨g_k, g_l⟩ holds all that the methods here need to know about the gradients, so a balancer never
sees the P parameters and can be used, and tested, with no optimizer.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from gradbalance.balancers.checks import signal_values
from gradbalance.solvers.checks import check_gramian
from gradbalance.stateful import Stateful


class Balancer(Stateful, ABC):
    """Gramian in, coefficients out.

    The work is in two steps because optimizers that smooth over time smooth the first one's result:
    ``weights`` judges the gradients, ``scale`` turns the (smoothed) weights into coefficients of the raw gradients.

    A row of the Gramian that is zero, relative to the largest, is an objective that is absent or has no gradient: it
    must not change the coefficients of the others.

    What a method remembers from call to call is described at :class:`~gradbalance.stateful.Stateful`.

    Attributes:
        simplex: True if ``weights`` are non-negative with sum 1. An objective absent from a step then keeps its share.
        uses_gradients: False if ``weights`` looks at the losses alone. An optimizer then need not measure gradients to
            bring the coefficients up to date.
        uses_signal: True if the method tells the noisy Gramian and ``signal`` apart. An optimizer that estimates a
            signal gives it both; any other method it gives the signal as its Gramian.
    """

    simplex: bool = False
    uses_gradients: bool = True
    uses_signal: bool = False

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
            ValueError: ``gramian`` is not square, symmetric and finite (the message names the row), or ``signal`` is of
                another shape or not finite.
        """
        gramian = check_gramian(gramian).detach()
        if signal is not None and not self.uses_signal:  # else it checks what it uses
            signal_values(signal, len(gramian))
        return self.scale(self.weights(gramian, losses, signal), gramian)
