"""K losses that are linear in shared terms, so that any weighted sum costs one contraction and one backward pass.

Many multi-reward objectives differ only in constants: L_k = Σ_j C_kj ℓ_j, where the terms ℓ_j carry the graph and the
coefficients C are known numbers (advantages, masks, 1/n_k). Then Σ_k w_k L_k = Σ_j (Σ_k w_k C_kj) ℓ_j for *any* real
weights w: no simplex and no sign condition. A mask is a zero in C.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from gradbalance.devices import sent


class AffineLoss:
    """K losses L_k = Σ_s coefficients[k, s] · terms[s].

    Args:
        terms: The terms ℓ with their graph, any shape S.
        coefficients: The constants C, shape (K, *S); an objective that does not see a term has a zero there.
        names: K distinct objective names.

    Attributes:
        present: For each objective, whether it sees any term; one that sees none is absent. Shape (K,), bool.

    Raises:
        TypeError: If ``terms`` or ``coefficients`` is not a floating-point tensor.
        ValueError: If the shapes disagree, ``coefficients`` holds NaN or infinity or carries a graph, or ``names``
            does not hold K distinct names.
    """

    def __init__(self, terms: Tensor, coefficients: Tensor, names: Sequence[str] | None = None) -> None:
        for label, value in (("terms", terms), ("coefficients", coefficients)):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"AffineLoss: {label} must be a floating-point tensor, got {kind}")
        if coefficients.dim() == 0 or coefficients.shape[0] == 0 or coefficients.shape[1:] != terms.shape:
            raise ValueError(
                f"AffineLoss: coefficients must have shape (K, *terms.shape) = (K, {', '.join(map(str, terms.shape))}) "
                f"with K >= 1, got {tuple(coefficients.shape)}"
            )
        if coefficients.requires_grad:
            raise ValueError("AffineLoss: coefficients are constants; pass coefficients.detach()")
        flat = coefficients.reshape(coefficients.shape[0], -1)
        # On an accelerator the step's own check finds a NaN: looking for it here would wait for the device.
        finite = torch.isfinite(flat).all(1).tolist() if flat.device.type == "cpu" else [True]
        if not all(finite):
            raise ValueError(
                f"AffineLoss: coefficients of objective(s) {[k for k, ok in enumerate(finite) if not ok]} hold NaN or "
                "infinity; where an objective does not apply its coefficient is 0"
            )
        if names is not None and (len(names) != coefficients.shape[0] or len(set(names)) != len(names)):
            raise ValueError(f"AffineLoss: names must be {coefficients.shape[0]} distinct names, got {list(names)}")
        self.terms = terms
        self.coefficients = coefficients.to(terms.device)
        self.present = (flat != 0).any(1)
        self.names = None if names is None else [str(name) for name in names]

    def __len__(self) -> int:
        """The number of objectives K."""
        return int(self.coefficients.shape[0])

    def losses(self) -> Tensor:
        """The K losses, shape (K,), with their graph."""
        dtype = torch.promote_types(self.terms.dtype, self.coefficients.dtype)
        with self._full_precision():
            return torch.mv(self.coefficients.to(dtype).reshape(len(self), -1), self.terms.to(dtype).flatten())

    def combine(self, weights: Tensor | Sequence[float]) -> Tensor:
        """Σ_k weights_k · L_k as one contraction: a scalar with its graph.

        Args:
            weights: K numbers of any sign.
        """
        blended = self.blend(weights)
        return torch.sum(blended * self.terms.to(blended.dtype))

    def blend(self, weights: Tensor | Sequence[float]) -> Tensor:
        """Σ_k weights_k · coefficients[k]: the one coefficient of each term, shape S, no graph."""
        dtype = torch.promote_types(self.terms.dtype, self.coefficients.dtype)
        weights = sent(torch.as_tensor(weights, dtype=dtype), self.coefficients.device)
        if weights.shape != (len(self),):
            raise ValueError(f"AffineLoss: expected {len(self)} weights, got shape {tuple(weights.shape)}")
        with self._full_precision():
            blended: Tensor = torch.tensordot(weights.detach(), self.coefficients.to(dtype), dims=1)
        return blended

    def _full_precision(self) -> AbstractContextManager[None]:
        """Autocast would round coefficients to bf16 or fp16."""
        kind = self.coefficients.device.type
        return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()

    @classmethod
    def policy_gradient(
        cls, log_probs: Tensor, advantages: Tensor, mask: Tensor | None = None, names: Sequence[str] | None = None
    ) -> AffineLoss:
        """REINFORCE with K advantages: L_k = −(1/n_k) Σ_i m_ki A_ki log π_i.

        Args:
            log_probs: log π of the samples or tokens, with graph, any shape S.
            advantages: Shape (K, *S) or anything that broadcasts to it, such as (K, N, 1) for S = (N, T).
            mask: Which samples or tokens count, broadcastable to (K, *S); n_k is their number. Default: all.
            names: K objective names.
        """
        advantages, mask, count = _masked(advantages, mask, log_probs.shape)
        return cls(log_probs, (-advantages * mask / count).to(log_probs.dtype), names)

    @classmethod
    def clipped_surrogate(
        cls,
        ratio: Tensor,
        advantages: Tensor,
        clip: float = 0.2,
        mask: Tensor | None = None,
        names: Sequence[str] | None = None,
    ) -> AffineLoss:
        """The clipped objective of PPO and GRPO with K advantages, affine in their positive and negative parts.

        −min(ρA, clip(ρ)A) = −A⁺ min(ρ, clip ρ) + A⁻ max(ρ, clip ρ) with A = A⁺ − A⁻ and clip ρ = clamp(ρ, 1−ε, 1+ε):
        two terms for each sample, whatever K is.

        Args:
            ratio: ρ = π/π_old of the samples or tokens, with graph, any shape S.
            advantages: Shape (K, *S) or anything that broadcasts to it.
            clip: ε > 0.
            mask: Which samples or tokens count, broadcastable to (K, *S); n_k is their number. Default: all.
            names: K objective names.
        """
        if not clip > 0:
            raise ValueError(f"AffineLoss.clipped_surrogate: clip must be positive, got {clip}")
        advantages, mask, count = _masked(advantages, mask, ratio.shape)
        clipped = ratio.clamp(1 - clip, 1 + clip)
        terms = torch.stack([torch.minimum(ratio, clipped), torch.maximum(ratio, clipped)])
        signed = torch.stack([-advantages.clamp(min=0), (-advantages).clamp(min=0)], dim=1)
        return cls(terms, (signed * (mask / count).unsqueeze(1)).to(ratio.dtype), names)


def _masked(advantages: Tensor, mask: Tensor | None, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages (zero where masked) and mask at the full shape (K, *S), and n_k shaped to divide them."""
    full = (advantages.shape[0], *shape)
    advantages = advantages.detach().broadcast_to(full)
    kept = torch.ones(full, dtype=torch.bool, device=advantages.device)
    if mask is not None:
        kept = mask.detach().to(advantages.device).bool().broadcast_to(full)
    count = kept.flatten(1).sum(1).clamp(min=1).view(-1, *[1] * len(shape))
    return torch.where(kept, advantages, torch.zeros_like(advantages)), kept.to(advantages.dtype), count
