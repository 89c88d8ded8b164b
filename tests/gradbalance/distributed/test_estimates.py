"""Estimates on two ranks: those of one process on the joined batch, for parameters of any kind."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradbalance.estimators import SplitGramian
from gradbalance.state import KEY
from tests.gradbalance.distributed.training import (
    Model,
    assert_equal_runs,
    batch,
    left_out,
    make_optimizer,
    plan,
    train_alone,
    train_rank,
)

MICRO = 4


def shard(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def plain(model):
    return model


WRAPS = [DistributedDataParallel, shard, plain]
OPTIONS = {"gramian_estimator": SplitGramian(), "refresh_every": 2}


def estimates(optimizer, report):
    return optimizer.param_groups[0][KEY]["estimates"], report.signal.tolist(), report.gramian.tolist()


def estimate(rank, model_name, wrap=plain, steps=3, micro_batches=MICRO, absent=()):
    """What is estimated after some steps; ``absent`` holds pairs (micro-batch, objective), the same on all ranks."""
    model = wrap(Model(model_name))
    optimizer = make_optimizer(model, OPTIONS)
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(micro_batches):
            parts = [0, 1] if rank is None else [rank]
            several = [model(batch(100 * step + 10 * i + r, 5)) for r in parts]
            losses = [sum(column) / len(parts) for column in zip(*several, strict=True)]
            missing = [k for j, k in absent if j == i]
            report = optimizer.backward(left_out(losses, missing, "none"), accumulate=i + 1 < micro_batches)
        optimizer.step()
    return estimates(optimizer, report)


@pytest.mark.parametrize("absent", [(), ((1, 2), (3, 2), (0, 1))], ids=["all", "some absent"])
@pytest.mark.parametrize("model", ["trunk", "heads"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_ranks_estimate_what_one_process_does(two_ranks, wrap, model, absent):
    first, second = two_ranks.run(estimate, model_name=model, wrap=wrap, absent=absent)
    assert str(first) == str(second)  # NaN is not NaN
    state, signal, gramian = estimate(None, model, absent=absent)
    for name in ("noisy", "signal"):
        torch.testing.assert_close(torch.tensor(first[0][name]), torch.tensor(state[name]), rtol=1e-5, atol=1e-9)
    # Counted on all ranks, of which there are two.
    torch.testing.assert_close(torch.tensor(first[0]["mass"]), torch.tensor(state["mass"]))
    for found, expected in ((first[1], signal), (first[2], gramian)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("model", ["trunk", "heads"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_ranks_train_as_one_process_does(two_ranks, wrap, model):
    some = plan(4, MICRO)
    options = {**OPTIONS, "ema_decay": 0.5}
    ranks = two_ranks.run(train_rank, model_name=model, plan=some, options=options, wrap=wrap)
    assert_equal_runs(ranks, train_alone(model, some, options))


def shares(rank, wrap=plain):
    """Objective 0 in all of part 0, and in part 1 on rank 0 only: shares of two thirds and one."""
    model = wrap(Model("trunk"))
    optimizer = make_optimizer(model, {"gramian_estimator": SplitGramian(ema_decay=0.0)})
    for i in range(2):
        missing = [0] if rank == 1 and i == 1 else []
        optimizer.backward(left_out(model(batch(10 * i + rank, 5)), missing, "none"), accumulate=i == 0)
    optimizer.step()
    return optimizer.param_groups[0][KEY]["estimates"]["mass"]


@pytest.mark.parametrize("wrap", [DistributedDataParallel, plain])
def test_presence_is_counted_on_all_ranks(two_ranks, wrap):
    first, second = two_ranks.run(shares, wrap=wrap)
    assert first == second
    assert first[0] == pytest.approx(1 - (2 / 3) ** 2 - (1 / 3) ** 2)
    assert first[4] == pytest.approx(0.5)
    assert first[1] == pytest.approx(1 - 2 / 3 / 2 - 1 / 3 / 2)


def chosen(rank, model_name, wrap=plain, counts=(8, 8)):
    """How many micro-batches are measured and wanted, step by step; ``counts`` is how many each rank has."""
    model = wrap(Model(model_name))
    optimizer = make_optimizer(model, {**OPTIONS, "refresh_micro_batches": "auto"})
    seen = []
    for step in range(8):
        optimizer.zero_grad()
        count = max(counts) if rank is None else counts[rank]
        for i in range(count):
            parts = [0, 1] if rank is None else [rank]
            several = [model(batch(100 * step + 10 * i + r, 15)) for r in parts]
            losses = [sum(column) / len(parts) / count for column in zip(*several, strict=True)]
            report = optimizer.backward(losses, accumulate=i + 1 < count)
        optimizer.step()
        state = optimizer.param_groups[0][KEY]
        seen.append((report.micro_batches, state["most"], state["wanted"]))
    return seen


@pytest.mark.parametrize("model", ["trunk", "heads"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_ranks_choose_the_micro_batches_of_one_process(two_ranks, wrap, model):
    first, second = two_ranks.run(chosen, model_name=model, wrap=wrap)
    assert first == second == chosen(None, model)
    assert len({measured for measured, _, _ in first}) > 1


def test_ranks_with_unequal_counts_agree_on_how_many(two_ranks):
    first, second = two_ranks.run(chosen, model_name="trunk", counts=(3, 6))
    assert first == second
    assert first[0][:2] == (4.5, 4.5)


def refused(rank, wrap):
    model = wrap(Model("trunk"))
    optimizer = make_optimizer(model, {"gramian_estimator": "history"})
    with pytest.raises(RuntimeError, match=r"HistoryGramian works in one process.*split"):
        optimizer.backward(model(batch(rank, 5)))
    one_each = make_optimizer(model, {"gramian_estimator": "split"})
    with pytest.raises(RuntimeError, match="accumulate=True"):
        one_each.backward(model(batch(rank, 5)))
    return True


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_cannot_be_is_refused_on_all_ranks(two_ranks, wrap):
    assert two_ranks.run(refused, wrap=wrap) == [True, True]
