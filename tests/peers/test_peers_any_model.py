"""Ordinary models. torchjd differentiates with vmap unless told otherwise and joins all gradients to one dense matrix;
PCGrad and conflictfree join them to vectors. Each of these rules out some models."""

import pytest
import torch
from conflictfree.grad_operator import ConFIGOperator
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchjd.aggregation import IMTLG, MGDA, AlignedMTL, CAGrad, ConFIG, PCGrad, UPGrad
from torchjd.autojac import mtl_backward

from gradbalance import MarbleOptimizer
from tests.peers.calls import bisector, conflictfree, cosine, flat, gradients, marble, pcgrad, torchjd

pytestmark = pytest.mark.slow

torch.manual_seed(0)
X = torch.randn(8, 4)
ONE_BY_ONE = {"parallel_chunk_size": 1}


def losses_of(y):
    """Two losses that reach all that y does."""
    return [y.square().mean(), (y - torch.tensor([1.0, -3.0])).square().mean()]


def mlp(*middle):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 2))


def assert_balanced(losses, parameters, rtol=1e-4):
    """gradbalance's gradient is the bisector."""
    expected = bisector(losses, parameters)
    for p in parameters:
        p.grad = None
    marble(losses, parameters)
    torch.testing.assert_close(gradients(parameters), expected, rtol=rtol, atol=rtol * expected.abs().max().item())


def test_frozen_parameters():
    model = mlp(nn.Tanh())
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match="Some `jac` fields were not populated"):
        torchjd(MGDA())(losses_of(model(X)), model.parameters())
    with pytest.raises(RuntimeError, match="does not require grad"):
        torchjd(MGDA(), inputs=model.parameters())(losses_of(model(X)), model.parameters())

    marble(losses_of(model(X)), list(model.parameters()))
    assert model[0].weight.grad is None
    assert_balanced(losses_of(model(X)), list(model[2].parameters()))


def test_unused_parameters_stay_none_and_unmoved_by_weight_decay():
    model, unused = mlp(nn.Tanh()), nn.Linear(3, 3)
    parameters = [*model.parameters(), *unused.parameters()]
    with pytest.raises(ValueError, match="Some `jac` fields were not populated"):
        torchjd(MGDA())(losses_of(model(X)), parameters)
    for p in parameters:
        vars(p).pop("jac", None)  # zero_grad does not clear what the failed call left
    torchjd(MGDA(), inputs=parameters)(losses_of(model(X)), parameters)
    assert unused.weight.grad.count_nonzero() == 0  # not None, so the optimizer decays it

    inner = torch.optim.AdamW(parameters, weight_decay=0.1)
    optimizer, before = MarbleOptimizer(inner), unused.weight.clone()
    optimizer.zero_grad()
    optimizer.backward(losses_of(model(X)))
    optimizer.step()
    assert unused.weight.grad is None
    assert torch.equal(unused.weight, before)


def test_conflictfree_decays_frozen_parameters():
    """None is not one of its gradients: with heads it needs "zero", and then frozen parameters get zeros too."""
    model = mlp(nn.Tanh())
    model[0].requires_grad_(False)
    conflictfree(losses_of(model(X)), model, none_grad_mode="zero")
    before = model[0].weight.clone()
    torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1).step()
    assert not torch.equal(model[0].weight, before)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(3, 1)

    def losses(self):
        features = self.trunk(X)
        return [self.a(features).square().mean(), (self.b(features) - 1).square().mean()]


def test_conflictfree_takes_two_heads_for_one():
    """By default it leaves None out: both heads' gradients lie in the same places, and the first head gets nothing."""
    model = Heads()
    conflictfree(model.losses(), model)
    assert model.a.weight.grad is None

    model.zero_grad()
    plain = torch.autograd.grad(model.losses()[0], model.a.weight)[0]
    marble(model.losses(), list(model.parameters()))
    torch.testing.assert_close(model.a.weight.grad, plain)


BF16 = [
    (CAGrad(c=0.5), NotImplementedError, "not implemented for 'BFloat16'"),
    (AlignedMTL(), NotImplementedError, "not implemented for 'BFloat16'"),
    (ConFIG(), RuntimeError, "linalg.pinv"),
    (IMTLG(), RuntimeError, "linalg.pinv"),
]


@pytest.mark.parametrize(("aggregator", "error", "message"), BF16)
def test_torchjd_crashes_on_bf16_parameters(aggregator, error, message):
    model = mlp(nn.Tanh()).bfloat16()
    with pytest.raises(error, match=message):
        torchjd(aggregator)(losses_of(model(X.bfloat16()).float()), list(model.parameters()))


def test_torchjd_upgrad_crashes_on_bf16_parameters():
    model = mlp(nn.Tanh()).bfloat16()
    with pytest.raises(TypeError, match="unsupported ScalarType BFloat16"):
        torchjd(UPGrad())(losses_of(model(X.bfloat16()).float()), list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_conflictfree_knows_float32_only(dtype):
    """For three losses or more; its form for two takes any dtype."""
    with pytest.raises(RuntimeError, match="Expected input and other to have the same dtype"):
        ConFIGOperator().calculate_gradient(torch.randn(3, 10, dtype=dtype))


def test_gradbalance_takes_bf16_parameters():
    model = mlp(nn.Tanh()).bfloat16()
    assert_balanced(losses_of(model(X.bfloat16()).float()), list(model.parameters()), rtol=1e-2)


def test_parameters_of_two_dtypes():
    first, second = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 2)
    parameters = [*first.parameters(), *second.parameters()]
    with pytest.raises(RuntimeError, match="assign a gradient with dtype 'float'"):
        pcgrad(losses_of(second(first(X.bfloat16()).float())), parameters)
    assert_balanced(losses_of(second(first(X.bfloat16()).float())), parameters, rtol=1e-2)


