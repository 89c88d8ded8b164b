"""Two losses with Lightning, on as many processes as said: python docs/examples/lightning_loop.py 2."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from gradbalance import MarbleOptimizer

world = int(sys.argv[1]) if len(sys.argv) > 1 else 1


class Balanced(lightning.LightningModule):
    """``training_step`` returns the losses as one tensor; ``backward`` hands them on."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))

    def configure_optimizers(self):
        return MarbleOptimizer(torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9), refresh_every=3)

    def training_step(self, x, index):
        self.more = (index + 1) % self.trainer.accumulate_grad_batches != 0 and not self.trainer.is_last_batch
        y = self.model(x)
        return torch.stack([(y[:, 0] - x.sum(1)).square().mean(), (y[:, 1] - x[:, 0]).abs().mean()])

    def backward(self, losses):
        self.optimizers(use_pl_optimizer=False).backward(losses, accumulate=self.more)

    def on_train_end(self):
        coefficients = [round(c, 4) for c in self.optimizers(use_pl_optimizer=False).coefficients.tolist()]
        checksum = sum(p.abs().sum().item() for p in self.parameters())
        print(f"rank {self.global_rank} of {world}: coefficients {coefficients}, parameters {checksum:.4f}")


lightning.seed_everything(0)
data = DataLoader(torch.randn(256, 8), batch_size=64 // world)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
training = {"max_epochs": 5, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
trainer = lightning.Trainer(accelerator="cpu", devices=world, strategy="ddp", **training, **quiet)
trainer.fit(Balanced(), data)
