"""An estimator turns the Gramian of one step's gradients into the Gramians of the noisy and of the expected ones."""

import inspect
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from gradbalance.balancers.checks import Array
from gradbalance.stateful import Stateful


class Estimate(NamedTuple):
    """What an estimator knows after a step.

    Attributes:
        gramian: N, the Gramian of a step's gradients, noise included, shape (K, K). Rows of objectives without gradient
            in this step are 0.
        signal: U, the Gramian of the expected gradients, shape (K, K), rows as in ``gramian``; a valid Gramian. None
            where the estimator estimates none.
        signal_to_noise: √(U_kk / N_kk) before U was made valid, 0 where that was negative, NaN where nothing is known
            of the objective yet; shape (K,). None where ``signal`` is.
        newest: for an estimator with ``uses_history``, the weight that this step's gradient of each objective is to
            have in the average of the past ones, shape (K,).
    """

    gramian: Array
    signal: Array | None = None
    signal_to_noise: Array | None = None
    newest: Array | None = None


class GramianEstimator(Stateful, ABC):
    """Measured Gramian in, an estimate of it and of its noise-free part out.

    Attributes:
        parts: A, into how many parts the micro-batches of a step are put, micro-batch i into part i mod A, so that
            their gradients stay apart: A·K gradients instead of K are held, by no more reverse passes.
        least_micro_batches: how many micro-batches it needs to learn something from a step.
        uses_history: whether it is also given inner products with averages of the past gradients, K buffers; A is 1
            then.
    """

    parts: int = 1
    least_micro_batches: int = 1
    uses_history: bool = False

    def estimate(self, gramian: Array, counts: Array, share: float = 1.0) -> Estimate:
        """Learn from one step.

        Args:
            gramian: inner products of the A·K gradients of the parts, part after part (row a·K + k is objective k in
                part a), shape (A·K, A·K). With ``uses_history`` K more rows follow, the averages of the past gradients,
                zeros where there are none.
            counts: the number of micro-batches of each part in which each objective was present, shape (A, K).
            share: which share of the step's micro-batches was measured, where the estimate is to be that of the whole
                step's gradients. These have 1 / share times the signal, and the same share of the noise's power for
                that signal. Not with ``uses_history``.

        Raises:
            ValueError: the shapes do not fit, or a number is not finite.
            RuntimeError: the step tells nothing that the estimator could use, and neither did one before.
        """
        counts = np.asarray(counts, dtype=np.float64)
        gramian = np.asarray(gramian, dtype=np.float64)
        blocks = self.parts + self.uses_history
        if counts.ndim != 2 or len(counts) != self.parts:
            raise ValueError(f"counts must have shape ({self.parts}, K), got {counts.shape}")
        size = blocks * counts.shape[1]
        if gramian.shape != (size, size):
            raise ValueError(f"gramian must have shape ({size}, {size}) for counts {counts.shape}, got {gramian.shape}")
        if not np.isfinite(gramian).all():
            raise ValueError(f"gramian has non-finite values: {gramian.tolist()}")
        if share <= 0 or (share != 1 and self.uses_history):
            raise ValueError(f"share must be {'1' if self.uses_history else 'positive'}, got {share}")
        return self._estimate(in_blocks(gramian / share**2, counts.shape[1]), counts, share)

    @abstractmethod
    def _estimate(self, products: Array, counts: Array, share: float) -> Estimate:
        """Learn from one step.

        Args:
            products: ``products[a, k, b, l]`` = ⟨g_k of block a, g_l of block b⟩, scaled up to the whole step.
            counts: as in :meth:`estimate`.
            share: as in :meth:`estimate`; noise of the scaled gradients is 1 / share times the whole step's.
        """

    def fresh(self) -> "GramianEstimator":
        """Return one with the same options that has learned nothing."""
        return type(self)(**{name: getattr(self, name) for name in inspect.signature(type(self)).parameters})


def in_blocks(gramian: Array, size: int) -> Array:
    """Return a Gramian of blocks of K rows as ``products[a, k, b, l]``."""
    blocks = len(gramian) // size
    return gramian.reshape(blocks, size, blocks, size)


def total(products: Array, parts: int) -> Array:
    """Return the Gramian of the whole step's gradients, the sums over the parts, shape (K, K)."""
    summed: Array = products[:parts, :, :parts].sum(axis=(0, 2))
    return summed
