"""What the user hands to ``backward``, in one form: outputs that carry the graph, and a cotangent for any weights.

A list, a dict, a 1-D tensor and an :class:`AffineLoss` all say the same thing: the gradient of Σ_k w_k L_k is the
vector-Jacobian product of some ``outputs`` with a cotangent that is linear in w. So one reverse pass serves any
weighting, and objective k alone is the weighting e_k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, reduce
from typing import TypeAlias, cast

import torch
from torch import Tensor

from gradbalance.affine import AffineLoss
from gradbalance.devices import sent
from gradbalance.passes import stacked

Losses: TypeAlias = "Sequence[Tensor | None] | Mapping[str, Tensor | None] | Tensor | AffineLoss"


class Objectives:
    """The K objectives of one ``backward`` call.

    Attributes:
        names: The K objective names.
        connected: For each objective, whether there is a loss with a graph; a constant loss has none.
        presence: For each objective, whether it is present: a loss was given, or an ``AffineLoss`` has a coefficient
            that is not 0. Shape (K,), bool, on the losses' device.
        values: The K loss values, detached, on the losses' device; 0 where absent.
    """

    def __init__(
        self, names: list[str], losses: Sequence[Tensor | None] | AffineLoss, *, whole: Tensor | None = None
    ) -> None:
        self.names = names
        self._whole = whole
        self._losses = losses
        if isinstance(losses, AffineLoss):
            self.connected = [losses.terms.requires_grad] * len(losses)
            self.presence = losses.present
            with torch.no_grad():
                values = losses.losses()
                self.values = torch.where(sent(losses.present, values.device), values, 0.0)
        else:
            self.connected = [loss is not None and loss.requires_grad for loss in losses]
            self.presence = torch.tensor([loss is not None for loss in losses])
            given = [loss.detach() for loss in losses if loss is not None] or [torch.zeros(())]
            dtype = reduce(torch.promote_types, (loss.dtype for loss in given), torch.float32)
            like = torch.zeros((), dtype=dtype, device=given[0].device)
            self.values = torch.stack([like if loss is None else loss.detach().reshape(()).to(like) for loss in losses])

    @cached_property
    def present(self) -> list[bool]:
        """``presence`` as Python values: with an ``AffineLoss`` on an accelerator, reading it waits for the device."""
        return cast("list[bool]", self.presence.tolist())

    def leaves(self) -> list[set[int]] | None:
        """For each objective the ``id`` of the leaves it reaches, if the losses are one tensor, stacked from scalars.

        Autograd cannot tell then; where it can, and where nobody can, the result is None.
        """
        return None if self._whole is None else stacked(self._whole)

    @property
    def mask(self) -> int:
        """``connected`` as a bit mask."""
        return sum(1 << k for k, here in enumerate(self.connected) if here)

    @property
    def outputs(self) -> list[Tensor]:
        """Where the graph of the objectives starts."""
        losses = [self._losses.terms] if isinstance(self._losses, AffineLoss) else self._losses
        return [loss for loss in losses if loss is not None and loss.requires_grad]

    def products(self, weights: Sequence[float]) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and cotangents whose vector-Jacobian product is the gradient of Σ_k weights_k L_k."""
        if isinstance(self._losses, AffineLoss):
            terms = self._losses.terms
            return ([terms], [self._losses.blend(weights).to(terms.dtype)]) if terms.requires_grad else ([], [])
        outputs, cotangents = [], []
        for loss, weight, name in zip(self._losses, weights, self.names, strict=True):
            if loss is not None and loss.requires_grad:
                if loss.dtype == torch.float16 and not _fits(weight, loss.dtype):
                    raise ValueError(
                        f"backward: the coefficient {weight:.3g} of {name!r} cannot be held by its loss, which is "
                        "float16; return losses in float32, such as loss.float()"
                    )
                outputs.append(loss)
                cotangents.append(torch.full_like(loss, weight))
        return outputs, cotangents

    def single(self, k: int) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and cotangents of objective k alone."""
        if isinstance(self._losses, AffineLoss):
            return self.products([float(j == k) for j in range(len(self.names))])
        loss = self._losses[k]
        assert loss is not None
        return [loss], [torch.ones_like(loss)]


def _fits(weight: float, dtype: torch.dtype) -> bool:
    return weight == 0 or torch.finfo(dtype).tiny <= abs(weight) <= torch.finfo(dtype).max


def read(losses: Losses, names: Sequence[str] | None, *, source: str = "backward") -> Objectives:
    """Check what the user passed and bring it into one form.

    Args:
        losses: A sequence, a mapping, a 1-D tensor or an :class:`AffineLoss`.
        names: The optimizer's objective names, or None if this call is to set them.
        source: The method named in errors.

    Raises:
        TypeError: If ``losses`` or one of its items is of another kind.
        ValueError: If their number, names or shapes are wrong.
    """
    if isinstance(losses, AffineLoss):
        return Objectives(_check_names(names, losses.names, len(losses), source), losses)
    if isinstance(losses, Tensor):
        if losses.dim() == 0:
            raise ValueError(
                f"{source}: got one scalar loss. The objectives' losses must be given one by one, for example "
                "[loss_a, loss_b]: a sum can no longer be balanced"
            )
        if losses.dim() != 1 or losses.numel() == 0:
            raise ValueError(
                f"{source}: a tensor of losses must have shape (K,), got {tuple(losses.shape)}; reduce each loss to "
                "a scalar first, or describe it with AffineLoss"
            )
        if losses.is_complex():
            raise TypeError(f"{source}: the losses are complex ({losses.dtype}); they must be real numbers")
        return Objectives(_check_names(names, None, len(losses), source), losses.unbind(), whole=losses)
    if isinstance(losses, Mapping):
        given = len(losses)
        losses = {str(name): loss for name, loss in losses.items()}
        if len(losses) != given:
            raise ValueError(f"{source}: two names of the losses are the same as text: {list(losses)}")
        order = list(names) if names is not None else list(losses)
        unknown = [name for name in losses if name not in order]
        if unknown:
            raise ValueError(
                f"{source}: unknown objective(s) {unknown}; this optimizer balances {order}. Objectives that are not "
                "in every step are announced with objective_names=[...]"
            )
        items = [losses.get(name) for name in order]
    elif isinstance(losses, Sequence) and not isinstance(losses, str):
        items = list(losses)
        order = _check_names(names, None, len(items), source)
    else:
        raise TypeError(
            f"{source}: losses must be a list, a dict, a 1-D tensor or an AffineLoss, got {type(losses).__name__}"
        )
    if not items:
        raise ValueError(f"{source}: losses is empty; pass at least one loss")
    for name, loss in zip(order, items, strict=True):
        if loss is not None and not isinstance(loss, Tensor):
            raise TypeError(f"{source}: the loss of {name!r} must be a tensor or None, got {type(loss).__name__}")
        if loss is not None and loss.numel() != 1:
            raise ValueError(f"{source}: the loss of {name!r} must be a scalar, got shape {tuple(loss.shape)}")
        if loss is not None and loss.is_complex():
            raise TypeError(f"{source}: the loss of {name!r} is complex ({loss.dtype}); it must be a real number")
    return Objectives(order, items)


def _check_names(expected: Sequence[str] | None, given: Sequence[str] | None, count: int, source: str) -> list[str]:
    if expected is None:
        return list(given) if given is not None else [f"objective_{k}" for k in range(count)]
    if len(expected) != count:
        raise ValueError(
            f"{source}: got {count} losses, but this optimizer balances {len(expected)} objectives: {list(expected)}. "
            "Pass None for an objective that is absent from this step"
        )
    if given is not None and list(given) != list(expected):
        raise ValueError(f"{source}: got objectives {list(given)}, but this optimizer balances {list(expected)}")
    return list(expected)


def nothing_to_differentiate(names: Sequence[str]) -> RuntimeError:
    """What to raise where losses were given and none of them has a gradient to give."""
    return RuntimeError(
        f"backward: no loss of {list(names)} requires grad and reaches a parameter of this optimizer, so there is "
        "nothing to differentiate; was the forward run under torch.no_grad(), were the losses detached, or are they "
        "another model's?"
    )
