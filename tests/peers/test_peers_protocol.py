"""The protocol of a training script: accumulation, skipped steps, a GradScaler, copies, checkpoints and heads."""

import copy
import io
import pickle

import pytest
import torch
from pytorch_optimizer import PCGrad
from torchjd import aggregation
from torchjd.aggregation import IMTLG, CAGrad, CRMOGMWeighting, FairGrad, Mean, MGDAWeighting
from torchjd.autojac import backward, jac_to_grad

from gradbalance import BalancedOptimizer, MarbleOptimizer
from tests.gradbalance.models import LinearLosses, OneTrunk, TwoHeads, batches
from tests.peers.calls import conflictfree, gradients, pcgrad, torchjd

pytestmark = pytest.mark.slow


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def build(wrapper, model=OneTrunk, **options):
    torch.manual_seed(0)
    model = model(count=2, dtype=torch.float32)
    return model, wrapper(sgd(model.parameters()), **options)


X, Y = batches(2, dtype=torch.float32)


def test_micro_batches_add_up():
    """PCGrad and conflictfree clear ``.grad`` on the way, so that only the last micro-batch counts."""
    model, optimizer = build(PCGrad)
    for x in (X, Y):
        optimizer.pc_backward(model.losses(x))
    both = gradients(model.parameters())
    optimizer.zero_grad()
    optimizer.pc_backward(model.losses(Y))
    assert torch.equal(gradients(model.parameters()), both)

    for x in (X, Y):
        conflictfree(model.losses(x), model)
    both = gradients(model.parameters())
    conflictfree(model.losses(Y), model)
    assert torch.equal(gradients(model.parameters()), both)

    model, optimizer = build(BalancedOptimizer, balancer="weighted_sum")
    optimizer.backward(model.losses(X), accumulate=True)
    optimizer.backward(model.losses(Y))
    losses = [a + b for a, b in zip(model.losses(X), model.losses(Y), strict=True)]
    plain = torch.autograd.grad(sum(losses), list(model.parameters()))
    torch.testing.assert_close(gradients(model.parameters()), torch.cat([g.double().reshape(-1) for g in plain]))


def test_zero_grad_drops_the_step():
    """torchjd's Jacobians survive zero_grad: a batch that was given up adds to the next."""
    model, _ = build(PCGrad)
    parameters = list(model.parameters())
    torchjd(Mean())(model.losses(Y), parameters)
    expected = gradients(parameters)
    model.zero_grad()
    backward(model.losses(X))
    model.zero_grad()
    backward(model.losses(Y))
    jac_to_grad(parameters, Mean())
    assert (gradients(parameters) - expected).norm() > 0.1 * expected.norm()

    model, optimizer = build(BalancedOptimizer, balancer="weighted_sum")
    optimizer.backward(model.losses(Y))
    expected = gradients(model.parameters())
    optimizer.zero_grad()
    optimizer.backward(model.losses(X), accumulate=True)
    optimizer.zero_grad()
    optimizer.backward(model.losses(Y))
    assert torch.equal(gradients(model.parameters()), expected)


def test_the_graph_is_freed():
    """PCGrad retains it after the last loss too: its memory is held as long as a loss is, for logging say."""
    model, _ = build(PCGrad)
    losses = model.losses(X)
    pcgrad(losses, list(model.parameters()))
    losses[0].backward()

    model, optimizer = build(MarbleOptimizer)
    losses = model.losses(X)
    optimizer.backward(losses)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses[0].backward()


def conflicting_heads():
    """Heads that start alike and losses that want opposite things of them."""
    torch.manual_seed(0)
    model = TwoHeads(count=2, dtype=torch.float32)
    model.heads[1].load_state_dict(model.heads[0].state_dict())
    features = model.trunk(X)
    return model, [model.heads[0](features).mean(), -2 * model.heads[1](features).mean()]


def test_heads_get_their_own_gradient():
    def head_ratio(call):
        """The first head's gradient relative to that of a plain backward."""
        model, losses = conflicting_heads()
        plain = torch.autograd.grad(losses[0], model.heads[0].weight, retain_graph=True)[0]
        call(losses, list(model.parameters()))
        return (model.heads[0].weight.grad / plain).mean().item()

    assert head_ratio(pcgrad) == pytest.approx(1.711, abs=1e-3)
    assert head_ratio(torchjd(Mean())) == pytest.approx(0.5)  # autojac.backward; mtl_backward keeps heads apart
    assert head_ratio(lambda losses, parameters: MarbleOptimizer(sgd(parameters)).backward(losses)) == pytest.approx(1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies(copied):
    """PCGrad's own attributes are lost, the inner optimizer among them."""
    with pytest.raises(AttributeError, match="'PCGrad' object has no attribute 'optimizer'"):
        copied(build(PCGrad))[1].zero_grad()

    pairs = build(MarbleOptimizer), copied(build(MarbleOptimizer))
    for model, optimizer in pairs:
        optimizer.backward(model.losses(X))
        optimizer.step()
    (model, _), (other, _) = pairs
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


GRAMIANS = [g @ g.T for g in torch.randn(6, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: CRMOGMWeighting(MGDAWeighting()), "_lambda"),
        (aggregation.GradVac, "_phi_t"),
        (aggregation.PCD, "_sq_norm_ema"),
        (aggregation.ExcessMTL, "_sq_grad_sum"),
    ],
)
def test_torchjds_averages_do_not_load_into_a_fresh_object(make, key):
    """Their buffers do not exist before the first call; ``strict=False`` then drops them without a word."""
    trained, fresh = make(), make()
    for gramian in GRAMIANS[:3]:
        trained(gramian)
    with pytest.raises(RuntimeError, match=f"Unexpected key.*{key}"):
        fresh.load_state_dict(trained.state_dict())


def test_resuming_an_average():
    trained, fresh = CRMOGMWeighting(MGDAWeighting()), CRMOGMWeighting(MGDAWeighting())
    for gramian in GRAMIANS[:3]:
        trained(gramian)
    fresh.load_state_dict(trained.state_dict(), strict=False)
    assert (trained(GRAMIANS[3]) - fresh(GRAMIANS[3])).abs().max() > 0.05

    def train(optimizer, problem, gramians):
        for rows in gramians:
            optimizer.backward(list(rows @ problem.x))
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.coefficients

    problem = LinearLosses(torch.zeros(2, 2))
    optimizer = MarbleOptimizer(sgd([problem.x]), ema_decay=0.9)
    train(optimizer, problem, GRAMIANS[:3])
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    resumed = MarbleOptimizer(sgd([problem.x]), ema_decay=0.9)
    buffer.seek(0)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(train(resumed, problem, GRAMIANS[3:]), train(optimizer, problem, GRAMIANS[3:]))


@pytest.mark.parametrize("aggregator", [CAGrad(c=0.5), IMTLG(), FairGrad(alpha=1.0)])
def test_a_grad_scalers_overflow_crashes_torchjd(aggregator):
    """The scaler finds its scale by overflowing now and then: the step must be skipped and the scale halved."""

    def overflow(model, backward, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        one, other = model.losses(X)
        backward([scaler.scale(one), scaler.scale(other) * float("inf")])
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    model, optimizer = build(MarbleOptimizer, nonfinite="skip")
    before = [p.clone() for p in model.parameters()]
    with pytest.raises((torch.linalg.LinAlgError, ValueError), match="finite"):
        overflow(model, lambda losses: torchjd(aggregator)(losses, list(model.parameters())), optimizer.inner)

    optimizer.zero_grad()
    assert overflow(model, optimizer.backward, optimizer) == 512
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
