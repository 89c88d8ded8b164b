"""A look at a step that no refresh has looked at: queued by ``backward``, read by ``step``.

The numbers are computed where the gradients are and nothing waits for them until the step is about to be made: the
losses, the regularizer and the gradient's size, each of which may turn out not to be finite. With several ranks also a
flag for each objective that one of them has, and the norm of each parameter's gradient, which must be the same on all
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from gradbalance.devices import sent
from gradbalance.dtensor import local
from gradbalance.ranks import Ranks

# How far apart the ranks' gradients may be, relatively, and still be the same: rounding, not another batch.
_SAME = 1e-4


class Seen(NamedTuple):
    """What a watch saw.

    Attributes:
        bad: Whether each loss, the regularizer last, is not finite on some rank.
        gradient: Whether the gradient is not.
        mask: The objectives that some rank has with a graph, as a bit mask.
        losses: The K losses, averaged over the ranks; NaN where absent from all.
    """

    bad: list[bool]
    gradient: bool
    mask: int
    losses: Tensor


class Watch:
    """Queues the numbers.

    Args:
        values: The K loss values; 0 where absent.
        presence: Which of the objectives this rank has, shape (K,), bool.
        mask: Those of them with a graph, as a bit mask.
        regularizer: The regularizer's value, if there is one.
        parameters: The parameters, with their ``.grad``.
        ranks: Who takes part.
    """

    def __init__(
        self,
        values: Tensor,
        presence: Tensor,
        mask: int,
        regularizer: Tensor | None,
        parameters: Sequence[Tensor],
        ranks: Ranks,
    ) -> None:
        device = parameters[0].device
        norms = _norms(parameters)
        extra = values.new_zeros(1) if regularizer is None else regularizer.reshape(1)
        numbers = torch.cat([sent(number, device) for number in (values, extra, norms.sum().reshape(1))])
        self._ranks, self._presence, self._mask, self._count = ranks, presence, mask, len(values)
        self._norms = norms
        self._work: dist.Work | None = None
        # What the host knows without asking need not be copied.
        self._total = numbers if presence.device.type == "cpu" else torch.cat([numbers, presence])
        if ranks.size > 1:
            here = torch.tensor([float(mask >> k & 1) for k in range(len(values))])
            self._total = torch.cat([numbers / ranks.size, sent(presence, device), sent(here, device), norms])
            self._work = dist.all_reduce(self._total, group=ranks.group, async_op=True)

    def read(self) -> Seen:
        """Look at the numbers.

        Raises:
            RuntimeError: If the ranks' gradients differ, so that their models would drift apart.
        """
        count, mask, apart = self._count, self._mask, False
        if self._work is None:
            numbers = self._total.tolist()
            present = numbers[count + 2 :] or self._presence.tolist()
        else:
            self._work.wait()
            mine, norms = torch.split(self._total, [3 * count + 2, len(self._norms)])
            differ = ((norms - self._ranks.size * self._norms).abs() > _SAME * norms).any().reshape(1)
            *numbers, apart = torch.cat([mine, differ.to(mine)]).tolist()
            present, here = numbers[count + 2 : 2 * count + 2], numbers[2 * count + 2 :]
            mask = sum(1 << k for k, one in enumerate(here) if one)
        losses, gradient = numbers[:count], not isfinite(numbers[count + 1])
        bad = [not isfinite(number) for number in numbers[: count + 1]]
        if apart and not gradient and not self._ranks.sharded:
            raise RuntimeError(
                "step: the gradient is not the same on all ranks. DistributedDataParallel did not average it: the last "
                "micro-batch's forward ran under no_sync(), or not through the DDP module (Lightning's manual "
                "optimization: call manual_backward); a parameter was frozen or unfrozen after the model was wrapped "
                "(wrap it again); or, with find_unused_parameters=True, the loss of a head that was computed was left "
                "out (pass 0 * loss)"
            )
        known = [loss if here else nan for loss, here in zip(losses, present, strict=True)]
        return Seen(bad, gradient, mask, torch.tensor(known, dtype=torch.float64))


def _norms(parameters: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each ``.grad``, 0 where there is none, in float32: the fastest look at every number torch has."""
    device = parameters[0].device
    norms = [torch.zeros((), device=device)] * len(parameters)
    narrow: dict[int, Tensor] = {}
    others: dict[int, Tensor] = {}
    for p, parameter in enumerate(parameters):
        if parameter.grad is not None:
            grad = local(parameter.grad)
            grad = grad._values() if grad.is_sparse else grad
            if grad.numel():
                (narrow if grad.dtype in (torch.float16, torch.bfloat16) else others)[p] = grad
    for grads, dtype in ((narrow, torch.float32), (others, None)):
        if grads:
            found = torch._foreach_norm(list(grads.values()), dtype=dtype)
            for p, norm in zip(grads, found, strict=True):
                norms[p] = sent(norm, device, torch.float32)
    return torch.stack(norms)
