"""accelerate: prepare, accumulate, clip, fp16, save_state and load_state, on one process and on two ranks."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradbalance import MarbleOptimizer
from tests.gradbalance.distributed.training import Model, batch, full, plan


def train(rank, steps, micro_batches, kind, folder=None, stop_at=None):
    """Some optimizer steps by accelerate's own loop; with a folder it is interrupted and resumed from there."""
    accumulation = GradientAccumulationPlugin(num_steps=micro_batches, sync_each_batch=kind == "fsdp")
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=accumulation)
    if kind == "fsdp":
        # accelerate turns to FSDP on accelerators only; what it then does works on a CPU as well.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    norms, grads = [], []

    def build():
        model = Model("heads")
        marble = MarbleOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), refresh_every=2)
        return marble, *accelerator.prepare(model, marble)

    marble, model, optimizer = build()
    assert accelerator.is_fsdp2 is (kind == "fsdp")
    assert isinstance(model, DistributedDataParallel) is (kind == "ddp")
    assert all(isinstance(p, DTensor) is (kind == "fsdp") for p in model.parameters())
    for step in range(steps):
        if step == stop_at:
            accelerator.save_state(folder)
            accelerator.free_memory()
            marble, model, optimizer = build()
            accelerator.load_state(folder)
        for i in range(micro_batches):
            with accelerator.accumulate(model):
                losses = model(batch(100 * step + 10 * i + rank, 5))
                marble.backward([loss / micro_batches for loss in losses], accumulate=not accelerator.sync_gradients)
                if accelerator.sync_gradients:
                    norms.append(float(full(accelerator.clip_grad_norm_(model.parameters(), 1.0))))
                    grads.append([full(p.grad) for p in model.parameters()])
                optimizer.step()
                optimizer.zero_grad()
    AcceleratorState._reset_state(reset_partial_state=True)  # so that the next test can choose DDP or FSDP2 anew
    return norms, grads, [full(p.detach()) for p in model.parameters()], marble.coefficients


def alone(steps, micro_batches):
    """What it must be, without accelerate: the joined batch in one process."""
    model = Model("heads")
    optimizer = MarbleOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), refresh_every=2)
    norms, grads = [], []
    for ranks in plan(steps, micro_batches):
        optimizer.zero_grad()
        for i in range(micro_batches):
            parts = [model(batch(m[i][0], m[i][1])) for m in ranks]
            losses = [sum(column) / 2 / micro_batches for column in zip(*parts, strict=True)]
            optimizer.backward(losses, accumulate=i + 1 < micro_batches)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        grads.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return norms, grads, [p.detach() for p in model.parameters()], optimizer.coefficients


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_it_equals_one_process(two_ranks, kind, micro_batches):
    answers = two_ranks.run(train, steps=4, micro_batches=micro_batches, kind=kind)
    expected = alone(4, micro_batches)
    for answer in answers:
        torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-12)
    assert torch.equal(answers[0][3], answers[1][3])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("stop_at", [1, 2])
def test_save_state_and_load_state_resume_bit_equal(two_ranks, kind, stop_at, tmp_path):
    through = two_ranks.run(train, steps=4, micro_batches=2, kind=kind)
    resumed = two_ranks.run(train, steps=4, micro_batches=2, kind=kind, folder=str(tmp_path), stop_at=stop_at)
    for a, b in zip(through, resumed, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
