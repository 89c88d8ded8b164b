"""K losses that are linear in shared terms, so that any weighted sum costs one contraction and one backward pass.

Many multi-reward objectives differ only in constants: L_k = Σ_j C_kj ℓ_j, where the terms ℓ_j carry the graph and the
coefficients C are known numbers (advantages, masks, 1/n_k). Then Σ_k w_k L_k = Σ_j (Σ_k w_k C_kj) ℓ_j for *any* real
weights w: no simplex and no sign condition. A mask is a zero in C.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real

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
        cls,
        log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        names: Sequence[str] | None = None,
        *,
        reduction: str = "mean",
    ) -> AffineLoss:
        """REINFORCE with K advantages: L_k = −Σ_i c_ki A_ki log π_i, where c_ki = m_ki/n_k is the mean.

        Args:
            log_probs: log π of the samples or tokens, with graph, any shape S.
            advantages: As in :meth:`clipped_surrogate`.
            mask: As in :meth:`clipped_surrogate`.
            names: K objective names.
            reduction: As in :meth:`clipped_surrogate`.
        """
        _check_tensors("policy_gradient", log_probs=log_probs, advantages=advantages, mask=mask)
        log_probs = _at_least_float32(log_probs)
        return cls(log_probs, -_weighted(log_probs, advantages, mask, reduction, "policy_gradient"), names)

    @classmethod
    def clipped_surrogate(
        cls,
        ratio: Tensor,
        advantages: Tensor,
        clip: float | tuple[float, float] = 0.2,
        mask: Tensor | None = None,
        names: Sequence[str] | None = None,
        *,
        reduction: str = "mean",
    ) -> AffineLoss:
        """The clipped objective of PPO and GRPO with K advantages, affine in their positive and negative parts.

        −min(ρA, clip(ρ)A) = −A⁺ min(ρ, clip ρ) + A⁻ max(ρ, clip ρ) with A = A⁺ − A⁻ and clip ρ = clamp(ρ, 1−ε, 1+ε′):
        two terms for each sample, whatever K is. Values and gradients are those of the K losses written one by one,
        also inside the range and on its bounds, where both sides of the min are equal.

        The variants that change ρ or A alone need no option: a ratio per sequence (GSPO) is a ratio of shape (N,); an
        upper bound δ for negative advantages is ``ratio.clamp(max=delta)``; an importance weight w ≥ 0 multiplies the
        advantages.

        Args:
            ratio: ρ = π/π_old of the samples or tokens, with graph, any shape S such as (N, T). A padded token needs a
                finite ratio too: mask log π − log π_old before ``exp``.
            advantages: Shape (K, *S) or broadcastable to it; (K, N) is one advantage for each sequence of S = (N, T).
                Anything may stand where the mask is 0, NaN as well.
            clip: ε, or (ε, ε′) for a range of [1−ε, 1+ε′] (DAPO's "clip-higher").
            mask: Which samples or tokens count: broadcastable to (K, *S), so the completion mask of shape (N, T), the
                rewards that apply, of shape (K, N, 1), or both: ``completion_mask.bool() & applies``. Default: all.
            names: K objective names.
            reduction: What becomes of the tokens that count for objective k. ``"mean"``: their mean (DAPO; TRL's
                ``loss_type="bnpo"``, and ``"dapo"`` within one batch). ``"sequence_mean"``: the mean over each
                sequence, the last dimension of S, and then over the sequences of which something counts (GRPO's own).
                ``"sum"``: their sum; divide the advantages by what you like, such as N·T_max (Dr. GRPO) or the n_k
                of all micro-batches of the step.

        Raises:
            TypeError: If ``ratio``, ``advantages`` or ``mask`` is not a tensor.
            ValueError: If a shape does not fit, ``clip`` is not positive or ``reduction`` is unknown.
        """
        low, high = clip if isinstance(clip, tuple | list) and len(clip) == 2 else (clip, clip)
        if not all(isinstance(end, Real) and not isinstance(end, bool) and end > 0 for end in (low, high)):
            raise ValueError(f"AffineLoss.clipped_surrogate: clip must be positive, one number or two, got {clip!r}")
        _check_tensors("clipped_surrogate", ratio=ratio, advantages=advantages, mask=mask)
        ratio = _at_least_float32(ratio)
        weighted = _weighted(ratio, advantages, mask, reduction, "clipped_surrogate")
        clipped = ratio.clamp(1 - low, 1 + high)
        terms = torch.stack([torch.minimum(ratio, clipped), torch.maximum(ratio, clipped)])
        return cls(terms, torch.stack([-weighted.clamp(min=0), -weighted.clamp(max=0)], dim=1), names)


def _check_tensors(source: str, **values: Tensor | None) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor) and not (name == "mask" and value is None):
            raise TypeError(f"AffineLoss.{source}: {name} must be a tensor, got {type(value).__name__}")


def _at_least_float32(terms: Tensor) -> Tensor:
    """Terms that hold a clip bound and 1/n_k; low precision comes back where the graph leaves for the model."""
    return terms.to(torch.promote_types(terms.dtype, torch.float32))


def _weighted(terms: Tensor, advantages: Tensor, mask: Tensor | None, reduction: str, source: str) -> Tensor:
    """The advantages, each times its share of the reduction and 0 where masked: shape (K, *S), the terms' dtype."""
    where = f"AffineLoss.{source}:"
    if reduction not in ("mean", "sequence_mean", "sum"):
        raise ValueError(f'{where} reduction must be "mean", "sequence_mean" or "sum", got {reduction!r}')
    if reduction == "sequence_mean" and terms.dim() < 2:
        raise ValueError(f'{where} "sequence_mean" needs sequences along a last dimension, got {tuple(terms.shape)}')
    full = (*advantages.shape[:1], *terms.shape)
    missing = len(full) - advantages.dim()
    if missing < 0 or advantages.dim() < min(2, len(full)):
        shape, got = tuple(terms.shape), tuple(advantages.shape)
        raise ValueError(f"{where} advantages must have shape (K, *S) with S = {shape}, got {got}")
    advantages = _broadcast(advantages.detach().reshape(*advantages.shape, *[1] * missing), full, f"{where} advantages")
    kept = torch.ones((), device=advantages.device) if mask is None else mask.detach().to(advantages.device)
    if kept.device.type == "cpu" and not bool(((kept == 0) | (kept == 1)).all()):
        raise ValueError(f"{where} mask must hold 0 and 1 only; weights belong into the advantages")
    kept = _broadcast(kept.bool(), full, f"{where} mask")
    weighted = torch.where(kept, advantages.to(terms.dtype), 0.0)
    units = kept  # what the mean is over
    if reduction == "sequence_mean":
        weighted = weighted / kept.sum(-1, keepdim=True).clamp(min=1)
        units = kept.any(-1)
    if reduction == "sum":
        return weighted
    return weighted / units.reshape(len(units), -1).sum(1).clamp(min=1).view(-1, *[1] * terms.dim())


def _broadcast(values: Tensor, shape: tuple[int, ...], what: str) -> Tensor:
    try:
        return values.broadcast_to(shape)
    except RuntimeError:
        raise ValueError(f"{what} of shape {tuple(values.shape)} does not fit (K, *S) = {shape}") from None
