"""FSDP2 (fully_shard) equals one process on the joined batch."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.gradbalance.distributed.training import (
    AMORTISED,
    EXACT,
    assert_equal_runs,
    in_every_mode,
    plan,
    train_alone,
    train_rank,
)


def whole(model):
    """One group of parameters."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def layers(model):
    """Every layer a group of its own, heads included."""
    mesh = init_device_mesh("cpu", (2,))
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compare(two_ranks, model, steps, options, wrap, how="none"):
    ranks = two_ranks.run(train_rank, model_name=model, plan=steps, options=options, wrap=wrap, how=how)
    assert_equal_runs(ranks, train_alone(model, steps, options, how=how))


@pytest.mark.parametrize("model", ["trunk", "heads"])
@pytest.mark.parametrize("wrap", [whole, layers])
@in_every_mode
def test_ranks_equal_one_process(two_ranks, model, wrap, options, micro_batches):
    compare(two_ranks, model, plan(5, micro_batches, ragged=True), options, wrap)


@pytest.mark.parametrize("wrap", [whole, layers])
def test_stacked_losses_know_their_heads(two_ranks, wrap):
    steps = plan(5)
    ranks = two_ranks.run(train_rank, model_name="heads", plan=steps, options=AMORTISED, wrap=wrap, how="stack")
    alone = train_alone("heads", steps, AMORTISED)
    for rank in ranks:
        torch.testing.assert_close(rank["parameters"], alone["parameters"], rtol=1e-5, atol=1e-12)


ABSENT = {(0, 1): (2,), (1, 0): (0, 1), (3, 1): (2,), (4, 0): (1,)}


@pytest.mark.parametrize("wrap", [whole, layers])
@pytest.mark.parametrize("options", [EXACT, AMORTISED], ids=["exact", "amortised"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("model", "how"), [("trunk", "none"), ("trunk", "zero"), ("heads", "zero")])
def test_an_objective_absent_on_one_rank_counts_with_its_true_share(
    two_ranks, model, how, wrap, options, micro_batches
):
    compare(two_ranks, model, plan(5, micro_batches, absent=ABSENT), options, wrap, how)
