"""MoDo: one projected gradient step on the coefficients at each call, on inner products of independent samples."""

from gradbalance.balancers.active import Rows
from gradbalance.balancers.checks import Array, number
from gradbalance.balancers.simplex_descent import SimplexDescent
from gradbalance.solvers.projection import onto_simplex


class MoDo(SimplexDescent):
    """Follow the min-norm point slowly, so that noise averages out over the steps.

    λ ← Π(λ − γ (S + ρ I) λ), Π the projection onto the simplex, once per call, starting from 1/K. In the paper
    S_kl = ⟨g_k, g_l'⟩ with g and g' from two independent samples, so that E[Sλ] is the gradient of
    ½‖Σ_k λ_k E g_k‖²; the Gramian of one sample adds the variance of the gradients to the diagonal. S is ``signal`` (an
    unbiased Gramian) where it is given; without one it is the plain Gramian, and the shares of noisy objectives come
    out too small. The update is Σ_k λ_k g_k on the whole step's gradients (the paper's: on the mean of both samples).

    For a fixed S and ρ = 0, λ goes to MGDA's min-norm weights, with all their properties; before that no promise
    about conflicts holds. A small γ averages over more steps and follows changes more slowly.

    The paper's step is absolute: for losses c times as large it is c² times as long. With ``normalize`` S is divided
    by tr M = Σ_k ‖g_k‖² first, so that multiplying all losses by one number changes nothing and, as no eigenvalue of M
    exceeds tr M, every γ < 2 / (1 + ρ) descends; with ``normalize=False`` that takes γ < 2 / (largest eigenvalue + ρ).

    Args:
        gamma: γ > 0, the step size.
        rho: ρ ≥ 0, pulls towards equal coefficients.
        normalize: whether to make the step free of the losses' scale, which the paper does not.

    References:
        L. Chen, H. Fernando, Y. Ying, T. Chen. Three-way trade-off in multi-objective learning: optimization,
        generalization and conflict-avoidance. NeurIPS 2023, arXiv 2305.20057.
    """

    def __init__(self, gamma: float = 0.1, rho: float = 0.0, normalize: bool = True) -> None:
        super().__init__(gamma, normalize)
        self.rho = number("rho", rho, "[0, ∞)")

    def _descend(self, start: Array, gramian: Array, rows: Rows, size: int) -> tuple[Array, Array]:
        moved = onto_simplex(start - self.gamma * (gramian @ start + self.rho * start))
        return moved, moved
