"""What every step costs: no peer has a step that is cheaper than K reverse passes, and some look at the data again and
again, each look a wait for the device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchjd.aggregation import MGDA, GradVac, PCGrad

from gradbalance import MarbleOptimizer
from tests.gradbalance.models import OneTrunk, batches
from tests.peers.calls import pcgrad, torchjd

pytestmark = pytest.mark.slow


class Looks(TorchDispatchMode):
    """Counts ``.item()`` and what comes down to it, such as ``if tensor:``."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def problem(count=5):
    torch.manual_seed(0)
    model = OneTrunk(count, dtype=torch.float32)
    return model, batches(1, dtype=torch.float32)[0]


@pytest.mark.parametrize(("aggregator", "least"), [(MGDA(), 10), (PCGrad(), 40), (GradVac(), 20)])
def test_torchjd_waits_for_the_device_many_times_a_step(aggregator, least):
    model, x = problem()
    losses = model.losses(x)
    with Looks() as looks:
        torchjd(aggregator)(losses, list(model.parameters()))
    assert looks.count >= least


def test_gradbalance_waits_once_a_refresh_at_most_and_never_in_between():
    """Here by the same count, to which a CPU does not show the one copy of the Gramian."""
    model, x = problem()
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), refresh_every=2)
    for most in (1, 0):
        losses = model.losses(x)
        with Looks() as looks:
            optimizer.backward(losses)
        assert looks.count <= most
        optimizer.step()
        optimizer.zero_grad()


def test_reverse_passes_over_ten_steps():
    model, x = problem()
    passes = 0

    def seen(gradient):
        nonlocal passes
        passes += 1

    def train(call):
        nonlocal passes
        passes = 0
        for _ in range(10):
            hidden = model.net[:2](x)
            hidden.register_hook(seen)
            y = model.net[2](hidden)
            call([(y - k).square().mean() for k in range(5)])
        return passes

    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), refresh_every=10)

    def marble_step(losses):
        optimizer.zero_grad()
        optimizer.backward(losses)
        optimizer.step()

    parameters = list(model.parameters())
    assert train(lambda losses: pcgrad(losses, parameters)) == 50
    assert train(lambda losses: torchjd(MGDA(), parallel_chunk_size=1)(losses, parameters)) == 50
    assert train(marble_step) == 14
