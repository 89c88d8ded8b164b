"""Mixed precision, any model and host syncs on a CUDA device: `python -m pytest tests/gpu`, a minute on one GPU.

What the CPU tests show with a pretend accelerator is shown here on a real one. Skipped where there is none.
"""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradbalance import AffineLoss, MarbleOptimizer
from tests.gradbalance.identical import identical
from tests.gradbalance.solvers.test_batches import a_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(64, 1) for _ in range(3))

    def forward(self, x, run=lambda trunk, x: trunk(x)):
        features = run(self.trunk, x)
        return [10.0 ** (k - 1) * (head(features) - k).float().square().mean() for k, head in enumerate(self.heads)]


def make(model=None, **options):
    model = (model or Net()).cuda()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, MarbleOptimizer(inner, **{"refresh_every": 3, **options})


def inputs(count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 16, generator=generator).cuda() for _ in range(count)]


def flat(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0).item()


# --- Mixed precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e7])
def test_a_grad_scaler_changes_no_direction(scale):
    plain, scaled = make(), make(nonfinite="skip")
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for x in inputs():
        plain[1].zero_grad()
        plain[1].backward([scale * loss for loss in plain[0](x)])
        scaled[1].zero_grad()
        scaled[1].backward(scaler.scale([scale * loss for loss in scaled[0](x)]))
        scaler.unscale_(scaled[1])
        assert cosine(flat(plain[0]), flat(scaled[0])) > 1 - 1e-6
        plain[1].step()
        scaler.step(scaled[1])
        scaler.update()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    model, optimizer = make()
    twin = copy.deepcopy(model)
    x = inputs(1)[0]
    with torch.autocast("cuda", dtype):
        losses, same = model(x), twin(x)
    report = optimizer.backward(losses)
    rows = [torch.autograd.grad(loss, list(twin.trunk.parameters()), retain_graph=True) for loss in same]
    weights = report.coefficients.tolist()
    expected = [sum(w * g for w, g in zip(weights, column, strict=True)) for column in zip(*rows, strict=True)]
    for p, g in zip(model.trunk.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)


def test_an_overflow_is_skipped_and_leaves_no_trace():
    model, optimizer = make(nonfinite="skip")
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step, x in enumerate(inputs()):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        losses = model(x)
        if step in (3, 4):  # a refresh and an amortised step
            losses[1] = losses[1] * torch.inf
        optimizer.backward(scaler.scale(losses))
        scaler.step(optimizer)
        scaler.update()
        if step in (3, 4):
            assert identical((model.state_dict(), optimizer.state_dict()), before)
    assert scaler.get_scale() == 256.0


# --- Any model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        lambda trunk, x: checkpoint(trunk, x, use_reentrant=False),
        lambda trunk, x: checkpoint(trunk, x.requires_grad_(), use_reentrant=True),
    ],
    ids=["checkpointed", "checkpointed, reentrant"],
)
def test_checkpointing_changes_nothing(run):
    (plain, one), (other, two) = make(), make()
    for x in inputs():
        one.zero_grad()
        one.backward(plain(x))
        one.step()
        two.zero_grad()
        two.backward(other(x, run))
        two.step()
        torch.testing.assert_close(flat(other), flat(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_model_trains_as_in_eager_mode():
    """On a GPU the compiled backward runs in a thread of autograd's own; what it saved must survive K passes."""
    (plain, one), (model, two) = make(), make()
    compiled = torch.compile(model)
    sum(compiled(inputs(1)[0])).backward()  # made for one pass
    for x in inputs():
        one.zero_grad()
        one.backward(plain(x))
        one.step()
        two.zero_grad()
        two.backward(compiled(x))
        two.step()
        torch.testing.assert_close(flat(model), flat(plain), rtol=1e-3, atol=1e-5)


def test_cudnn_lstm_and_sparse_embedding():
    torch.manual_seed(0)
    words, lstm = nn.Embedding(20, 8, sparse=True).cuda(), nn.LSTM(8, 8, batch_first=True).cuda()
    parameters = [*words.parameters(), *lstm.parameters()]
    optimizer = MarbleOptimizer(torch.optim.SGD(parameters, lr=0.1), refresh_every=2)
    for step in range(4):
        optimizer.zero_grad()
        y, _ = lstm(words(torch.randint(0, 20, (4, 5), device="cuda")))
        report = optimizer.backward([y.square().mean(), (y - 1).abs().mean()])
        optimizer.step()
        assert words.weight.grad.is_sparse
        assert report.refreshed is (step % 2 == 0)
    assert all(p.isfinite().all() for p in parameters)


# --- Host syncs -------------------------------------------------------------------------------------------------------


def syncs(function):
    """How often ``function`` makes the host wait, by torch's own count."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def as_affine(model, x):
    terms = torch.stack(model(x)).unsqueeze(1).expand(3, 4)
    coefficients = torch.eye(3, device="cuda").unsqueeze(2).expand(3, 3, 4) / 4
    return AffineLoss(terms, coefficients)


@pytest.mark.parametrize("form", [lambda model, x: model(x), as_affine], ids=["list", "affine"])
def test_amortised_steps_do_not_wait(form):
    model, optimizer = make(refresh_every=100)
    first, *others = inputs()
    optimizer.backward(form(model, first))
    optimizer.step()
    for x in others:
        optimizer.zero_grad()
        losses = form(model, x)
        assert syncs(lambda losses=losses: optimizer.backward(losses, regularizer=model.trunk[0].weight.norm())) == 0
        assert syncs(optimizer.step) == 1


def test_a_refresh_waits_once():
    model, optimizer = make(refresh_every=1)
    for x in inputs():
        optimizer.zero_grad()
        losses = model(x)
        assert syncs(lambda losses=losses: optimizer.backward(losses)) == 1
        assert syncs(optimizer.step) == 0


# --- Capture ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 5, 8])
def test_a_whole_step_with_a_solve_is_captured_in_a_cuda_graph(k):
    """The solve waits for nothing, and replayed on new gradients it gives what eager mode does."""
    gradients, parameter = torch.randn(k, 1000, device="cuda"), torch.randn(1000, device="cuda")
    assert syncs(lambda: a_step(gradients, parameter)) == 0
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # warm-up, as torch asks for
        a_step(gradients, parameter)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moved = a_step(gradients, parameter)
    for seed in range(3):
        gradients.copy_(torch.randn(k, 1000, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.testing.assert_close(moved, a_step(gradients, parameter))
        expected = a_step(gradients.cpu(), parameter.cpu())
        torch.testing.assert_close(moved.cpu(), expected, rtol=1e-4, atol=1e-4)
