"""DistributedDataParallel and plain multi-rank training equal one process on the joined batch."""

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.gradbalance.distributed.training import (
    AMORTISED,
    EXACT,
    assert_equal_runs,
    in_every_mode,
    plan,
    train_alone,
    train_rank,
)
from tests.gradbalance.loss_ratios import LossRatios


def ddp(model):
    return DistributedDataParallel(model)


def ddp_unused(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def bucket_view(model):
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def unwrapped(model):
    return model


def compare(two_ranks, model, steps, options, wrap, **arguments):
    ranks = two_ranks.run(train_rank, model_name=model, plan=steps, options=options, wrap=wrap, **arguments)
    assert_equal_runs(ranks, train_alone(model, steps, options))


@pytest.mark.parametrize("model", ["trunk", "heads"])
@pytest.mark.parametrize("wrap", [ddp, ddp_unused, bucket_view, unwrapped])
@in_every_mode
def test_ranks_equal_one_process(two_ranks, model, wrap, options, micro_batches):
    compare(two_ranks, model, plan(5, micro_batches, ragged=True), options, wrap)


@pytest.mark.parametrize("model", ["trunk", "heads"])
@pytest.mark.parametrize("wrap", [ddp, unwrapped])
@pytest.mark.parametrize("options", [EXACT, AMORTISED], ids=["exact", "amortised"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_objective_absent_on_one_rank_counts_with_its_true_share(two_ranks, model, wrap, options, micro_batches):
    steps = plan(5, micro_batches, absent={(0, 1): (2,), (1, 0): (0, 1), (3, 1): (2,), (4, 0): (1,)})
    compare(two_ranks, model, steps, options, wrap)


@pytest.mark.parametrize("wrap", [ddp, unwrapped])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("model", ["trunk", "heads"])
def test_coefficients_that_follow_the_losses_follow_those_of_all_ranks(two_ranks, model, wrap, micro_batches):
    absent = {(1, 1): (2,), (3, 0): (0, 1), (4, 0): (1,)}
    if model == "trunk":  # DDP lends an absent head zeros until step(), which this comparison comes before
        absent[4, 1] = (1,)
    steps = plan(6, micro_batches, absent=absent)
    compare(two_ranks, model, steps, {"balancer": LossRatios(), "refresh_every": 3}, wrap)
