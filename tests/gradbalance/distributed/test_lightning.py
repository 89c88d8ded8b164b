"""Lightning: automatic and manual optimization, accumulation, clipping, resuming, on one process and on two ranks."""

import lightning
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from gradbalance import MarbleOptimizer
from tests.gradbalance.distributed.training import Model, batch

BATCHES, ACCUMULATE, CLIP = 8, 2, 1.0


class Batches(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return BATCHES

    def __getitem__(self, i):
        return batch(10 * i + self.rank, 5)


class Balanced(lightning.LightningModule):
    """What a user adds to their module: losses as one tensor, and ``backward``."""

    def __init__(self, manual):
        super().__init__()
        self.model = Model("heads")
        self.automatic_optimization = not manual
        self.grads = []

    def configure_optimizers(self):
        optimizer = MarbleOptimizer(torch.optim.Adam(self.parameters(), lr=0.05), refresh_every=2)
        optimizer.register_step_post_hook(self.record)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def backward(self, losses, *args, **kwargs):
        self.optimizers(use_pl_optimizer=False).backward(losses, accumulate=self.more)

    def training_step(self, x, index):
        self.more = (index + 1) % ACCUMULATE != 0
        losses = torch.stack(self.model(x))
        if self.automatic_optimization:
            return losses
        optimizer = self.optimizers()
        if index % ACCUMULATE == 0:
            optimizer.zero_grad()
        self.manual_backward(losses / ACCUMULATE)
        if not self.more:
            self.clip_gradients(optimizer, CLIP, "norm")
            optimizer.step()
        return None

    def record(self, *args):
        self.grads.append([p.grad.clone() for p in self.parameters()])


def fit(rank, manual, distributed, folder, epochs=1, resume=None):
    module = Balanced(manual)
    automatic = {} if manual else {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": CLIP}
    strategy = DDPStrategy(cluster_environment=LightningEnvironment()) if distributed else "auto"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2 if distributed else 1,
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **automatic,
    )
    trainer.fit(module, DataLoader(Batches(rank), batch_size=None), ckpt_path=resume)
    path = f"{folder}/last.ckpt"
    trainer.save_checkpoint(path)
    return module.grads, [p.detach().clone() for p in module.parameters()], path


def alone(ranks, epochs=1):
    """The same without Lightning, in one process."""
    model = Model("heads")
    optimizer = MarbleOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), refresh_every=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    grads = []
    for _ in range(epochs):
        for i in range(BATCHES):
            parts = [model(Batches(rank)[i]) for rank in range(ranks)]
            losses = [sum(column) / ranks / ACCUMULATE for column in zip(*parts, strict=True)]
            more = (i + 1) % ACCUMULATE != 0
            optimizer.backward(losses, accumulate=more)
            if not more:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                grads.append([p.grad.clone() for p in model.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return grads, [p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("manual", [False, True])
def test_one_process(manual, tmp_path):
    grads, parameters, _ = fit(0, manual, False, tmp_path)
    torch.testing.assert_close([grads, parameters], list(alone(1)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("manual", [False, True])
def test_two_ranks(two_ranks, manual, tmp_path):
    answers = two_ranks.run(fit, manual=manual, distributed=True, folder=str(tmp_path))
    expected = list(alone(2))
    for grads, parameters, _ in answers:
        torch.testing.assert_close([grads, parameters], expected, rtol=1e-5, atol=1e-12)
