"""One plain backward of the weighted losses, and the zeros that DistributedDataParallel waits for around it.

DDP averages gradients in hooks of the parameters, when every parameter it waits for has got one. What a rank's losses
do not reach gets zeros, so that the ranks that do reach it are not left waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbalance.compiled import Saved
from gradbalance.dtensor import local
from gradbalance.matching import sync_is_off
from gradbalance.objectives import Objectives
from gradbalance.passes import Graph, accumulate_pass, walk
from gradbalance.ranks import Ranks
from gradbalance.state import BalanceState


def weighted_passes(
    given: Objectives,
    regularizer: Tensor | None,
    state: BalanceState,
    parameters: Sequence[Tensor],
    shared: Sequence[bool],
    ranks: Ranks,
    lent: Sequence[int] = (),
) -> list[int]:
    """Add Σ_k λ_k ∇L_k (shared parameters) and Σ_k ∇L_k (heads), each plus ∇regularizer, to ``.grad``.

    Args:
        given: The objectives.
        regularizer: The unbalanced loss.
        state: Whose coefficients are used.
        parameters: All parameters.
        shared: For each, whether it is balanced.
        ranks: The processes that train together.
        lent: What the step's earlier micro-batches returned.

    Returns:
        The parameters that had no ``.grad`` and got zeros for DDP's sake only; see :func:`take_back`.
    """
    graph = walk(given.outputs if regularizer is None else [*given.outputs, regularizer])
    ranks.refuse(graph)
    zeros = {
        id(p): _zeros(p, sparse)
        for p, awaited, sparse, reach in zip(parameters, ranks.awaited, ranks.sparse, state.reach, strict=True)
        if awaited and p.requires_grad and not reach & given.mask
    }
    lent = [*lent, *(i for i, p in enumerate(parameters) if id(p) in zeros and p.grad is None)]
    if lent and regularizer is not None:
        regularized = {id(leaf) for leaf in walk([regularizer]).leaves}
        lent = [i for i in lent if id(parameters[i]) not in regularized]
    trunk = [p for p, balanced in zip(parameters, shared, strict=True) if balanced and p.requires_grad]
    heads = [p for p, balanced in zip(parameters, shared, strict=True) if not balanced and p.requires_grad]
    for chosen, others, weights in (
        # The pass over the heads stops at their inputs: it repeats no work of the trunk's.
        (heads, trunk, [1.0] * len(given.names)),
        (trunk, heads, state.coefficients),
    ):
        outputs, cotangents = given.products(weights)
        if regularizer is not None and regularizer.requires_grad:
            outputs, cotangents = [*outputs, regularizer], [*cotangents, torch.ones_like(regularizer)]
        outputs += [p for p in chosen if id(p) in zeros]
        cotangents += [zeros[id(p)] for p in chosen if id(p) in zeros]
        again = chosen is heads and bool(trunk) and bool(heads)
        before = _marks(chosen) if ranks.sharded and again else []
        accumulate_pass(
            outputs,
            cotangents,
            chosen,
            retain_graph=again,
            whole_but=_kept(graph, parameters, others, ranks),
            saved=Saved(graph.compiled) if again and graph.compiled else None,
        )
        if ranks.sharded and again and given.mask and _marks(chosen) == before:
            raise sync_is_off("the pass over the heads")
    return lent


def complete(touched: set[int], parameters: Sequence[Tensor], ranks: Ranks) -> list[int]:
    """Let DDP average what measuring passes, which it does not see, have led to: a pass of zeros calls its hooks.

    Args:
        touched: The ``id`` of each parameter that this rank's last micro-batch reached.
        parameters: All parameters, with their ``.grad``.
        ranks: The processes that train together.

    Returns:
        The parameters that got zeros only; see :func:`take_back`.
    """
    here = {
        i: p
        for i, (p, awaited, synced) in enumerate(zip(parameters, ranks.awaited, ranks.synced, strict=True))
        if p.requires_grad and (awaited or (synced and not ranks.sharded and id(p) in touched))
    }
    leaves = list(here.values())
    lent = [i for i, p in here.items() if p.grad is None]
    accumulate_pass(leaves, [_zeros(p, ranks.sparse[i]) for i, p in here.items()], leaves, retain_graph=False)
    return lent


def take_back(lent: Sequence[int], parameters: Sequence[Tensor], reach: Sequence[int], mask: int) -> list[int]:
    """Set ``.grad`` of what got zeros only to None again, so that weight decay and momentum do not move it.

    Args:
        lent: The parameters that got zeros.
        parameters: All parameters.
        reach: For each, a bit mask of the objectives that reach it.
        mask: The objectives that are present on some rank.

    Returns:
        Those that one of the objectives does reach, on another rank.
    """
    kept = [i for i in lent if max(reach[i], 0) & mask]
    for i in set(lent) - set(kept):
        parameters[i].grad = None
    return kept


def _kept(graph: Graph, parameters: Sequence[Tensor], others: Sequence[Tensor], ranks: Ranks) -> list[Tensor] | None:
    """If the pass must be a whole one, the tensors whose ``.grad`` it must not change."""
    if ranks.sharded:
        # FSDP2's own leaves hold gradients until they are reduced; they are not ours to touch.
        return list(others)
    if graph.reentrant:
        own = {id(p) for p in parameters}
        return [*others, *(leaf for leaf in graph.leaves if id(leaf) not in own)]
    return None


def _marks(parameters: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """What changes when something is added to a ``.grad``."""
    return [None if p.grad is None else (id(p.grad), local(p.grad)._version) for p in parameters]


def _zeros(parameter: Tensor, sparse: bool) -> Tensor:
    """A gradient of zeros that takes no memory."""
    if sparse:
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand_as(parameter)
