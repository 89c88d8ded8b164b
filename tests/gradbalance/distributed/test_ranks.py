"""Regularizers, closures, compiled and unused parts, HSDP, checkpoints and subgroups, on two ranks."""

import copy
import io
import pickle

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from gradbalance import AffineLoss, MarbleOptimizer
from gradbalance.dtensor import copies
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


def assert_like_one_process(two_ranks, run, wrap, **arguments):
    """The same bits on both ranks, and what ``run`` does in a single process."""
    first, second = two_ranks.run(run, wrap=wrap, **arguments)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, run(None, **arguments), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("run", [regularized, affine])
def test_ranks_equal_one_process(two_ranks, wrap, run):
    assert_like_one_process(two_ranks, run, wrap)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, plain])
def test_closures_see_the_same_objective_on_all_ranks(two_ranks, wrap):
    assert_like_one_process(two_ranks, closure_steps, wrap)


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


def a_head_without_its_objective(rank, wrap=plain):
    """The second objective is absent on every rank for some steps: AdamW must not move its head then."""
    model = wrap(Model("heads"))
    optimizer = MarbleOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5), refresh_every=2)
    for step in range(6):
        optimizer.zero_grad()
        losses = mean([model(batch(2 * step + r, 5)) for r in parts(rank)])
        optimizer.backward([losses[0], losses[1] if step in (0, 5) else None, losses[2]])
        optimizer.step()
    return [full(p.detach()) for p in model.parameters()], optimizer.coefficients


def a_late_penalty(rank, wrap=plain):
    """On an amortised step the first micro-batch reaches only one head; the second has a penalty on the other."""
    model = wrap(Model("heads"))
    head = model.module.inner.heads[1] if hasattr(model, "module") else model.inner.heads[1]
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), refresh_every=10)
    for step in range(2):
        optimizer.zero_grad()
        for i in range(2):
            losses = mean([model(batch(4 * step + 2 * i + r, 5)) for r in parts(rank)])
            losses[1] = losses[1] if step == 0 else None
            penalty = head.weight.square().sum() if i == 1 else None
            optimizer.backward(losses, regularizer=penalty, accumulate=i == 0)
        optimizer.step()
    return [full(p.detach()) for p in model.parameters()], optimizer.coefficients


@pytest.mark.parametrize("wrap", [DistributedDataParallel, plain])
def test_a_penalty_on_a_head_whose_objective_is_absent(two_ranks, wrap):
    assert_like_one_process(two_ranks, a_late_penalty, wrap)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, shard, plain])
def test_a_head_whose_objective_is_absent_everywhere_stays_where_it_is(two_ranks, wrap):
    assert_like_one_process(two_ranks, a_head_without_its_objective, wrap)


class Mixed(nn.Module):
    """Layers that can be distributed in different ways."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.up, self.norm, self.down = nn.Linear(4, 6).double(), nn.LayerNorm(6).double(), nn.Linear(6, 2).double()

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


def some_plain(model):
    """FSDP2 with a layer left out: plain parameters beside DTensors."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=set(model.norm.parameters()))


