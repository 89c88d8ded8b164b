"""Regularizers, closures, compiled and unused parts, HSDP, checkpoints and subgroups, on two ranks."""

import io

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradbalance import AffineLoss, MarbleOptimizer
from tests.gradbalance.distributed.training import Model, batch, full


def shard(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def replicated_shards(model):
    """HSDP: replicated over two ranks, sharded over one."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def plain(model):
    return model


WRAPS = [DistributedDataParallel, shard, replicated_shards, plain]


def parts(rank):
    """The ranks whose batches a run sees: its own, or both in the single process."""
    return [0, 1] if rank is None else [rank]


def mean(losses):
    return [sum(column) / len(column) for column in zip(*losses, strict=True)]


def regularized(rank, wrap=plain):
    model = wrap(Model("heads"))
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), refresh_every=2)
    for step in range(4):
        optimizer.zero_grad()
        losses = mean([model(batch(2 * step + r, 5)) for r in parts(rank)])
        optimizer.backward(losses, regularizer=0.3 * losses[0] + 2 * losses[1])
        optimizer.step()
    return [full(p.detach()) for p in model.parameters()], optimizer.coefficients


def affine(rank, wrap=plain):
    """Rewards that apply to some samples only, and on one rank to none."""
    model = wrap(Regression())
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), refresh_every=2)
    for step in range(4):
        optimizer.zero_grad()
        terms, coefficients = [], []
        for r in parts(rank):
            terms.append(model(batch(2 * step + r, 6)).square())
            generator = torch.Generator().manual_seed(50 + 2 * step + r)
            weights = torch.rand(3, 6, 2, generator=generator, dtype=torch.float64)
            weights[2] *= r  # the third objective never applies on rank 0
            coefficients.append(weights / len(parts(rank)))
        optimizer.backward(AffineLoss(torch.cat(terms), torch.cat(coefficients, dim=1)))
        optimizer.step()
    return [full(p.detach()) for p in model.parameters()], optimizer.coefficients


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    def forward(self, x):
        return self.net(x)


def closure_steps(rank, wrap=plain):
    model = wrap(Model("trunk"))
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    optimizer = MarbleOptimizer(inner)
    for step in range(2):
        loss = optimizer.step(lambda step=step: mean([model(batch(2 * step + r, 5)) for r in parts(rank)]))
    return [full(p.detach()) for p in model.parameters()], optimizer.coefficients, loss.detach()


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("run", [regularized, affine])
def test_ranks_equal_one_process(two_ranks, wrap, run):
    first, second = two_ranks.run(run, wrap=wrap)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, run(None), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, plain])
def test_closures_see_the_same_objective_on_all_ranks(two_ranks, wrap):
    first, second = two_ranks.run(closure_steps, wrap=wrap)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, closure_steps(None), rtol=1e-5, atol=1e-12)


class Partly(nn.Module):
    """One layer is in no loss, and one head is not computed where it is not asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.a, self.b, self.never = (nn.Linear(4, 4).double() for _ in range(4))

    def forward(self, x, with_b=True):
        y = torch.tanh(self.trunk(x))
        return [self.a(y).square().mean(), self.b(y).square().mean() if with_b else None]


def partly(rank, find_unused=False, refresh_every=2, wrapped=True):
    model = Partly()
    module = DistributedDataParallel(model, find_unused_parameters=find_unused) if wrapped else model
    inner = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    optimizer = MarbleOptimizer(inner, refresh_every=refresh_every)
    before = model.never.weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        losses = [module(batch(2 * step + r, 5), with_b=r == 0 or step % 2 == 0) for r in parts(rank)]
        losses = [
            sum(here) / len(losses) if (here := [x for x in c if x is not None]) else None
            for c in zip(*losses, strict=True)
        ]
        optimizer.backward(losses)
        optimizer.step()
        assert model.never.weight.grad is None
    assert torch.equal(model.never.weight, before)
    return [p.detach() for p in model.parameters()], optimizer.coefficients


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("refresh_every", [1, 2])
def test_unused_parameters_and_heads_that_one_rank_skips(two_ranks, find_unused, refresh_every):
    first, second = two_ranks.run(partly, find_unused=find_unused, refresh_every=refresh_every)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, partly(None, wrapped=False, refresh_every=refresh_every), rtol=1e-5, atol=1e-12)


