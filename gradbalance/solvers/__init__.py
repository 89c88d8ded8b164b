"""Solvers for the K-variable problem at the heart of the balancers: the min-norm point of K gradients."""

from gradbalance.solvers.constraints import LinearConstraint
from gradbalance.solvers.optimality import kkt_residual
from gradbalance.solvers.simplex import SOLVERS, min_norm

__all__ = ["SOLVERS", "LinearConstraint", "kkt_residual", "min_norm"]
