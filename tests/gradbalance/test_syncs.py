"""How often the host waits for the device: never on an amortised backward, once on a refresh.

A GPU works through a queue; whatever brings a number to the host empties it. The pretend accelerator counts that.
"""

import pytest
import torch

from gradbalance import AffineLoss, BalancedOptimizer, MarbleOptimizer, NonFiniteError, estimators
from gradbalance.balancers import available
from tests.gradbalance.accelerator import DEVICE, Accelerator
from tests.gradbalance.balancers.catalogue import EVERY
from tests.gradbalance.models import OneTrunk, TwoHeads, batches

K = 3
EXTRAS = 4  # "and a few numbers": what may travel with the K or K×K numbers, for each of K


@pytest.fixture
def device():
    with Accelerator() as accelerator:
        yield accelerator


def inputs(count):
    return [x.to(DEVICE) for x in batches(count)]


def build(model=OneTrunk, refreshed=True, **options):
    """A model on the device; with ``refreshed`` the next step is amortised."""
    torch.manual_seed(0)
    model = model().to(DEVICE)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = MarbleOptimizer(inner, objective_names=["a", "b", "c"], **{"refresh_every": 100, **options})
    if refreshed:
        optimizer.backward(model.losses(inputs(1)[0]))
        optimizer.step()
    return model, optimizer


def penalty(model):
    return sum(p.square().sum() for p in model.parameters())


def as_list(model, x):
    return model.losses(x)


def as_dict(model, x):
    return dict(zip("abc", model.losses(x), strict=True))


def as_tensor(model, x):
    return torch.stack(model.losses(x))


def as_affine(model, x):
    y = (model.net(x) - 1).square()
    return AffineLoss(y, torch.eye(K, dtype=y.dtype).unsqueeze(1).expand(K, *y.shape) / len(y))


def with_one_absent(model, x):
    return {**as_dict(model, x), "b": None}


LOSSES = [as_list, as_dict, as_tensor, as_affine, with_one_absent]


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.cpu(),
        lambda t: t.to("cpu", torch.float64),
        lambda t: t.tolist(),
        lambda t: t[0].item(),
        lambda t: float(t[0]),
        lambda t: int(t[0]),
        lambda t: bool(t[0]),
        lambda t: t[0] if t.sum() > 0 else t[1],
        lambda t: torch.equal(t, t),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: torch.empty(3).copy_(t),
    ],
    ids=["cpu", "to", "tolist", "item", "float", "int", "bool", "if", "equal", "nonzero", "mask", "copy_"],
)
def test_the_accelerator_counts_every_way_to_the_host(device, read):
    t = torch.ones(3).to(DEVICE)
    read(t)
    assert len(device.reads) == 1


def test_the_accelerator_counts_nothing_else(device):
    t = torch.ones(3).to(DEVICE)
    (t[torch.tensor([0, 1]).to(DEVICE)] + t.new_tensor([1.0, 2.0]) * torch.tensor(2.0, device=DEVICE)).sum()
    torch.ones(3).tolist()
    assert device.reads == []
    with pytest.raises(RuntimeError, match="numpy"):
        t.numpy()


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("regularize", [False, True])
@pytest.mark.parametrize("losses", LOSSES)
def test_an_amortised_backward_reads_nothing_and_its_step_the_losses(device, losses, regularize, nonfinite):
    model, optimizer = build(nonfinite=nonfinite)
    (x,) = inputs(1)
    device.reads.clear()
    given, regularizer = losses(model, x), penalty(model) if regularize else None
    report = optimizer.backward(given, regularizer=regularizer)
    assert not report.refreshed
    assert device.reads == []
    optimizer.step()
    assert len(device.reads) == 1
    assert device.reads[0] <= (2 * K if losses is as_affine else K) + EXTRAS  # which of its rows are 0 is on the device


@pytest.mark.parametrize("regularize", [False, True])
def test_amortised_micro_batches_share_one_read(device, regularize):
    model, optimizer = build()
    data = inputs(3)
    device.reads.clear()
    for i, x in enumerate(data):
        optimizer.backward(
            as_dict(model, x), regularizer=penalty(model) if regularize else None, accumulate=i + 1 < len(data)
        )
    assert device.reads == []
    optimizer.step()
    assert len(device.reads) == 1
    assert device.reads[0] <= K + EXTRAS


@pytest.mark.parametrize("regularize", [False, True])
@pytest.mark.parametrize("losses", LOSSES)
def test_a_refresh_reads_once(device, losses, regularize):
    model, optimizer = build(refresh_every=1)
    (x,) = inputs(1)
    device.reads.clear()
    report = optimizer.backward(losses(model, x), regularizer=penalty(model) if regularize else None)
    assert report.refreshed
    assert len(device.reads) == 1
    assert device.reads[0] <= K * (K + EXTRAS)
    optimizer.step()
    assert len(device.reads) == 1