def on_its_own(rank):
    """DDP over one rank still waits for every gradient."""
    model = Partly()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    module = DistributedDataParallel(model, process_group=alone)
    optimizer = MarbleOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), refresh_every=2)
    for step in range(4):
        optimizer.zero_grad()
        optimizer.backward(module(batch(step, 5), with_b=step % 2 == 0))
        optimizer.step()
        assert model.never.weight.grad is None
    return [p.detach() for p in model.parameters()]


def test_a_group_of_one(two_ranks):
    first, second = two_ranks.run(on_its_own)
    model = Partly()
    optimizer = MarbleOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), refresh_every=2)
    for step in range(4):
        optimizer.zero_grad()
        optimizer.backward(model(batch(step, 5), with_b=step % 2 == 0))
        optimizer.step()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, [p.detach() for p in model.parameters()], rtol=1e-12, atol=0)


def resumed(rank, stop_at, route):
    """FSDP2 training, saved and loaded into a new model and optimizer in the middle."""

    def build():
        model = shard(Model("heads"))
        return model, MarbleOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), refresh_every=3)

    model, optimizer = build()
    for step in range(6):
        if step == stop_at:
            weights = {name: p.detach().clone() for name, p in model.state_dict().items()}
            saved = get_optimizer_state_dict(model, optimizer) if route == "dcp" else optimizer.state_dict()
            if route == "torch.save":
                file = io.BytesIO()
                torch.save(saved, file)
                file.seek(0)
                saved = torch.load(file, weights_only=False)
            model, optimizer = build()
            model.load_state_dict(weights)
            if route == "dcp":
                set_optimizer_state_dict(model, optimizer, saved)
            else:
                optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        optimizer.backward(model(batch(2 * step + rank, 5)))
        optimizer.step()
    return [full(p.detach()) for p in model.parameters()], optimizer.coefficients


@pytest.mark.parametrize("route", ["dcp", "torch.save"])
@pytest.mark.parametrize("stop_at", [1, 3, 5])
def test_fsdp_resumes_bit_equal(two_ranks, stop_at, route):
    through = two_ranks.run(resumed, stop_at=None, route=route)
    torch.testing.assert_close(two_ranks.run(resumed, stop_at=stop_at, route=route), through, rtol=0, atol=0)


def in_groups(rank, given):
    """Each rank a group of its own: nothing is averaged, and nothing waits."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = Model("trunk")
    optimizer = MarbleOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), process_group=groups[rank] if given else None
    )
    optimizer.backward(model(batch(rank, 5)))
    optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_process_group_says_who_takes_part(two_ranks):
    apart = two_ranks.run(in_groups, given=True)
    together = two_ranks.run(in_groups, given=False)
    for a, b in zip(*together, strict=True):
        assert torch.equal(a, b)
    for rank, parameters in enumerate(apart):
        model = Model("trunk")
        optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        optimizer.backward(model(batch(rank, 5)))
        optimizer.step()
        torch.testing.assert_close(parameters, [p.detach() for p in model.parameters()], rtol=0, atol=0)


def fsdp_mistakes(rank, case):
    model = shard(Model("heads"))
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    model.set_requires_gradient_sync(case != "no sync")
    losses = model(batch(rank, 5))
    if case == "head" and rank == 1:
        losses[2] = None
    with pytest.raises(RuntimeError) as error:
        optimizer.backward(losses)
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "message"), [("head", "pass 0 * loss"), ("no sync", "Leave gradient sync on while gradients are")]
)
def test_fsdp_mistakes_are_explained_on_every_rank(two_ranks, case, message):
    for answer in two_ranks.run(fsdp_mistakes, case=case):
        assert message in answer
