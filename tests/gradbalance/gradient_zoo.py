"""Families of K gradients, well-behaved and not, shared by the tests of solvers and balancers."""

import numpy as np
import torch
from hypothesis import strategies as st


def _random(rng, k):
    return rng.standard_normal((k, rng.integers(1, 3 * k + 2)))


def _many_parameters(rng, k):
    return rng.standard_normal((k, 500))


def _shared_direction(rng, k):
    return rng.standard_normal((k, 60)) + 3 * rng.standard_normal(60)


def _duplicated(rng, k):
    return _random(rng, k)[rng.integers(0, max(1, k // 2), k)]


def _duplicated_shared_direction(rng, k):
    return _shared_direction(rng, k)[rng.integers(0, max(1, k // 2), k)]


def _nearly_duplicated(rng, k):
    gradients = _duplicated(rng, k)
    return gradients + 10.0 ** rng.uniform(-12, -1) * rng.standard_normal(gradients.shape)


def _opposite(rng, k):
    gradients = _random(rng, k)
    gradients[k // 2 : 2 * (k // 2)] = -gradients[: k // 2]
    return gradients


def _one_opposite_pair(rng, k):
    gradients = rng.standard_normal((k, 4 * k))
    gradients[-1] = -gradients[0]
    return gradients


def _low_rank(rng, k):
    rank = rng.integers(1, k + 1)
    return rng.standard_normal((k, rank)) @ rng.standard_normal((rank, 40))


def _integers(rng, k):
    return rng.integers(-1, 2, (k, rng.integers(1, 2 * k + 1))).astype(float)  # ties, zero rows, exact opposites


def _clusters(rng, k):
    return rng.standard_normal((3, 60))[rng.integers(0, 3, k)] + 1e-3 * rng.standard_normal((k, 60))


FAMILIES = {
    "random": _random,
    "many parameters": _many_parameters,
    "shared direction": _shared_direction,
    "duplicated": _duplicated,
    "duplicated, shared direction": _duplicated_shared_direction,
    "nearly duplicated": _nearly_duplicated,
    "opposite": _opposite,
    "one opposite pair": _one_opposite_pair,
    "low rank": _low_rank,
    "integers": _integers,
    "clusters": _clusters,
}

WELL_POSED = ("many parameters", "shared direction", "clusters")
"""Families with linearly independent gradients: the min-norm α is unique and not sensitive to rounding."""


@st.composite
def zoo(draw, families=tuple(FAMILIES), min_k=1, max_k=32, spread=0):
    """A (K, P) array of gradients, no two seeds alike; norms are spread over 10^±spread."""
    k = draw(st.integers(min_k, max_k))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    gradients = FAMILIES[draw(st.sampled_from(families))](rng, k)
    return gradients * 10.0 ** rng.uniform(-spread, spread, (k, 1))


def gramian(gradients):
    return torch.from_numpy(np.asarray(gradients) @ np.asarray(gradients).T)


def unit(gradients):
    """Scale to norm 1; zero rows stay zero."""
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return gradients / np.where(norms > 0, norms, 1.0)


def cosines(coefficients, gradients):
    """Cosine of Σ_k λ_k g_k with every gradient."""
    update = np.asarray(coefficients) @ gradients
    return gradients @ update / (np.linalg.norm(gradients, axis=1) * np.linalg.norm(update))