@pytest.mark.parametrize("name", available())
def test_a_refresh_reads_once_with_every_balancer(device, name):
    model, _ = build()
    optimizer = BalancedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), EVERY[name].make(K))
    device.reads.clear()
    optimizer.backward(as_list(model, inputs(1)[0]))
    optimizer.step()
    assert len(device.reads) == 1


@pytest.mark.parametrize("name", estimators.available())
def test_a_refresh_reads_once_with_every_estimator(device, name):
    model, optimizer = build(refreshed=False, refresh_every=1, gramian_estimator=name)
    for _ in range(2):
        data = inputs(3)
        optimizer.zero_grad()
        device.reads.clear()
        for i, x in enumerate(data):
            optimizer.backward(as_dict(model, x), accumulate=i + 1 < len(data))
        optimizer.step()
        assert len(device.reads) == 1
        blocks = 1 if name == "plain" else 2
        assert device.reads[0] <= blocks * K * (blocks * K + EXTRAS)


def test_a_refresh_with_heads_reads_once(device):
    model, optimizer = build(TwoHeads, refreshed=False)
    device.reads.clear()
    optimizer.backward(as_dict(model, inputs(1)[0]))
    optimizer.step()
    assert len(device.reads) == 1


@pytest.mark.parametrize("regularize", [False, True])
def test_a_refresh_over_micro_batches_reads_once_at_its_end(device, regularize):
    model, optimizer = build(refresh_every=1)
    data = inputs(3)
    device.reads.clear()
    for i, x in enumerate(data):
        assert device.reads == []
        optimizer.backward(
            as_dict(model, x), regularizer=penalty(model) if regularize else None, accumulate=i + 1 < len(data)
        )
    assert len(device.reads) == 1
    optimizer.step()
    assert len(device.reads) == 1


def test_micro_batches_after_the_measured_ones_are_read_with_the_step(device):
    model, optimizer = build(refresh_every=1, refresh_micro_batches=1)
    first, *others = inputs(3)
    device.reads.clear()
    optimizer.backward(as_dict(model, first), accumulate=True)
    assert len(device.reads) == 1
    for i, x in enumerate(others):
        optimizer.backward(as_dict(model, x), accumulate=i == 0)
    assert len(device.reads) == 1
    optimizer.step()
    assert len(device.reads) == 2
    assert device.reads[1] <= K + EXTRAS


@pytest.mark.parametrize("refresh_every", [1, 100])
def test_a_step_with_a_closure_reads_once(device, refresh_every):
    model, optimizer = build(refresh_every=refresh_every)
    (x,) = inputs(1)
    device.reads.clear()
    optimizer.step(lambda: as_dict(model, x))
    assert len(device.reads) == 1


@pytest.mark.parametrize("refresh_every", [1, 100])
def test_a_report_reads_when_its_losses_are_read(device, refresh_every):
    model, optimizer = build(refresh_every=refresh_every)
    report = optimizer.backward(as_dict(model, inputs(1)[0]))
    device.reads.clear()
    # Everything but the losses came with the refresh.
    _ = report.names, report.refreshed, report.absent, report.skipped, report.inactive
    _ = report.coefficients, report.weights, report.gramian, report.gradient_norms, report.cosines
    _ = report.update_cosines, report.min_cosine, report.conflicts, optimizer.coefficients, repr(report)
    assert device.reads == []
    first = report.losses
    assert torch.equal(report.losses, first)
    assert len(device.reads) <= 1


def test_saving_and_loading_the_balancing_state_reads_nothing(device):
    _, optimizer = build()
    device.reads.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert device.reads == []


@pytest.mark.parametrize("amortised", [False, True])
def test_affine_coefficients_on_the_device_are_checked_with_the_step(device, amortised):
    model, optimizer = build(refresh_every=100 if amortised else 1)
    coefficients = torch.ones(K, 5, K).to(DEVICE)
    coefficients[1, 0, 0] = torch.nan
    device.reads.clear()
    affine = AffineLoss(model.net(inputs(1)[0]).square(), coefficients)
    assert device.reads == []

    def step():
        optimizer.backward(affine)
        optimizer.step()

    with pytest.raises(NonFiniteError, match="'b'"):
        step()


@pytest.mark.parametrize("losses", LOSSES)
def test_the_accelerator_changes_no_number(losses):
    """What is counted above is the training that a CPU does."""

    def run(device):
        torch.manual_seed(0)
        model = OneTrunk().to(device)
        optimizer = MarbleOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), refresh_every=2, objective_names=["a", "b", "c"]
        )
        for x in batches(4):
            optimizer.zero_grad()
            optimizer.backward(losses(model, x.to(device)), regularizer=penalty(model))
            optimizer.step()
        return torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])

    with Accelerator():
        on_device = run(DEVICE)
    assert torch.equal(on_device, run("cpu"))
