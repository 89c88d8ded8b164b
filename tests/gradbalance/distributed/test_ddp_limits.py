"""What a multi-rank step sends, what it does with a NaN on one rank, and what it refuses."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from gradbalance import MarbleOptimizer, NonFiniteError
from tests.gradbalance.distributed.training import Model, batch

WORLD = 2


class Sent(TorchDispatchMode):
    """Numbers that one rank sends, by collective, for the ring algorithms: (W−1)/W of the data for a reduce-scatter or
    an all-gather, twice that for an all-reduce."""

    def __init__(self):
        super().__init__()
        self.numbers = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("c10d::"):
            full = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            full = args[1] if "reduce_scatter" in name else full
            factor = {"c10d::allreduce_": 2, "c10d::_reduce_scatter_base_": 1, "c10d::_allgather_base_": 1}[name]
            kind = name if full.numel() > 500 else "small"
            self.numbers[kind] = self.numbers.get(kind, 0) + factor * full.numel() * (WORLD - 1) / WORLD
        return func(*args, **(kwargs or {}))


def wide(wrapped):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 5))
    return DistributedDataParallel(model) if wrapped else model


def bytes_of_steps(rank, wrapped):
    model = wide(wrapped)
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), refresh_every=2)
    sent = []
    for step in range(4):
        optimizer.zero_grad()
        losses = model(batch(2 * step + rank, 6).float()).square().mean(0)
        with Sent() as counter:
            optimizer.backward(losses)
            optimizer.step()
        sent.append(counter.numbers)
    return sent, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("wrapped", [True, False])
def test_what_a_rank_sends(two_ranks, wrapped):
    for steps, size in two_ranks.run(bytes_of_steps, wrapped=wrapped):
        for numbers in steps[::2]:  # refresh: K gradients scattered, one plain reduction, and little more
            assert numbers["c10d::_reduce_scatter_base_"] == pytest.approx(5 * size / 2, rel=0.01)
            assert numbers["c10d::allreduce_"] == pytest.approx(size, rel=0.01)
            assert numbers.keys() == {"c10d::_reduce_scatter_base_", "c10d::allreduce_", "small"}
            assert numbers["small"] <= 600
            assert sum(numbers.values()) <= (5 + 1) * size
        for numbers in steps[1::2]:  # amortised: one plain reduction
            assert numbers.keys() == {"c10d::allreduce_", "small"}
            assert numbers["c10d::allreduce_"] == pytest.approx(size, rel=0.01)
            assert numbers["small"] <= 60


def with_a_nan(rank, nonfinite, bad_step, where):
    """One rank's loss (or, where the loss is finite, its gradient) is not finite in one step."""
    model = DistributedDataParallel(Model("trunk"))
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = MarbleOptimizer(inner, refresh_every=2, nonfinite=nonfinite, objective_names=["a", "b", "c"])
    errors, same = [], []
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        losses = model(batch(2 * step + rank, 5))
        if step == bad_step and rank == 1:
            losses[1] = losses[1] * float("nan") if where == "loss" else (losses[1] - losses[1].detach()).sqrt()
        try:
            optimizer.backward(losses)
            optimizer.step()
        except NonFiniteError as error:
            errors.append((step, str(error)))
        same.append(all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)))
    return errors, same, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("bad_step", [2, 3], ids=["refresh", "amortised"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_nan_on_one_rank_stops_the_step_on_all(two_ranks, nonfinite, bad_step, where):
    answers = two_ranks.run(with_a_nan, nonfinite=nonfinite, bad_step=bad_step, where=where)
    for errors, same, _ in answers:
        assert same == [step == bad_step for step in range(4)]
        assert len(errors) == (nonfinite == "raise")
        for step, message in errors:
            assert step == bad_step
            assert "'b'" in message
    for first, second in zip(answers[0][2], answers[1][2], strict=True):
        assert torch.equal(first, second)


def refused(rank, case):
    options = {}
    inner = Model("heads")
    model = DistributedDataParallel(inner, **({"static_graph": True} if case == "static graph" else {}))
    parameters = list(inner.inner.trunk.parameters()) if case == "not all" else list(model.parameters())
    optimizer = MarbleOptimizer(torch.optim.SGD(parameters, lr=0.1), refresh_every=2, **options)
    try:
        for step in range(2):
            optimizer.zero_grad()
            with model.no_sync() if case == "not averaged" else nullcontext():
                optimizer.backward(model(batch(2 * step + rank, 5)))
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("static graph", "use static_graph=False"),
        ("not all", "6 trainable parameter(s) of the DistributedDataParallel model are not in this optimizer"),
        ("not averaged", "the gradient is not the same on all ranks"),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank(two_ranks, case, message):
    for answer in two_ranks.run(refused, case=case):
        assert message in answer


def reentrant(rank):
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    y = torch.utils.checkpoint.checkpoint(model, batch(rank, 5).float().requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        optimizer.backward(y.square().mean(0))
    return True


def test_reentrant_checkpointing_under_ddp_is_refused(two_ranks):
    assert two_ranks.run(reentrant) == [True, True]


def fsdp1(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(4, 2), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="FSDP2"):
        optimizer.backward(model(batch(rank, 5).float()).square().mean(0))
    return True


def test_fsdp1_is_refused(two_ranks):
    assert two_ranks.run(fsdp1) == [True, True]


def ragged_counts(rank, counts):
    """Rank 0 has three micro-batches, rank 1 two: only the last one's reduction is waited for."""
    model = DistributedDataParallel(Model("heads"))
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), refresh_every=2, refresh_micro_batches=2)
    for step in range(4):
        optimizer.zero_grad()
        for i in range(counts[rank]):
            more = i + 1 < counts[rank]
            with model.no_sync() if more else nullcontext():
                losses = model(batch(20 * step + 2 * i + rank, 5))
                optimizer.backward([losses[0], losses[1] if i else None, losses[2]], accumulate=more)
        optimizer.step()
    return optimizer.coefficients, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("counts", [(3, 2), (4, 1), (1, 3)])
def test_ranks_may_have_different_numbers_of_micro_batches(two_ranks, counts):
    (first, ours), (second, theirs) = two_ranks.run(ragged_counts, counts=counts)
    assert torch.equal(first, second)
    assert (first > 0).all()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def sparse_embedding(rank, wrapped):
    torch.manual_seed(0)
    table = nn.EmbeddingBag(10, 3, mode="sum", sparse=True)
    model = DistributedDataParallel(table) if wrapped else table
    optimizer = MarbleOptimizer(torch.optim.SparseAdam(list(model.parameters()), lr=0.1), refresh_every=2)
    for step in range(4):
        optimizer.zero_grad()
        words = torch.tensor([[1 + rank, 4 + step % 2, 7]])
        optimizer.backward(model(words).square().mean(0))
        assert table.weight.grad.is_sparse
        optimizer.step()
    return table.weight.detach()


@pytest.mark.parametrize("wrapped", [False, True])
def test_sparse_gradients_stay_sparse(two_ranks, wrapped):
    first, second = two_ranks.run(sparse_embedding, wrapped=wrapped)
    assert torch.equal(first, second)
    torch.manual_seed(0)
    table = nn.EmbeddingBag(10, 3, mode="sum", sparse=True)
    untouched = [0, 3, 6, 8, 9]
    assert torch.equal(first[untouched], table.weight.detach()[untouched])
    assert (first[[1, 2, 4, 5, 7]] != table.weight.detach()[[1, 2, 4, 5, 7]]).all()
