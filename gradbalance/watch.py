"""A look at a step that no refresh has looked at: queued by ``backward``, read by ``step``.

The numbers are computed where the gradients are and nothing waits for them until the step is about to be made: a flag
for each loss, for the regularizer and for the gradient, set if it is not finite. With several ranks also a flag for
each objective that one of them has, and the norm of each parameter's gradient, which must be the same on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from gradbalance.devices import sent
from gradbalance.dtensor import local
from gradbalance.ranks import Ranks

# How far apart the ranks' gradients may be, relatively, and still be the same: rounding, not another batch.
_SAME = 1e-4


class Watch:
    """Queues the numbers.

    Args:
        values: The K loss values; 0 where absent.
        mask: The objectives that this rank has, as a bit mask.
        regularizer: The regularizer's value, if there is one.
        parameters: The parameters, with their ``.grad``.
        ranks: Who takes part.
    """

    def __init__(
        self, values: Tensor, mask: int, regularizer: Tensor | None, parameters: Sequence[Tensor], ranks: Ranks
    ) -> None:
        device = parameters[0].device
        norms = _norms(parameters)
        extra = values.new_zeros(1) if regularizer is None else regularizer.reshape(1)
        numbers = [sent(values, device), sent(extra, device), norms.sum().reshape(1)]
        self._ranks, self._mask, self._count = ranks, mask, len(values)
        self._flags = self._total = torch.cat([(~number.isfinite()).to(torch.float32) for number in numbers])
        self._norms = norms
        self._work: dist.Work | None = None
        if ranks.size > 1:
            here = torch.tensor([float(mask >> k & 1) for k in range(len(values))])
            self._total = torch.cat([self._flags, sent(here, device), norms])
            self._work = dist.all_reduce(self._total, group=ranks.group, async_op=True)

    def read(self) -> tuple[list[bool], bool, int]:
        """Look at the numbers.

        Returns:
            Whether each loss, the regularizer last, is not finite on some rank; whether the gradient is not; and a bit
            mask of the objectives that some rank has.

        Raises:
            RuntimeError: If the ranks' gradients differ, so that their models would drift apart.
        """
        if self._work is None:
            *flags, gradient = self._flags.tolist()
            return [bool(flag) for flag in flags], bool(gradient), self._mask
        self._work.wait()
        count = self._count
        bad, here, norms = torch.split(self._total, [count + 2, count, len(self._norms)])
        apart = ((norms - self._ranks.size * self._norms).abs() > _SAME * norms).any().reshape(1)
        numbers = torch.cat([bad, here, apart.to(torch.float32)]).tolist()
        *flags, gradient = numbers[: count + 2]
        if numbers[-1] and not gradient and not self._ranks.sharded:
            raise RuntimeError(
                "step: the gradient is not the same on all ranks. DistributedDataParallel did not average it: the last "
                "micro-batch's forward ran under no_sync(), or not through the DDP module (Lightning's manual "
                "optimization: call manual_backward); a parameter was frozen or unfrozen after the model was wrapped "
                "(wrap it again); or, with find_unused_parameters=True, the loss of a head that was computed was left "
                "out (pass 0 * loss)"
            )
        mask = sum(1 << k for k, one in enumerate(numbers[count + 2 : -1]) if one)
        return [bool(flag) for flag in flags], bool(gradient), mask


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
