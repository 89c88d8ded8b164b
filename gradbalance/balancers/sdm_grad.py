"""SDMGrad: the min-norm point, drawn towards a preferred direction, by a few projected gradient steps at each call."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradbalance.balancers.active import Rows
from gradbalance.balancers.checks import Array, integer, number, parts, vector
from gradbalance.balancers.simplex_descent import SimplexDescent
from gradbalance.solvers.projection import onto_simplex


class SDMGrad(SimplexDescent):
    """Follow the point of least norm among those that keep a share of a preferred direction.

    With a preference p on the simplex and the regularization r, w is moved downhill on ½‖Σ_k (w_k + r p_k) g_k‖²:
    w ← Π(w − γ v) with v ← μ v + S(w + r p), a number of steps per call, from where the last call ended (1/K at first).
    The coefficients are λ = (w + r p) / (1 + r). So the goal is the min-norm point under λ_k ≥ r p_k / (1 + r): with
    equal p, :class:`~gradbalance.balancers.MGDA` with a floor. r → ∞ gives the weighted sum p, r = 0 MGDA.

    In the paper S_kl = ⟨g_k, g_l'⟩ with g and g' from two independent samples, and the update uses a third; S is
    ``signal`` (an unbiased Gramian) where it is given. Without one it is the plain Gramian, whose diagonal holds the
    variance of the gradients too, so noisy objectives get too little. λ is divided by 1 + r as in the published code;
    the paper does not divide.

    Once converged, ⟨g_k, d⟩ ≥ 0 holds for r = 0 only.

    The paper's step is absolute, the published code divides S by the squared mean norm. With ``normalize`` it is
    tr M = Σ_k ‖g_k‖² that divides: multiplying all losses by one number changes nothing, and for a fixed S = M and
    μ = 0 every γ < 2 converges, as no eigenvalue of M exceeds tr M. The published γ = 10 belongs to the squared mean
    norm and is at least 10 K here: w then jumps from corner to corner and does not settle.

    Args:
        regularization: r ≥ 0 (λ in the paper).
        preference: p_k > 0, shape (K,); only ratios matter (they are normalised to sum 1). None: all equal.
        gamma: γ > 0, the step size.
        momentum: μ in [0, 1), of the steps of one call.
        steps: their number.
        normalize: whether to make the step free of the losses' scale.

    References:
        P. Xiao, H. Ban, K. Ji. Direction-oriented multi-objective learning: simple and provable stochastic algorithms.
        NeurIPS 2023, arXiv 2305.18409.
    """

    def __init__(
        self,
        regularization: float = 0.3,
        preference: Sequence[float] | Tensor | None = None,
        gamma: float = 1.0,
        momentum: float = 0.5,
        steps: int = 20,
        normalize: bool = True,
    ) -> None:
        super().__init__(gamma, normalize)
        self.regularization = number("regularization", regularization, "[0, ∞)")
        self.preference = None if preference is None else vector("preference", preference, positive=True)
        self.momentum = number("momentum", momentum, "[0, 1)")
        self.steps = integer("steps", steps, least=1)

    def _descend(self, start: Array, gramian: Array, rows: Rows, size: int) -> tuple[Array, Array]:
        shares = parts("preference", self.preference, rows, size)
        drawn = self.regularization * shares / shares.sum()
        w, velocity = start, np.zeros(len(start))
        for _ in range(self.steps):
            velocity = self.momentum * velocity + gramian @ (w + drawn)
            w = onto_simplex(w - self.gamma * velocity)
        return w, (w + drawn) / (1.0 + self.regularization)
