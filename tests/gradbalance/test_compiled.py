"""Compiled models: the gradient of eager mode, no new graph and no break on amortised steps."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.optim import SGD

from gradbalance import MarbleOptimizer
from tests.gradbalance import by_hand
from tests.gradbalance.model_zoo import Heads, Image, Trunk
from tests.gradbalance.models import OneTrunk, TwoHeads, batches, flat_gradient, parameters_of, train


@pytest.fixture
def fresh_compiler(tmp_path, monkeypatch):
    """Nothing compiled before, in this process or on disk, and torch's own settings."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=True):
        yield
    torch._dynamo.reset()


COMPILED = {"trunk": Trunk, "heads": Heads, "convolution": Image}


def as_compiled(name, backend):
    """A model whose forward is compiled, and the same one in eager mode."""
    torch.manual_seed(0)
    eager = COMPILED[name]().double()
    model = copy.deepcopy(eager)
    return model, torch.compile(model, backend=backend, fullgraph=True), eager


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("refresh_every", [1, 3], ids=["exact", "amortised"])
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own import of inductor
def test_a_compiled_model_trains_as_in_eager_mode(backend, name, refresh_every):
    """The whole model is one node of the graph, and gives zeros, not None, to a head that a loss does not reach."""
    model, compiled, eager = as_compiled(name, backend)
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.01), refresh_every=refresh_every)
    other = MarbleOptimizer(SGD(eager.parameters(), lr=0.01), refresh_every=refresh_every)
    for x in batches(4):
        train(model, optimizer, [x], lambda x: model.losses_of(compiled(x), x))
        train(eager, other, [x])
        torch.testing.assert_close(flat_gradient(model.parameters()), flat_gradient(eager.parameters()))
        torch.testing.assert_close(optimizer.coefficients, other.coefficients)
    torch.testing.assert_close(parameters_of(model), parameters_of(eager))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own import of inductor
def test_a_compiled_run_that_resumes_on_an_amortised_step(backend):
    """Torch compiles a backward for the way it is first used: after one that frees the graph, saved tensors may be
    overwritten ("donated"), and the passes of a later refresh, which need them again, are refused."""
    model, compiled, eager = as_compiled("trunk", backend)
    optimizer, other = (MarbleOptimizer(SGD(m.parameters(), lr=0.01), refresh_every=2) for m in (model, eager))
    train(eager, other, batches(1))
    model.load_state_dict(eager.state_dict())
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    for x in batches(3, seed=1):
        train(model, optimizer, [x], lambda x: model.losses_of(compiled(x), x))
        train(eager, other, [x])
    torch.testing.assert_close(parameters_of(model), parameters_of(eager))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("name", ["trunk", "convolution"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own import of inductor
def test_a_graph_that_a_plain_backward_compiled(backend, name, first):
    """A warm-up without the optimizer lets inductor overwrite what it saved: in the convolution it really does."""
    model, compiled, eager = as_compiled(name, backend)
    (x,) = batches(1)
    if first == "optimizer":
        optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.01))
    sum(model.losses_of(compiled(x), x)).backward()
    if first == "model":
        optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.01))
    optimizer.zero_grad()
    report = optimizer.backward(model.losses_of(compiled(x), x))
    rows = by_hand.gradients(eager.parameters(), eager.losses(x))
    by_hand.assert_gradients(model.parameters(), by_hand.combine(rows, report.coefficients))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["trunk", "convolution"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own import of inductor
def test_compiled_code_that_a_plain_run_left_in_the_cache(name):
    """Inductor's cache on disk does not tell code that overwrites what it saved from code that keeps it."""
    model, compiled, eager = as_compiled(name, "inductor")
    (x,) = batches(1)
    sum(model.losses_of(compiled(x), x)).backward()
    torch._dynamo.reset()  # as in a new process: what was compiled is on disk only
    model, compiled, _ = as_compiled(name, "inductor")
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.01))
    report = optimizer.backward(model.losses_of(compiled(x), x))
    rows = by_hand.gradients(eager.parameters(), eager.losses(x))
    by_hand.assert_gradients(model.parameters(), by_hand.combine(rows, report.coefficients))


@pytest.mark.usefixtures("fresh_compiler")
def test_zeros_of_a_compiled_graph_are_looked_at_twice():
    """A layer that starts at zero hides the trunk from one loss in the first step: the second step sees it."""
    torch.manual_seed(0)
    model = TwoHeads(2)
    nn.init.zeros_(model.heads[1].weight)
    compiled = torch.compile(model.losses, backend="aot_eager")
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.01), refresh_every=10)
    shared = [p for name, p in model.named_parameters() if name.startswith("trunk")]
    for step, x in enumerate(batches(4)):
        rows = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in model.losses(x)]
        optimizer.zero_grad()
        report = optimizer.backward(compiled(x))
        assert report.refreshed is (step < 2)
        # In the first step the trunk is taken for the first loss's own, and gets its gradient.
        weights = report.coefficients if step > 0 else [1.0, 0.0]
        for p, column in zip(shared, zip(*rows, strict=True), strict=True):
            torch.testing.assert_close(p.grad, sum(w * g for w, g in zip(weights, column, strict=True)))
        optimizer.step()
    assert (optimizer.coefficients > 0).all()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_losses_with_accumulated_micro_batches():
    torch.manual_seed(0)
    model, eager = OneTrunk(), OneTrunk()
    eager.load_state_dict(model.state_dict())
    compiled = torch.compile(model.losses, backend="aot_eager", fullgraph=True)
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.05), refresh_every=2)
    other = MarbleOptimizer(SGD(eager.parameters(), lr=0.05), refresh_every=2)
    for t in range(4):
        for opt, losses in ((optimizer, compiled), (other, eager.losses)):
            opt.zero_grad()
            for i, x in enumerate(batches(3, seed=t)):
                opt.backward(losses(x), accumulate=i < 2)
            opt.step()
    torch.testing.assert_close(parameters_of(model), parameters_of(eager))


class CountingBackend:
    """AOT autograd that counts the graphs it compiles and the times they run."""

    def __init__(self):
        self.compiled = {"forward": 0, "backward": 0}
        self.run = {"forward": 0, "backward": 0}
        self.backend = aot_autograd(fw_compiler=self._counting("forward"), bw_compiler=self._counting("backward"))

    def _counting(self, kind):
        def compiler(graph, example_inputs):
            self.compiled[kind] += 1

            def run(*args):
                self.run[kind] += 1
                return graph.forward(*args)

            return make_boxed_func(run)

        return compiler


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "passes"), [("trunk", 1), ("heads", 2)])
def test_amortised_steps_stay_compiled(name, passes):
    """No new graph, no graph break, and one pass each way; heads, whose weights differ, may take a second reverse."""
    counters.clear()
    counting = CountingBackend()
    model, compiled, _ = as_compiled(name, counting.backend)
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.05), refresh_every=4)

    def losses(x):
        return model.losses_of(compiled(x), x)

    train(model, optimizer, batches(2), losses)  # warm-up: a refresh and an amortised step
    graphs, compiled_before = dict(counters["stats"]), dict(counting.compiled)
    assert compiled_before == {"forward": 1, "backward": 1}
    for t, x in enumerate(batches(7), start=2):
        before = dict(counting.run)
        report = train(model, optimizer, [x], losses)
        assert report.refreshed is (t % 4 == 0)
        assert counting.run["forward"] - before["forward"] == 1
        assert counting.run["backward"] - before["backward"] <= (3 if report.refreshed else passes)
    assert dict(counters["stats"]) == graphs
    assert counting.compiled == compiled_before
    assert not counters["graph_break"]
