"""Peak memory of a refresh: at most K gradients more than a plain step, and nothing kept afterwards."""

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from gradbalance import MarbleOptimizer
from gradbalance.estimators import SplitGramian

COUNT = 4


def model_and_batch():
    torch.manual_seed(0)
    # Many weights and few activations, so that gradients are what memory goes to.
    model = nn.Sequential(nn.Linear(256, 2048), nn.Tanh(), nn.Linear(2048, 1024), nn.Tanh(), nn.Linear(1024, COUNT))
    return model, torch.randn(2, 256)


def losses_of(model, x):
    return list(model(x).square().mean(0).unbind())


def measure(step):
    """Peak and remaining bytes that ``step`` allocated, from the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    waiting, events = list(profiler.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for _, size in sorted(events):
        live += size
        peak = max(peak, live)
    return peak, live


def clear(model, set_to_none):
    for p in model.parameters():
        p.grad = None if set_to_none else torch.zeros_like(p)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("regularized", [False, True])
def test_refresh_needs_at_most_one_gradient_an_objective(set_to_none, micro_batches, regularized):
    model, x = model_and_batch()
    size = sum(p.numel() * 4 for p in model.parameters())
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))

    def plain():
        for _ in range(micro_batches):
            losses = losses_of(model, x)
            (sum(losses) + losses[0] * regularized).backward()

    def balanced():
        for i in range(micro_batches):
            losses = losses_of(model, x)
            regularizer = 2 * losses[0] if regularized else None
            optimizer.backward(losses, regularizer=regularizer, accumulate=i + 1 < micro_batches)

    clear(model, set_to_none)
    base, _ = measure(plain)
    clear(model, set_to_none)
    peak, kept = measure(balanced)
    # Micro-batches that are summed onto a .grad that was kept need one gradient more: the one just computed.
    one_more = 1 if micro_batches > 1 and not set_to_none else 0
    assert peak - base <= 1.05 * (COUNT + one_more + regularized) * size
    # .grad itself is all that stays.
    assert kept <= (1.01 if set_to_none else 0.01) * size


@pytest.mark.parametrize("set_to_none", [True, False])
def test_nothing_is_kept_and_nothing_extra_is_needed_between_refreshes(set_to_none):
    model, x = model_and_batch()
    size = sum(p.numel() * 4 for p in model.parameters())
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), refresh_every=10)
    optimizer.backward(losses_of(model, x))
    optimizer.step()
    clear(model, set_to_none)
    base, _ = measure(lambda: sum(losses_of(model, x)).backward())
    clear(model, set_to_none)
    peak, kept = measure(lambda: optimizer.backward(losses_of(model, x)))
    assert not optimizer.report.refreshed
    assert peak <= base + 0.01 * size
    assert kept <= (1.01 if set_to_none else 0.01) * size


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_parts_need_a_gradient_an_objective_each(parts, set_to_none):
    model, x = model_and_batch()
    size = sum(p.numel() * 4 for p in model.parameters())
    estimator = SplitGramian(parts=parts)
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), gramian_estimator=estimator)

    def plain():
        for _ in range(4):
            sum(losses_of(model, x)).backward()

    def balanced():
        for i in range(4):
            optimizer.backward(losses_of(model, x), accumulate=i < 3)

    clear(model, set_to_none)
    base, _ = measure(plain)
    clear(model, set_to_none)
    peak, kept = measure(balanced)
    assert peak - base <= 1.05 * (parts * COUNT + (not set_to_none)) * size
    assert kept <= (1.01 if set_to_none else 0.01) * size


def test_a_history_keeps_one_buffer_an_objective_and_the_gradients_until_the_step():
    model, x = model_and_batch()
    size = sum(p.numel() * 4 for p in model.parameters())
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), gramian_estimator="history")

    def step():
        optimizer.zero_grad()
        optimizer.backward(losses_of(model, x))
        optimizer.step()

    clear(model, True)
    _, kept = measure(step)
    assert kept <= 1.01 * (1 + COUNT) * size  # with .grad
    peak, kept = measure(step)
    assert peak <= 1.05 * (1 + COUNT + 1) * size
    assert kept <= 0.01 * size
