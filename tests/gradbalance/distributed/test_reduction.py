"""Averages over two ranks, for every kind of parameter, against the same numbers on one."""

import pytest
import torch
from torch import nn

from gradbalance.ranks import Ranks
from gradbalance.reduction import average_grads, mean_gramian

KINDS = {
    "float32": (torch.float32, 1e-6),
    "float64": (torch.float64, 1e-12),
    "bfloat16": (torch.bfloat16, 1e-2),
    "complex": (torch.complex128, 1e-12),
}


def parameters(dtype):
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 5), (7,), ())]


def gradient(parameter, seed):
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=parameter.dtype)


def rows_of(rank, count, ps):
    """Row k of parameter p; rank 1 lacks row 0 altogether, and both lack one entry."""
    rows = [[gradient(p, 100 * k + 10 * i + rank) for i, p in enumerate(ps)] for k in range(count)]
    rows[2][1] = None
    return [[None] * len(ps) if rank == 1 and k == 0 else row for k, row in enumerate(rows)]


def flattened(ps, row):
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(ps, row, strict=True)])


def part_of_gramian(rank, kind):
    ps = parameters(KINDS[kind][0])
    ranks = Ranks(ps)
    reached = [[1, 1, 1], [1, 1, 1], [1, 0, 1]]
    return ranks.total(mean_gramian(rows_of(rank, 3, ps), reached, [0, 1, 2], ps, ranks))


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_add_up_to_the_gramian_of_the_means(two_ranks, kind):
    dtype, tolerance = KINDS[kind]
    ps = parameters(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    flat = [torch.stack([flattened(ps, row) for row in rows_of(rank, 3, ps)]) for rank in (0, 1)]
    mean = (flat[0].to(wide) + flat[1].to(wide)) / 2
    expected = (mean @ mean.mH).real
    for found in two_ranks.run(part_of_gramian, kind=kind):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def averaged(rank, kind):
    ps = parameters(KINDS[kind][0])
    ps.append(nn.Parameter(torch.zeros(4, dtype=KINDS[kind][0])))  # no rank has a gradient
    ps[0].grad = gradient(ps[0], rank)
    ps[1].grad = gradient(ps[1], 5) if rank == 0 else None
    ps[2].grad = gradient(ps[2], 10 + rank)
    average_grads([0, 1, 2, 3], ps, Ranks(ps))
    return [p.grad for p in ps]


@pytest.mark.parametrize("kind", KINDS)
def test_grads_are_averaged_and_what_no_rank_has_stays_none(two_ranks, kind):
    dtype, tolerance = KINDS[kind]
    ps = parameters(dtype)
    expected = [
        (gradient(ps[0], 0) + gradient(ps[0], 1)) / 2,
        gradient(ps[1], 5) / 2,
        (gradient(ps[2], 10) + gradient(ps[2], 11)) / 2,
    ]
    first, second = two_ranks.run(averaged, kind=kind)
    assert first[3] is None
    assert second[3] is None
    for a, b, c in zip(first, second, expected, strict=False):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=tolerance, atol=tolerance)


def agreed(rank):
    ranks = Ranks(parameters(torch.float32))
    return ranks.agree([rank, 1 - rank, 0, 2 * rank], torch.device("cpu")), ranks.size, ranks.synced, ranks.awaited


def test_ranks_agree_on_the_maximum(two_ranks):
    for answer in two_ranks.run(agreed):
        assert answer == ([1, 1, 0, 2], 2, [False] * 3, [False] * 3)


def test_one_process_needs_nobody():
    ranks = Ranks(parameters(torch.float32))
    assert ranks.size == 1
    assert ranks.agree([3, 0], torch.device("cpu")) == [3, 0]
    vector = torch.ones(2)
    assert ranks.total(vector) is vector
