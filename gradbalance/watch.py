"""A look at a step that no refresh has looked at: queued by ``backward``, read by ``step``.

The numbers are computed where the gradients are and nothing waits for them until the step is about to be made: a flag
for each loss, for the regularizer and for the gradient, set if it is not finite; a checksum of the gradient, which must
be the same on all ranks; and, with several ranks, a flag for each objective that one of them has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from gradbalance.devices import sent
from gradbalance.ranks import Ranks, local

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
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        grads = [grad._values() if grad.is_sparse else grad for grad in grads]
        sizes = _norms([grad for grad in grads if grad.numel()]) or [torch.zeros((), device=device)]
        checksum = torch.stack([sent(size, device, torch.float32) for size in sizes]).sum().reshape(1)
        extra = torch.zeros_like(checksum) if regularizer is None else regularizer.reshape(1)
        numbers = [sent(values, device), sent(extra, device), checksum]
        flags = [(~number.isfinite()).to(torch.float32) for number in numbers]
        self._ranks, self._mask, self._count = ranks, mask, len(values)
        self._mine = self._total = torch.cat([*flags, checksum])
        self._work: dist.Work | None = None
        if ranks.size > 1:
            here = torch.tensor([float(mask >> k & 1) for k in range(len(values))])
            self._total = torch.cat([sent(here, device), self._mine])
            self._work = dist.all_reduce(self._total, group=ranks.group, async_op=True)

    def read(self) -> tuple[list[bool], bool, int]:
        """Look at the numbers.

        Returns:
            Whether each loss, the regularizer last, is not finite on some rank; whether the gradient is not; and a bit
            mask of the objectives that some rank has.

        Raises:
            RuntimeError: If the ranks' gradients differ, so that their models would drift apart.
        """
        if self._work is not None:
            self._work.wait()
        *numbers, gradient, checksum, own = torch.cat([self._total, self._mine[-1:]]).tolist()
        here, flags = numbers[: -self._count - 1], numbers[-self._count - 1 :]
        apart = abs(checksum - self._ranks.size * own) > _SAME * abs(checksum)
        if apart and not gradient and not self._ranks.sharded:
            raise RuntimeError(
                "step: the gradient is not the same on all ranks. DistributedDataParallel did not average it: the last "
                "micro-batch's forward ran under no_sync(), or not through the DDP module (Lightning's manual "
                "optimization: call manual_backward), a parameter was unfrozen after the model was wrapped, or, with "
                "find_unused_parameters=True, the loss of a head that was computed was left out (pass 0 * loss)"
            )
        mask = sum(1 << k for k, one in enumerate(here) if one) if here else self._mask
        return [bool(flag) for flag in flags], bool(gradient), mask


def _norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each gradient, in float32 at least: the fastest look at every number that torch has."""
    narrow = [grad for grad in grads if grad.dtype in (torch.float16, torch.bfloat16)]
    others = [grad for grad in grads if grad.dtype not in (torch.float16, torch.bfloat16)]
    norms = list(torch._foreach_norm(narrow, dtype=torch.float32)) if narrow else []
    return norms + (list(torch._foreach_norm(others)) if others else [])
