"""Two losses under DistributedDataParallel: torchrun --nproc_per_node 2 docs/examples/ddp.py."""

from contextlib import nullcontext

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradbalance import MarbleOptimizer

STEPS, MICRO_BATCHES = 10, 2

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(STEPS, MICRO_BATCHES, 64, 8)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)))
optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), refresh_every=3)

for step in range(STEPS):
    optimizer.zero_grad()
    for i in range(MICRO_BATCHES):
        more = i + 1 < MICRO_BATCHES
        mine = x[step, i, rank::world]  # what a DistributedSampler does
        with model.no_sync() if more else nullcontext():
            y = model(mine)
            losses = {"sum": (y[:, 0] - mine.sum(1)).square().mean(), "first": (y[:, 1] - mine[:, 0]).abs().mean()}
            optimizer.backward({name: loss / MICRO_BATCHES for name, loss in losses.items()}, accumulate=more)
    optimizer.step()

coefficients = [round(c, 4) for c in optimizer.coefficients.tolist()]
checksum = sum(p.abs().sum().item() for p in model.parameters())
print(f"rank {rank} of {world}: coefficients {coefficients}, parameters {checksum:.4f}")
dist.destroy_process_group()