def test_sparse_embeddings():
    model = nn.Sequential(nn.Embedding(10, 2, sparse=True))
    parameters, words = list(model.parameters()), torch.arange(5)
    with pytest.raises(RuntimeError, match="not implemented for sparse tensors"):
        torchjd(MGDA(), **ONE_BY_ONE)(losses_of(model(words)), parameters)
    with pytest.raises(RuntimeError, match="not implemented for sparse tensors"):
        pcgrad(losses_of(model(words)), parameters)
    with pytest.raises(NotImplementedError, match="'SparseCPU' backend"):
        conflictfree(losses_of(model(words)), model)
    assert_balanced(losses_of(model(words)), parameters)
    assert parameters[0].grad.is_sparse


def complex_losses(w):
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(2, 6, dtype=torch.complex64, generator=generator)
    return [(target * w).real.sum() for target in targets]


@pytest.mark.parametrize("aggregator", [MGDA(), CAGrad(c=0.5), AlignedMTL(), PCGrad()])
def test_torchjd_crashes_on_complex_parameters(aggregator):
    w = nn.Parameter(torch.zeros(6, dtype=torch.complex64))
    with pytest.raises((RuntimeError, NotImplementedError), match=r"[cC]omplex"):
        torchjd(aggregator, **ONE_BY_ONE)(complex_losses(w), [w])


def test_complex_parameters():
    """ConFIG is to have one cosine with all gradients. In both libraries it runs against an objective: they multiply
    complex numbers where the inner product of the real and imaginary parts is meant."""
    model = nn.Module()
    model.w = w = nn.Parameter(torch.zeros(6, dtype=torch.complex64))
    rows = [flat(torch.autograd.grad(loss, w)) for loss in complex_losses(w)]

    with pytest.raises(NotImplementedError, match="clamp is not supported for complex types"):
        pcgrad(complex_losses(w), [w])
    w.grad = None
    torchjd(ConFIG(), **ONE_BY_ONE)(complex_losses(w), [w])
    assert [cosine(gradients([w]), row) for row in rows] == pytest.approx([-0.109, -0.464], abs=1e-3)
    conflictfree(complex_losses(w), model)
    assert [cosine(gradients([w]), row) for row in rows] == pytest.approx([-0.073, 0.818], abs=1e-3)

    assert_balanced(complex_losses(w), [w])
    assert [cosine(gradients([w]), row) for row in rows] == pytest.approx([0.631, 0.631], abs=1e-3)


def assert_torchjd_needs_one_by_one(losses, parameters, message):
    """vmap, the default, fails; K passes one after the other work."""
    with pytest.raises(RuntimeError, match=message):
        torchjd(MGDA())(losses(), parameters)
    torchjd(MGDA(), **ONE_BY_ONE)(losses(), parameters)


def test_compiled_models():
    model = mlp(nn.Tanh())
    compiled, parameters = torch.compile(model, backend="aot_eager"), list(model.parameters())
    assert_torchjd_needs_one_by_one(lambda: losses_of(compiled(X)), parameters, "compiled backward function")
    assert_balanced(losses_of(compiled(X)), parameters)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_autocast(norm):
    model = mlp(norm(8), nn.Tanh())
    parameters = list(model.parameters())

    def losses():
        with torch.autocast("cpu", torch.bfloat16):
            return losses_of(model(X).float())

    assert_torchjd_needs_one_by_one(losses, parameters, "expected scalar type BFloat16 but found Float")
    assert_balanced(losses(), parameters)


class Guarded(torch.autograd.Function):
    """A backward with a branch on data, as extensions have them."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad if grad.abs().max().item() < 1e9 else grad.clamp(-1e9, 1e9)


def test_a_backward_that_looks_at_its_data():
    linear = nn.Linear(4, 2)
    parameters = list(linear.parameters())
    assert_torchjd_needs_one_by_one(lambda: losses_of(Guarded.apply(linear(X))), parameters, "vmap over calling")
    assert_balanced(losses_of(Guarded.apply(linear(X))), parameters)


def test_reentrant_activation_checkpointing():
    model = mlp(nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def output():
        return model[4](checkpoint(model[2:4], model[1](model[0](X)), use_reentrant=True))

    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        torchjd(MGDA(), **ONE_BY_ONE)(losses_of(output()), list(model.parameters()))

    expected = bisector(losses_of(model(X)), list(model.parameters()))  # the same without checkpointing
    marble(losses_of(output()), list(model.parameters()))
    torch.testing.assert_close(gradients(model.parameters()), expected, rtol=1e-4, atol=1e-6)


def test_tied_weights():
    """An embedding that is the output layer too: torchjd's mtl_backward wants trunk and heads apart."""
    embedding, middle, value = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 1)
    words = torch.arange(5)

    def losses():
        features = middle(embedding(words))
        logits = features @ embedding.weight.T
        return [nn.functional.cross_entropy(logits, words), value(features).square().mean()], features

    given, features = losses()
    with pytest.raises(ValueError, match="no tensor in common with `shared_params`"):
        mtl_backward(given, features=features)

    given, _ = losses()
    trunk = [embedding.weight, *middle.parameters()]
    expected = bisector(given, trunk)
    marble(given, [*trunk, *value.parameters()])
    torch.testing.assert_close(gradients(trunk), expected, rtol=1e-4, atol=1e-6)
