"""Two gloo ranks, each of which takes one step with every library on its half of a batch."""

import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchjd.aggregation import MGDA

from tests.peers.calls import conflictfree, flat, marble, pcgrad, torchjd

WORLD = 2


def model_and_batch():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(8, 4)


def losses_of(y):
    """Two losses in conflict."""
    return [(y[:, 0] + 1).square().mean(), 3 * (y[:, 0] - 2).square().mean() + y[:, 1].square().mean()]


def one_by_one(losses, parameters):
    """No library: K calls of backward."""
    losses[0].backward(retain_graph=True)
    losses[1].backward()


LIBRARIES = {
    "backward": lambda losses, network, parameters: one_by_one(losses, parameters),
    "torchjd": lambda losses, network, parameters: torchjd(MGDA(), parallel_chunk_size=1)(losses, parameters),
    "pcgrad": lambda losses, network, parameters: pcgrad(losses, parameters),
    "conflictfree": lambda losses, network, parameters: conflictfree(losses, network),
    "gradbalance": lambda losses, network, parameters: marble(losses, parameters),
}


def in_one_process(library, rank=None):
    """The gradient on the joined batch, or on one rank's half."""
    model, batch = model_and_batch()
    parameters = list(model.parameters())
    LIBRARIES[library](losses_of(model(batch if rank is None else batch.chunk(WORLD)[rank])), model, parameters)
    return flat([p.grad for p in parameters])


def gradient_of(k, rank=None):
    """Of loss k alone, likewise."""
    model, batch = model_and_batch()
    losses = losses_of(model(batch if rank is None else batch.chunk(WORLD)[rank]))
    return flat(torch.autograd.grad(losses[k], list(model.parameters())))


def on_a_rank(library, sharding, rank):
    model, batch = model_and_batch()
    if sharding == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (WORLD,)))
    parameters = list(model.parameters())
    LIBRARIES[library](losses_of(model(batch.chunk(WORLD)[rank])), model, parameters)
    return flat([p.grad.full_tensor() if sharding == "fsdp2" else p.grad for p in parameters])


def run(rank, folder):
    """Saves, for each library and way of sharding, the rank's gradient or its traceback."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    results = {}
    for sharding in ("ddp", "fsdp2"):
        for library in LIBRARIES:
            try:
                results[sharding, library] = on_a_rank(library, sharding, rank)
            except Exception:
                results[sharding, library] = traceback.format_exc()
            dist.barrier()
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
