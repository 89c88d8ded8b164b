"""One training run that a single process, DDP ranks and FSDP2 ranks can all make, so that they can be compared.

A plan is a list of steps; a step is a list of micro-batches for each rank; a micro-batch is (seed, size, absent), where
``absent`` holds the objectives that this rank leaves out. The single process takes the mean of the ranks' losses, which
is what data parallelism stands for.
"""

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.tensor import DTensor

from gradbalance import BalancedOptimizer, MarbleOptimizer
from tests.gradbalance.models import OneTrunk, TwoHeads

MODELS = {"trunk": OneTrunk, "heads": TwoHeads}

EXACT = {"ema_decay": 0.0}
AMORTISED = {"refresh_every": 3}
LIMITED = {"refresh_every": 2, "refresh_micro_batches": 2}

in_every_mode = pytest.mark.parametrize(
    ("options", "micro_batches"),
    [(EXACT, 1), (AMORTISED, 1), (AMORTISED, 3), (LIMITED, 3)],
    ids=["exact", "amortised", "accumulated", "limited"],
)


def batch(seed, size):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Model(torch.nn.Module):
    """The losses as outputs, since DDP and FSDP2 act on ``forward``."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(1)
        self.inner = MODELS[name]()

    def forward(self, x):
        return self.inner.losses(x)


def plan(steps, micro_batches=1, *, absent=None, ragged=False):
    """``plan[step][rank][micro_batch]``. ``absent`` maps (step, rank) to objectives, ``ragged`` varies sizes."""
    result = []
    for step in range(steps):
        ranks = []
        for rank in range(2):
            sizes = [3 + (2 * rank + i + step) % 4 if ragged else 5 for i in range(micro_batches)]
            missing = (absent or {}).get((step, rank), ())
            ranks.append([(100 * step + 10 * i + rank, size, missing) for i, size in enumerate(sizes)])
        result.append(ranks)
    return result


def left_out(losses, missing, how):
    """The losses without the missing ones: ``None``, or present with weight zero; or all of them as one tensor."""
    if how == "stack":
        return torch.stack(losses)
    return [loss if k not in missing else None if how == "none" else 0 * loss for k, loss in enumerate(losses)]


def full(tensor):
    return None if tensor is None else tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def record(model, optimizer, report):
    return {
        "grads": [full(p.grad) for p in model.parameters()],
        "coefficients": optimizer.coefficients,
        "refreshed": report.refreshed,
    }


def finish(trace, model):
    return {"trace": trace, "parameters": [full(p.detach()) for p in model.parameters()]}


def make_optimizer(model, options, lr=0.05):
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    return BalancedOptimizer(inner, **options) if "balancer" in options else MarbleOptimizer(inner, **options)


def train_alone(model_name, plan, options, how="none"):
    model = Model(model_name)
    optimizer = make_optimizer(model, options)
    trace = []
    for ranks in plan:
        optimizer.zero_grad()
        rounds = max(len(micro_batches) for micro_batches in ranks)
        for i in range(rounds):
            parts = [left_out(model(batch(s, n)), missing, how) for m in ranks for s, n, missing in m[i : i + 1]]
            losses = []
            for column in zip(*parts, strict=True):
                here = [loss for loss in column if loss is not None]
                losses.append(sum(here) / 2 if here else None)
            report = optimizer.backward(losses, accumulate=i + 1 < rounds)
        trace.append(record(model, optimizer, report))
        optimizer.step()
    return finish(trace, model)


def train_rank(rank, model_name, plan, options, wrap, how="none", no_sync=True):
    """The same on one rank; ``wrap(model)`` makes it DDP or FSDP2."""
    model = wrap(Model(model_name))
    optimizer = make_optimizer(model, options)
    trace = []
    for ranks in plan:
        optimizer.zero_grad()
        micro_batches = ranks[rank]
        for i, (seed, size, missing) in enumerate(micro_batches):
            more = i + 1 < len(micro_batches)
            with model.no_sync() if more and no_sync and hasattr(model, "no_sync") else nullcontext():
                losses = left_out(model(batch(seed, size)), missing, how)
                report = optimizer.backward(losses, accumulate=more)
        trace.append(record(model, optimizer, report))
        optimizer.step()
    return finish(trace, model)


def assert_equal_runs(ranks, alone, rtol=1e-5):
    """The same bits on all ranks, and what a single process computes on the joined batch."""
    for step, expected in enumerate(alone["trace"]):
        first, second = (run["trace"][step] for run in ranks)
        assert torch.equal(first["coefficients"], second["coefficients"])
        assert first["refreshed"] is second["refreshed"] is expected["refreshed"]
        torch.testing.assert_close(first["coefficients"], expected["coefficients"], rtol=rtol, atol=0)
        for a, b, c in zip(first["grads"], second["grads"], expected["grads"], strict=True):
            if a is None or c is None:
                assert a is None
                assert b is None
                assert c is None
                continue
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=rtol, atol=1e-12)
    for a, b, c in zip(*(run["parameters"] for run in [*ranks, alone]), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=rtol, atol=1e-12)
