"""What one balanced step did, read lazily: nothing is copied from the device until a field is looked at."""

from __future__ import annotations

from functools import cached_property
from math import isnan

import torch
from torch import Tensor

from gradbalance.state import BalanceState

# A cosine this little below zero is rounding, not a conflict.
_CONFLICT = -1e-6


class BalanceReport:
    """Diagnostics of one ``backward``; on amortised steps everything but the losses is of the last refresh.

    Attributes:
        names: The K objective names.
        refreshed: Whether this step measured the gradients and solved for new coefficients.
        skipped: Names of the objectives whose loss or gradient was not finite (``nonfinite="skip"``); else empty.
    """

    def __init__(
        self, state: BalanceState, values: Tensor, *, presence: Tensor, refreshed: bool, skipped: list[str]
    ) -> None:
        self._state = state
        self._values = values
        self._presence = presence
        self.names = list(state.names)
        self.refreshed = refreshed
        self.skipped = skipped

    @cached_property
    def absent(self) -> list[str]:
        """Names of the objectives that were absent from this step."""
        return [name for name, here in zip(self.names, self._present.tolist(), strict=True) if not here]

    @cached_property
    def losses(self) -> Tensor:
        """The K losses, summed over the micro-batches, shape (K,), float64; NaN where absent. Reading it syncs.

        With several ranks: on a refresh the mean over the ranks, else this rank's.
        """
        return torch.where(self._present, self._values.to("cpu", torch.float64), torch.nan)

    @property
    def gramian(self) -> Tensor:
        """⟨g_k, g_l⟩ over the shared parameters, shape (K, K), float64; rows of objectives absent from it are zero."""
        return torch.tensor(self._state.gramian, dtype=torch.float64)

    @property
    def gradient_norms(self) -> Tensor:
        """‖g_k‖ over the shared parameters, shape (K,); for an absent objective the last one measured."""
        return torch.tensor(self._state.norms, dtype=torch.float64)

    @cached_property
    def signal(self) -> Tensor:
        """⟨s_k, s_l⟩ of the expected gradients as the balancer is told, shape (K, K), float64.

        It is the Gramian estimator's estimate, floored and made valid, for the gradients that the refresh measured;
        with ``refresh_micro_batches="auto"`` for those of the whole step. NaN for objectives without gradient in the
        refresh, and for all where none is estimated.
        """
        if not self._state.signal:
            return torch.full((len(self.names), len(self.names)), torch.nan, dtype=torch.float64)
        signal = torch.tensor(self._state.signal, dtype=torch.float64)
        known = signal.diagonal() > 0
        return torch.where(known.unsqueeze(0) & known.unsqueeze(1), signal, torch.nan)

    @cached_property
    def signal_to_noise(self) -> Tensor:
        """√(U_kk / N_kk), the part of ‖g_k‖ that is signal, shape (K,), before flooring; 0 where U_kk was negative.

        It is about the gradients that ``signal`` is about. NaN where the estimator knows nothing yet, and for all if it
        estimates no signal.
        """
        ratios = torch.tensor(self._state.signal_to_noise or [-1.0] * len(self.names), dtype=torch.float64)
        return torch.where(ratios < 0, torch.nan, ratios)

    @property
    def micro_batches(self) -> float:
        """How many micro-batches the last refresh measured, the mean over the ranks."""
        return self._state.measured

    @cached_property
    def cosines(self) -> Tensor:
        """cos(g_k, g_l), shape (K, K); NaN where a gradient is zero or absent."""
        norms = self._measured_norms
        return self.gramian / (norms.unsqueeze(0) * norms.unsqueeze(1))

    @property
    def coefficients(self) -> Tensor:
        """λ: the update over the shared parameters is Σ_k λ_k g_k. Shape (K,), float64."""
        return torch.tensor(self._state.coefficients, dtype=torch.float64)

    @property
    def weights(self) -> Tensor:
        """α_k = λ_k‖g_k‖ / Σ_j λ_j‖g_j‖, each objective's part of the update's length; sums to 1 (zeros if all are)."""
        parts = self.coefficients * self.gradient_norms
        total = parts.sum()
        return parts / total if total != 0 else parts

    @cached_property
    def update_cosines(self) -> Tensor:
        """cos(d, g_k) with d = Σ_k λ_k g_k over the present objectives, shape (K,); NaN where g_k is zero or absent.

        Zero for all where d = 0.
        """
        measured = ~self._measured_norms.isnan()
        # In unit gradients, so that no product of norms under- or overflows.
        parts = (self.coefficients * self._measured_norms).nan_to_num(0.0)
        along = self.cosines.nan_to_num(0.0) @ parts
        length = (parts @ along).clamp(min=0).sqrt()
        cosines = along / length if length > 1e-12 * parts.abs().sum() else torch.zeros_like(along)
        return torch.where(measured, cosines.clamp(-1.0, 1.0), torch.nan)

    @property
    def min_cosine(self) -> float:
        """The smallest update cosine: negative if the step goes against an objective; 0 where d = 0."""
        measured = self.update_cosines[~self.update_cosines.isnan()]
        return float(measured.min()) if len(measured) else 0.0

    @property
    def conflicts(self) -> int:
        """How many objectives the update goes against (update cosine < −1e-6)."""
        return int((self.update_cosines < _CONFLICT).sum())

    @property
    def inactive(self) -> list[str]:
        """Names of the present objectives whose gradient over the shared parameters is zero."""
        norms = self._measured_norms
        present = self._present.tolist()
        return [name for name, here, n in zip(self.names, present, norms.tolist(), strict=True) if here and isnan(n)]

    def as_dict(self, prefix: str = "balance/") -> dict[str, float]:
        """Flat floats for any logger; NaN where an objective is absent or without gradient.

        With a Gramian estimator that estimates it, also ``signal_norm``, √U_kk, and ``signal_to_noise``.

        Args:
            prefix: Put before every key.
        """
        values = {"min_cosine": self.min_cosine, "conflicts": float(self.conflicts), "refreshed": float(self.refreshed)}
        values["micro_batches"] = self.micro_batches
        for label, vector in (
            ("loss", self.losses),
            ("gradient_norm", self.gradient_norms),
            ("weight", self.weights),
            ("coefficient", self.coefficients),
            ("update_cosine", self.update_cosines),
        ):
            values |= {f"{label}/{name}": value for name, value in zip(self.names, vector.tolist(), strict=True)}
        if self._state.signal:
            signal, ratios = self.signal.diagonal().sqrt().tolist(), self.signal_to_noise.tolist()
            values |= {f"signal_norm/{name}": value for name, value in zip(self.names, signal, strict=True)}
            values |= {f"signal_to_noise/{name}": value for name, value in zip(self.names, ratios, strict=True)}
        cosines = self.cosines.tolist()
        for k, name in enumerate(self.names):
            values |= {f"cosine/{name}|{other}": cosines[k][k + 1 + i] for i, other in enumerate(self.names[k + 1 :])}
        return {prefix + key: value for key, value in values.items()}

    def __repr__(self) -> str:
        kind = "refreshed" if self.refreshed else "amortised"
        coefficients = ", ".join(f"{n}={c:.4g}" for n, c in zip(self.names, self._state.coefficients, strict=True))
        return f"BalanceReport({kind}, {coefficients}, min_cosine={self.min_cosine:.3f}, conflicts={self.conflicts})"

    @cached_property
    def _measured_norms(self) -> Tensor:
        """Norms from the Gramian of the last refresh, NaN where it measured none or the objective is absent now."""
        norms = self.gramian.diagonal().clamp(min=0).sqrt()
        return torch.where((norms > 0) & self._present, norms, torch.nan)

    @cached_property
    def _present(self) -> Tensor:
        """Which objectives are in this step, shape (K,), bool, on the CPU."""
        return self._presence.to("cpu")
