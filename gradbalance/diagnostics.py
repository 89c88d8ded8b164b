"""What a step really did: the change that the inner optimizer made to the parameters, judged on other data.

``report.update_cosines`` is about the gradient that the inner optimizer was given and the batch it came from. AdamW
turns that gradient, and a small batch's gradients agree with themselves more than with the objective. Here the change
itself is kept and compared with gradients of losses on data that had no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradbalance import objectives
from gradbalance.gradients import wide
from gradbalance.measurement import Measurement
from gradbalance.objectives import Losses
from gradbalance.optimizer import BalancedOptimizer
from gradbalance.ranks import Ranks


@contextmanager
def applied_update(optimizer: Optimizer) -> Iterator[AppliedUpdate]:
    """Keep the change that is made to the parameters in a block, to judge it on held-out data.

    ::

        with applied_update(optimizer) as update:
            optimizer.step()
        cosines = update.cosines(losses_of(model, held_out_batch))

    The block may hold any number of steps. It keeps one copy of the trainable parameters.

    Args:
        optimizer: Any torch optimizer, balanced or not.

    Raises:
        TypeError: If ``optimizer`` is not a ``torch.optim.Optimizer``.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"applied_update: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    update = AppliedUpdate(optimizer)
    yield update
    update.finish()


class AppliedUpdate:
    """The change that a block made to an optimizer's parameters; made by :func:`applied_update`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._before: list[Tensor] | None = [p.detach().clone() for p in self._trainable]
        self._descent: list[Tensor] = []
        """θ before − θ after for each trainable parameter: to first order losses fall along it."""

    @property
    def _trainable(self) -> list[Tensor]:
        return [p for p in self._parameters if p.requires_grad]

    def finish(self) -> None:
        """Note the change; the block is over."""
        assert self._before is not None
        pairs = zip(self._before, self._trainable, strict=True)
        self._descent = [wide(before) - wide(after.detach()) for before, after in pairs]
        self._before = None

    def cosines(self, losses: Losses) -> Tensor:
        """How far the change goes the way of each objective: the cosine of −Δθ with g_k = ∇L_k.

        Positive where the change makes L_k fall, to first order, negative where it makes it rise; the sign and the
        parameters are those of ``report.update_cosines``: of a balanced optimizer the ones that are balanced, of
        another the ones that at least two of the present losses reach (all, if there is one loss only). g_k is taken
        where the losses are, after the step. It costs one reverse pass an objective and K gradients of memory, and uses
        the losses' graph up; no ``.grad`` and no state is touched. With several ranks gradients are averaged as in
        ``backward``, and every rank must make the call; under ``DistributedDataParallel`` compute the losses with
        ``model.module``, or under ``model.no_sync()``, since no pass follows that DDP could wait for.

        Args:
            losses: K losses on data that the update was not made from, in any form that ``backward`` takes; None, or a
                key missing from a balanced optimizer's: the objective is absent.

        Returns:
            Shape (K,), float64: NaN where an objective is absent or its gradient is zero; zeros for the others if the
            parameters did not change.

        Raises:
            TypeError, ValueError: If ``losses`` is malformed; the message says how.
            RuntimeError: If the block is not over, or no loss has a graph.
            FloatingPointError: If the gradient of an objective, or the change, is NaN or infinite.
        """
        if self._before is not None:
            raise RuntimeError("cosines: the update is not made yet; call it after the `with applied_update` block")
        balanced = self._optimizer if isinstance(self._optimizer, BalancedOptimizer) else None
        given = objectives.read(losses, (balanced and balanced.objective_names) or None, source="cosines")
        ranks = Ranks(self._parameters, None if balanced is None else balanced.process_group)
        if ranks.size == 1 and not any(given.connected):
            raise RuntimeError(
                f"cosines: no loss of {given.names} requires grad, so there is nothing to differentiate; compute them "
                "without torch.no_grad()"
            )
        count = len(given.names)
        # The change takes part as one more row, so that averaging and shards are the engine's business.
        measured = Measurement([*given.names, "the update"], self._parameters, ranks)
        measured.add(given, None)
        measured.put(count, list(self._descent))
        everyone = torch.cat([given.presence.to("cpu"), torch.tensor([True])])
        measured.ready(everyone, [True] * (count + 1), last=True)
        shared = self._shared(balanced, measured.reached[:count])
        values = torch.cat([given.values, given.values.new_zeros(1)])
        gramian = measured.numbers(shared, values, None).products
        finite = gramian.diagonal().isfinite().tolist()
        broken = [name for name, ok in zip([*given.names, "the update"], finite, strict=True) if not ok]
        if broken:
            raise FloatingPointError(f"cosines: the gradient of {', '.join(map(repr, broken))} is NaN or infinite")
        norms = gramian.diagonal().clamp(min=0).sqrt()
        length = norms[count]
        # One division after the other: a product of norms might under- or overflow.
        cosines = (gramian[count, :count] / norms[:count]) / (length if length > 0 else 1.0)
        known = torch.tensor(measured.present[:count]) & (norms[:count] > 0)
        return torch.where(known, cosines.clamp(-1.0, 1.0), torch.nan)

    def _shared(self, balanced: BalancedOptimizer | None, reached: Sequence[Sequence[int]]) -> list[bool]:
        """For each parameter, whether it counts."""
        found = None if balanced is None else balanced.balanced_parameters
        if found is not None:
            chosen = {id(p) for p in found}
            return [id(p) in chosen for p in self._parameters]
        least = min(2, max(1, sum(any(row) for row in reached)))
        return [sum(map(bool, column)) >= least for column in zip(*reached, strict=True)]
