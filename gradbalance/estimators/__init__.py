"""Estimators: from the Gramian that one step measures to what a balancer should know about the expected gradients.

A step's gradients are signal and noise, g_k = s_k + ε_k. The Gramian that is measured, N_kl = ⟨g_k, g_l⟩, is U_kl =
⟨s_k, s_l⟩ plus the noise's own inner products: with small batches most of its diagonal is noise, and a balancer that
divides by ‖g_k‖ divides a weak objective by its noise. Inner products of gradients of *independent* samples have the
expectation U, so an estimator takes them from different micro-batches of the step (:class:`SplitGramian`) or from
different steps (:class:`HistoryGramian`), averages them over the steps, and makes a valid Gramian of the average.

``BalancedOptimizer(..., gramian_estimator="split")`` uses one; like balancers they also work with no optimizer.
"""

from typing import Any

from gradbalance.estimators.averages import Averaged
from gradbalance.estimators.base import Estimate, GramianEstimator
from gradbalance.estimators.history import HistoryGramian
from gradbalance.estimators.plain import Plain
from gradbalance.estimators.split import SplitGramian
from gradbalance.naming import make

__all__ = [
    "Averaged",
    "Estimate",
    "GramianEstimator",
    "HistoryGramian",
    "Plain",
    "SplitGramian",
    "available",
    "get",
]

_ESTIMATORS: dict[str, type[GramianEstimator]] = {"history": HistoryGramian, "plain": Plain, "split": SplitGramian}


def available() -> list[str]:
    """Return the names that ``get`` knows, sorted."""
    return sorted(_ESTIMATORS)


def get(name: str, **options: Any) -> GramianEstimator:
    """Make an estimator by name.

    Args:
        name: one of ``available()``.
        **options: the arguments of its class.

    Raises:
        ValueError: no estimator has this name.
        TypeError: the estimator has no such option.
    """
    return make("Gramian estimator", _ESTIMATORS, name, options)
