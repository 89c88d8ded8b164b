"""The Hugging Face Trainer, by the recipe of the docs: equal to a loop by hand, and resumed bit-equal."""

import torch
import transformers
from torch import nn

from gradbalance import MarbleOptimizer
from tests.gradbalance.models import OneTrunk, batches

STEPS, MICRO_BATCHES, SIZE = 6, 2, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = OneTrunk(dtype=torch.float32)

    def forward(self, x):
        return self.inner.losses(x)


class BalancedTrainer(transformers.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        losses = model(**self._prepare_inputs(inputs))
        n = self.args.gradient_accumulation_steps
        self.marble.backward([loss / n for loss in losses], accumulate=not self.accelerator.sync_gradients)
        return sum(loss.detach() for loss in losses) / n


def data():
    (x,) = batches(1, size=STEPS * MICRO_BATCHES * SIZE, dtype=torch.float32)
    return x


def make():
    model = Model()
    return model, MarbleOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), refresh_every=2)


def by_trainer(folder, resume=None):
    model, optimizer = make()
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=STEPS,
        save_steps=3,
        gradient_accumulation_steps=MICRO_BATCHES,
        per_device_train_batch_size=SIZE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    examples = [{"x": x} for x in data()]
    trainer = BalancedTrainer(model=model, args=args, train_dataset=examples, optimizers=(optimizer, None))
    trainer.marble = optimizer
    trainer.train(resume_from_checkpoint=resume)
    return [p.detach() for p in model.parameters()], optimizer.coefficients


def by_hand():
    model, optimizer = make()
    for i, x in enumerate(data().split(SIZE)):
        more = (i + 1) % MICRO_BATCHES != 0
        optimizer.backward([loss / MICRO_BATCHES for loss in model(x)], accumulate=more)
        if not more:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], optimizer.coefficients


def test_it_trains_as_a_loop_by_hand_and_resumes_bit_equal(tmp_path):
    through = by_trainer(tmp_path / "through")
    torch.testing.assert_close(through, by_hand(), rtol=1e-5, atol=1e-6)
    resumed = by_trainer(tmp_path / "again", resume=str(tmp_path / "through" / "checkpoint-3"))
    torch.testing.assert_close(resumed, through, rtol=0, atol=0)