def tensor_parallel(model):
    """Two ranks compute one batch together; the norm's parameters are plain."""
    plan = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def shards_of_shards(model):
    """FSDP2 over tensor parallelism, on a 2-D mesh."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
    return fully_shard(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["data"])


def mixed(rank, wrap=plain, alike=False):
    model = wrap(Mixed())
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), refresh_every=2)
    for step in range(4):
        optimizer.zero_grad()
        losses = mean([list(model(batch(2 * step + r, 5)).square().mean(0)) for r in ([0] if alike else parts(rank))])
        optimizer.backward(losses)
        optimizer.step()
    return [full(p.detach()) for p in model.parameters()], optimizer.coefficients


@pytest.mark.parametrize(("wrap", "alike"), [(some_plain, False), (tensor_parallel, True), (shards_of_shards, False)])
def test_plain_parameters_beside_distributed_ones(two_ranks, wrap, alike):
    assert_like_one_process(two_ranks, mixed, wrap, alike=alike)


def copies_of(rank):
    """On how many ranks each number lies, for the placements that FSDP2 and tensor parallelism make."""
    mesh = init_device_mesh("cpu", (2, 1))
    part = torch.zeros(3, 4)
    placements = (Shard(0), Replicate(), _StridedShard(0, split_factor=1))
    return [copies(DTensor.from_local(part, mesh, [p, Shard(1)], run_check=False), ranks=2) for p in placements]


def test_a_strided_shard_counts_as_a_shard(two_ranks):
    """torch gives shards of shards a placement of their own, whose ``is_shard`` says no."""
    assert not _StridedShard(0, split_factor=1).is_shard()
    assert two_ranks.run(copies_of) == [[1, 2, 1], [1, 2, 1]]


def compiled_shards(rank, wrap=plain):
    model = wrap(Model("trunk"))
    run = torch.compile(model, backend="aot_eager")
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), refresh_every=2)
    for step in range(4):
        optimizer.zero_grad()
        optimizer.backward(mean([run(batch(2 * step + r, 5)) for r in parts(rank)]))
        optimizer.step()
    return [full(p.detach()) for p in model.parameters()], optimizer.coefficients


@pytest.mark.parametrize("wrap", [DistributedDataParallel, shard])
def test_compiled_models(two_ranks, wrap):
    assert_like_one_process(two_ranks, compiled_shards, wrap)


def no_sync_with_heads(rank):
    """Amortised micro-batches without gradient sync: fine where one pass serves all, refused where it cannot."""
    answers = []
    for name in ("trunk", "heads"):
        model = shard(Model(name))
        optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), refresh_every=2)
        optimizer.backward(model(batch(rank, 5)))
        optimizer.step()
        optimizer.zero_grad()
        try:
            for i in range(2):
                model.set_requires_gradient_sync(i == 1)
                optimizer.backward(model(batch(10 + 2 * i + rank, 5)), accumulate=i == 0)
            optimizer.step()
            answers.append("stepped")
        except RuntimeError as error:
            answers.append(str(error))
    return answers


def test_no_gradient_sync_on_amortised_micro_batches(two_ranks):
    for trunk, heads in two_ranks.run(no_sync_with_heads):
        assert trunk == "stepped"
        assert "Leave gradient sync on" in heads


def small_gate(rank, wrap_again):
    """A gate frozen when the model was wrapped: DDP does not average it, however small its gradient."""
    model = Model("trunk")
    gate = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
    model.gate = gate
    wrapped = DistributedDataParallel(model)
    gate.requires_grad_()
    wrapped = DistributedDataParallel(model) if wrap_again else wrapped
    optimizer = MarbleOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    try:
        for step in range(2):
            optimizer.zero_grad()
            x = batch(2 * step + rank, 5)
            losses = [loss + 1e-9 * (gate * x[0, k]).sum() for k, loss in enumerate(wrapped(x))]
            optimizer.backward(losses)
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return gate.detach()


def test_a_parameter_that_ddp_does_not_average_is_found(two_ranks):
    for answer in two_ranks.run(small_gate, wrap_again=False):
        assert "was frozen or unfrozen after the model was wrapped" in answer
    first, second = two_ranks.run(small_gate, wrap_again=True)
    assert torch.equal(first, second)


def copied(rank):
    group = dist.new_group([0, 1])
    model = Model("trunk")
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), process_group=group)
    _, twin = copy.deepcopy((model, optimizer))
    stranger = pickle.loads(pickle.dumps(optimizer))
    return twin.process_group is group, stranger.process_group is None


def test_a_copy_keeps_the_process_group_and_a_pickle_cannot(two_ranks):
    assert two_ranks.run(copied) == [(True, True), (True, True)]


def nothing_to_wait_for(rank):
    model = Partly()
    module = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    if rank == 0:
        return None
    with pytest.raises(RuntimeError, match=r"this rank has no loss.*0 \* loss"):
        optimizer.backward([None, None])
    return module is not None


def test_a_rank_without_a_loss_is_told_so(two_ranks):
    assert two_ranks.run(nothing_to_wait_for) == [None, True]
