"""The applied update on two ranks: cosines with the mean gradients, the same on both, as in one process."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradbalance import MarbleOptimizer, applied_update
from tests.gradbalance.distributed.training import Model, batch


def plain(model):
    return model


def shard(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def parts(rank):
    return [0, 1] if rank is None else [rank]


def mean(losses):
    return [sum(column) / len(column) for column in zip(*losses, strict=True)]


def cosines(rank, name="trunk", wrap=plain, unsynced=False):
    model = wrap(Model(name))
    optimizer = MarbleOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    found = []
    for step in range(3):
        optimizer.zero_grad()
        with applied_update(optimizer) as update:
            optimizer.backward(mean([model(batch(2 * step + r, 5)) for r in parts(rank)]))
            optimizer.step()
        held_out = model.module if isinstance(model, DistributedDataParallel) and not unsynced else model
        if unsynced:
            with model.no_sync():
                losses = model(batch(50 + step, 5) + rank)
        else:
            losses = mean([held_out(batch(50 + step, 5) + r) for r in parts(rank)])
        losses[1] = losses[1] if step else None
        found.append(update.cosines(losses))
    return torch.stack(found)


@pytest.mark.parametrize("name", ["trunk", "heads"])
@pytest.mark.parametrize("wrap", [plain, DistributedDataParallel, shard])
def test_two_ranks_agree_with_one_process(two_ranks, wrap, name):
    alone = cosines(None, name)
    first, second = two_ranks.run(cosines, name=name, wrap=wrap)
    assert torch.equal(first.nan_to_num(9.0), second.nan_to_num(9.0))
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert alone[0, 1].isnan()
    assert alone[1:].isfinite().all()


def test_ddp_without_sync(two_ranks):
    first, _ = two_ranks.run(cosines, wrap=DistributedDataParallel, unsynced=True)
    torch.testing.assert_close(first, cosines(None), rtol=1e-5, atol=1e-6, equal_nan=True)
