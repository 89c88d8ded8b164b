"""Quadratics whose gradients are known, and noise of known size: what an estimator should find and what it gets."""

import numpy as np


class Quadratics:
    """L_k(x) = c_k ‖x − a_k‖² / 2 at one x, seen through noise: g_k = c_k (x − a_k) + σ_k ε, ε standard normal.

    Objectives share half of each sample's noise, as rewards of the same pictures do.
    """

    def __init__(self, count=3, size=12, noise=2.0, scales=None, seed=0):
        self.rng = np.random.default_rng(seed)
        curvatures = np.ones(count) if scales is None else np.asarray(scales, dtype=float)
        self.signals = curvatures[:, None] * self.rng.standard_normal((count, size))
        self.sigmas = noise * curvatures
        self.signal = self.signals @ self.signals.T
        common = np.full((count, count), 0.5) + 0.5 * np.eye(count)
        # The expectation of the noise's own inner products, of one micro-batch.
        self.noise = size * np.outer(self.sigmas, self.sigmas) * common

    def gradients(self):
        """One micro-batch's gradients, shape (K, P)."""
        count, size = self.signals.shape
        shared, own = self.rng.standard_normal(size), self.rng.standard_normal((count, size))
        return self.signals + self.sigmas[:, None] * (shared + own) * 0.5**0.5

    def step(self, micro_batches, parts, absent=()):
        """A step's gradients, part by part, and the counts: what an engine measures.

        ``absent`` holds pairs (micro-batch, objective). The losses are divided by the number of micro-batches.
        """
        count, size = self.signals.shape
        rows, counts = np.zeros((parts, count, size)), np.zeros((parts, count))
        for i in range(micro_batches):
            here = np.array([(i, k) not in absent for k in range(count)])
            rows[i % parts] += here[:, None] * self.gradients() / micro_batches
            counts[i % parts] += here
        return rows.reshape(parts * count, size), counts


def gramian(rows):
    return rows @ rows.T


def mean_and_error(samples):
    """The mean over the first axis, and its standard error."""
    samples = np.asarray(samples)
    return samples.mean(axis=0), samples.std(axis=0, ddof=1) / len(samples) ** 0.5
