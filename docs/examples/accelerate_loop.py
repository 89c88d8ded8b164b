"""Two losses with accelerate: torchrun --nproc_per_node 2 docs/examples/accelerate_loop.py."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from gradbalance import MarbleOptimizer

EPOCHS, MICRO_BATCHES = 5, 2

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
torch.manual_seed(0)
x = torch.randn(256, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
marble = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), refresh_every=3)
data = DataLoader(x, batch_size=64 // accelerator.num_processes)
model, optimizer, data = accelerator.prepare(model, marble, data)

for _ in range(EPOCHS):
    for mine in data:
        with accelerator.accumulate(model):
            y = model(mine)
            losses = {"sum": (y[:, 0] - mine.sum(1)).square().mean(), "first": (y[:, 1] - mine[:, 0]).abs().mean()}
            losses = {name: loss / MICRO_BATCHES for name, loss in losses.items()}
            marble.backward(losses, accumulate=not accelerator.sync_gradients)  # in place of accelerator.backward
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

rank, world = accelerator.process_index, accelerator.num_processes
coefficients = [round(c, 4) for c in marble.coefficients.tolist()]
checksum = sum(p.abs().sum().item() for p in model.parameters())
print(f"rank {rank} of {world}: coefficients {coefficients}, parameters {checksum:.4f}")
accelerator.end_training()
