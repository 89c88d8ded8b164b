"""Train one model on several objectives at once: *losses → gradients → Gramian → coefficients → inner optimizer*."""

from gradbalance.affine import AffineLoss
from gradbalance.diagnostics import applied_update
from gradbalance.marble import MarbleOptimizer
from gradbalance.optimizer import BalancedOptimizer
from gradbalance.report import BalanceReport
from gradbalance.window import NonFiniteError

__all__ = ["AffineLoss", "BalanceReport", "BalancedOptimizer", "MarbleOptimizer", "NonFiniteError", "applied_update"]
__version__ = "0.1.0"
