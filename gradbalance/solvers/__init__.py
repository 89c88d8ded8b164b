"""Solvers for the K-variable problem at the heart of the balancers: the min-norm point of K gradients."""

from gradbalance.solvers.simplex import SOLVERS, kkt_residual, min_norm

__all__ = ["SOLVERS", "kkt_residual", "min_norm"]
