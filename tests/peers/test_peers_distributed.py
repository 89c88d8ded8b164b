"""Two ranks with half a batch each must all get the gradient of one process with the whole batch. Under DDP no peer's
do: the hooks that average gradients run for the first backward only, and for autograd.grad not at all."""

import pytest
import torch

from tests.peers import ranks
from tests.peers.calls import cosine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(ranks.run, (str(folder),), nprocs=ranks.WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks.WORLD)]


@pytest.mark.parametrize(
    ("library", "apart", "towards_joined"),
    [("backward", 0.421, 0.978), ("torchjd", 0.435, 0.974), ("pcgrad", 1.576, 0.613), ("conflictfree", 1.567, 0.615)],
)
def test_under_ddp_the_peers_ranks_get_different_gradients(results, library, apart, towards_joined):
    first, second = (result["ddp", library] for result in results)
    assert (first - second).norm() / first.norm() == pytest.approx(apart, abs=2e-3)
    assert cosine(first, ranks.in_one_process(library)) == pytest.approx(towards_joined, abs=2e-3)


@pytest.mark.parametrize("rank", range(ranks.WORLD))
def test_under_ddp_only_the_first_loss_is_averaged(results, rank):
    """And none for torchjd: each rank goes by its own half."""
    expected = ranks.gradient_of(0) + ranks.gradient_of(1, rank)
    torch.testing.assert_close(results[rank]["ddp", "backward"], expected, rtol=1e-5, atol=1e-6)
    expected = ranks.in_one_process("torchjd", rank)
    torch.testing.assert_close(results[rank]["ddp", "torchjd"], expected, rtol=1e-5, atol=1e-6)


def test_under_fsdp2_torchjd_fails(results):
    for result in results:
        assert "Some `jac` fields were not populated" in result["fsdp2", "torchjd"]


def test_under_fsdp2_conflictfree_is_wrong(results):
    """Without a word, and equally on both ranks."""
    first, second = (result["fsdp2", "conflictfree"] for result in results)
    assert torch.equal(first, second)
    assert cosine(first, ranks.in_one_process("conflictfree")) == pytest.approx(0.066, abs=2e-3)


@pytest.mark.parametrize("library", ["backward", "pcgrad"])
def test_under_fsdp2_full_backward_calls_are_right(results, library):
    """No failure here: PCGrad's K calls are what FSDP2 wants."""
    for result in results:
        torch.testing.assert_close(result["fsdp2", library], ranks.in_one_process(library), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_gradbalance_is_right_on_every_rank(results, sharding):
    first, second = (result[sharding, "gradbalance"] for result in results)
    assert isinstance(first, torch.Tensor), first
    assert torch.equal(first, second)
    torch.testing.assert_close(first, ranks.in_one_process("gradbalance"), rtol=1e-5, atol=1e-7)
