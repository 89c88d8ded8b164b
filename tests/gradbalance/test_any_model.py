"""Every kind of model and training loop gets the gradient that plain autograd gives, combined by hand."""

import copy
import math
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.optim import LBFGS, SGD, AdamW, SparseAdam
from torch.utils.checkpoint import checkpoint

from gradbalance import MarbleOptimizer, NonFiniteError
from gradbalance.state import KEY
from tests.gradbalance import by_hand
from tests.gradbalance.identical import identical
from tests.gradbalance.model_zoo import ZOO, Heads, Image, SparseWords, Trunk, build
from tests.gradbalance.models import LinearLosses, OneTrunk, TwoHeads, batches, flat_gradient


@pytest.fixture(autouse=True)
def checked_sparse_tensors():
    """Torch warns where it is not said whether sparse tensors are to be checked."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


def parameters_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(model, optimizer, data, losses=None):
    """Steps of one batch each; the report of the last."""
    for x in data:
        optimizer.zero_grad()
        report = optimizer.backward((losses or model.losses)(x))
        optimizer.step()
    return report


# --- The zoo: refresh, amortised step, and both with accumulated micro-batches ----------------------------------------


@pytest.mark.parametrize("micro", [1, 2], ids=["one batch", "accumulated"])
@pytest.mark.parametrize("refresh_every", [1, 2], ids=["exact", "amortised"])
@pytest.mark.parametrize("name", ZOO)
def test_gradient_equals_the_combination_by_hand(name, refresh_every, micro):
    model = build(name)
    parameters = list(model.parameters())
    optimizer = MarbleOptimizer(SGD(parameters, lr=0.01), refresh_every=refresh_every, ema_decay=0.5)
    for t in range(4):
        twin = copy.deepcopy(model)
        optimizer.zero_grad()
        rows = []
        for i, x in enumerate(batches(micro, seed=t)):
            torch.manual_seed(t)  # both forwards draw the same dropout mask
            report = optimizer.backward(model.losses(x.clone()), accumulate=i + 1 < micro)
            torch.manual_seed(t)
            rows.append(by_hand.gradients(twin.parameters(), twin.losses(x.clone())))
        rows = by_hand.add_rows(rows)
        assert report.refreshed is (t % refresh_every == 0)
        if report.refreshed:
            torch.testing.assert_close(report.gramian, by_hand.gramian(rows), rtol=1e-9, atol=1e-12)
        by_hand.assert_gradients(parameters, by_hand.combine(rows, report.coefficients), rtol=1e-9, atol=1e-12)
        optimizer.step()
        for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, theirs)  # one forward: running statistics moved once


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("refresh_every", [1, 3])
def test_batch_norm_counts_each_batch_once(refresh_every, micro):
    model = build("batch norm")
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.01), refresh_every=refresh_every)
    for t in range(6):
        optimizer.zero_grad()
        for i, x in enumerate(batches(micro)):
            optimizer.backward(model.losses(x), accumulate=i + 1 < micro)
        optimizer.step()
        assert model.net[1].num_batches_tracked == (t + 1) * micro


# --- Parameters that no gradient may reach ----------------------------------------------------------------------------


@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize("regularize", [False, True])
def test_weight_decay_moves_only_parameters_that_a_loss_reaches(refresh_every, regularize):
    """One is thawed after five steps, another frozen after six."""
    model = build("frozen, unused and partly reached parameters")
    optimizer = MarbleOptimizer(AdamW(model.parameters(), lr=0.1, weight_decay=0.5), refresh_every=refresh_every)
    for t, x in enumerate(batches(9)):
        model.frozen.requires_grad_(t >= 5)
        model.two.requires_grad_(t < 6)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        optimizer.backward(model.losses(x), regularizer=model.all.square().sum() if regularize else None)
        optimizer.step()
        moving = {"all", "one"} | ({"frozen"} if t >= 5 else set()) | ({"two"} if t < 6 else set())
        for name, p in model.named_parameters():
            assert (p.grad is not None) == (name in moving)
            assert torch.equal(p, before[name]) == (name not in moving)


@pytest.mark.parametrize("refresh_every", [1, 3])
def test_a_head_is_not_decayed_while_its_objective_is_absent(refresh_every):
    model = build("heads")
    optimizer = MarbleOptimizer(AdamW(model.parameters(), lr=0.1, weight_decay=0.5), refresh_every=refresh_every)
    train(model, optimizer, batches(1))
    before = copy.deepcopy(model.heads[1])
    train(model, optimizer, batches(4), lambda x: [*model.losses(x)[:1], None, *model.losses(x)[2:]])
    assert model.heads[1].weight.grad is None
    assert torch.equal(model.heads[1].weight, before.weight)


@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize("nothing", [[None, None, None], {}], ids=["list", "dict"])
def test_a_step_without_any_loss_moves_nothing(refresh_every, nothing):
    model = build("heads")
    optimizer = MarbleOptimizer(
        AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
        refresh_every=refresh_every,
        objective_names=["a", "b", "c"],
    )
    for _ in range(2):  # before any loss was seen, and after
        before, coefficients = parameters_of(model), optimizer.coefficients
        report = train(model, optimizer, [None], lambda x: nothing)
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(parameters_of(model), before)
        assert torch.equal(optimizer.coefficients, coefficients)
        assert report.absent == ["a", "b", "c"]
        train(model, optimizer, batches(1))


# --- Sparse gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh_every", [1, 3])
def test_sparse_adam_steps_as_it_does_by_itself(refresh_every):
    """SparseAdam takes no dense gradient, and moves only the rows that were looked up."""
    torch.manual_seed(0)
    one = SparseWords().double()
    two = copy.deepcopy(one)
    optimizer = MarbleOptimizer(SparseAdam(one.embedding.parameters(), lr=0.1), refresh_every=refresh_every)
    plain = SparseAdam(two.embedding.parameters(), lr=0.1)
    for x in batches(5, size=1):
        report = train(one, optimizer, [x])
        assert one.embedding.weight.grad.is_sparse
        plain.zero_grad()
        sum(c * loss for c, loss in zip(report.coefficients, two.losses(x), strict=True)).backward()
        plain.step()
        torch.testing.assert_close(one.embedding.weight, two.embedding.weight)
    assert one.mix.weight.grad is None


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["sparse embedding", "sparse and dense", "complex", "heads"])
def test_gradients_are_added_to_what_is_there(name, set_to_none):
    model = build(name)
    twin = copy.deepcopy(model)
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.0), refresh_every=2)
    train(model, optimizer, batches(1, seed=9))
    for t, (x, before) in enumerate(zip(batches(3), batches(3, seed=5), strict=True)):
        optimizer.zero_grad(set_to_none=set_to_none)
        sum(model.losses(before)).backward()
        report = optimizer.backward(model.losses(x))
        assert report.refreshed is (t == 1)
        there = by_hand.gradients(twin.parameters(), [sum(twin.losses(before))])
        balanced = by_hand.combine(by_hand.gradients(twin.parameters(), twin.losses(x)), report.coefficients)
        expected = [g for (g,) in zip(*by_hand.add_rows([there, [balanced]]), strict=True)]
        by_hand.assert_gradients(model.parameters(), expected, rtol=1e-9, atol=1e-12)
        optimizer.step()


# --- Activation checkpointing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 2], ids=["one batch", "accumulated"])
@pytest.mark.parametrize("refresh_every", [1, 2], ids=["exact", "amortised"])
@pytest.mark.parametrize("name", ["checkpointed", "checkpointed, reentrant"])
def test_checkpointing_trains_as_without(name, refresh_every, micro):
    """Dropout inside the checkpoint: each of the K passes has to replay the one mask of the forward."""
    model = build(name)
    plain = copy.deepcopy(model)
    plain.run = lambda trunk, x: trunk(x)
    optimizers = [MarbleOptimizer(SGD(m.parameters(), lr=0.01), refresh_every=refresh_every) for m in (model, plain)]
    for t in range(4):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            torch.manual_seed(t)
            optimizer.zero_grad()
            for i, x in enumerate(batches(micro, seed=t)):
                optimizer.backward(m.losses(x), accumulate=i + 1 < micro)
            optimizer.step()
    torch.testing.assert_close(parameters_of(model), parameters_of(plain), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(optimizers[0].coefficients, optimizers[1].coefficients, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("reentrant", [False, True])
def test_stacked_losses_of_checkpointed_models_know_their_heads(reentrant):
    models = [TwoHeads(), TwoHeads()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [MarbleOptimizer(SGD(m.parameters(), lr=0.01), refresh_every=2) for m in models]

    def losses_of(model, x, run):
        features = run(model.trunk, x)
        return [10.0 ** (k - 1) * (head(features) - k).square().mean() for k, head in enumerate(model.heads)]

    for x in batches(4):
        x.requires_grad_()
        train(models[0], optimizers[0], [x], lambda x: losses_of(models[0], x, lambda trunk, x: trunk(x)))
        run = partial(checkpoint, use_reentrant=reentrant)
        train(models[1], optimizers[1], [x], lambda x, run=run: torch.stack(losses_of(models[1], x, run)))
        torch.testing.assert_close(flat_gradient(models[1].parameters()), flat_gradient(models[0].parameters()))


def test_checkpointing_that_is_switched_on_between_refreshes():
    """Every graph is looked at, not only those of refreshes."""
    layer = nn.Linear(4, 2).double()
    plain = copy.deepcopy(layer)
    optimizers = [MarbleOptimizer(SGD(m.parameters(), lr=0.1), refresh_every=3) for m in (layer, plain)]
    for step, x in enumerate(batches(3)):
        for module, optimizer in zip((layer, plain), optimizers, strict=True):
            run = module if step == 0 or module is plain else partial(checkpoint, module, use_reentrant=True)
            train(module, optimizer, [x.requires_grad_()], lambda x, run=run: list((run(x) - 1).square().mean(0)))
        torch.testing.assert_close(flat_gradient(layer.parameters()), flat_gradient(plain.parameters()))


@pytest.mark.parametrize("name", ["heads", "checkpointed", "checkpointed, reentrant"])
def test_only_the_optimizers_own_parameters_keep_a_gradient(name):
    model = build(name)
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.01), refresh_every=2)
    for x in batches(4):
        x.requires_grad_()
        train(model, optimizer, [x], lambda x: [scale * loss for loss in model.losses(x)])
        assert scale.grad is None
        assert x.grad is None
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed, reentrant"])
def test_another_optimizers_parameter_inside_a_checkpoint_keeps_its_gradient(name):
    """Such as a generator's while its discriminator trains. A reentrant checkpoint hides it from the graph."""
    model = build(name)
    theirs = model.trunk[0].weight
    theirs.grad = torch.full_like(theirs, 7.0)
    optimizer = MarbleOptimizer(SGD([p for p in model.parameters() if p is not theirs], lr=0.01), refresh_every=2)
    for x in batches(4):
        train(model, optimizer, [x])
        assert theirs.grad.unique().tolist() == [7.0]


# --- torch.compile ----------------------------------------------------------------------------------------------------


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


# --- Closures and LBFGS -----------------------------------------------------------------------------------------------


LINE_SEARCHES = [None, "strong_wolfe"]


def lbfgs(parameters, line_search=None, **options):
    return MarbleOptimizer(LBFGS(parameters, lr=0.5, max_iter=6, line_search_fn=line_search), **options)


@pytest.mark.parametrize("line_search", LINE_SEARCHES)
@pytest.mark.parametrize("refresh_every", [1, 2])
def test_lbfgs_minimises_the_weighted_sum_that_its_first_evaluation_chose(line_search, refresh_every):
    """The same as torch's LBFGS on Σ λ_k L_k with this λ as constants."""
    torch.manual_seed(0)
    model = OneTrunk()
    plain = copy.deepcopy(model)
    optimizer = lbfgs(model.parameters(), line_search, refresh_every=refresh_every)
    inner = LBFGS(plain.parameters(), lr=0.5, max_iter=6, line_search_fn=line_search)
    for x in batches(3):
        returned = optimizer.step(lambda x=x: model.losses(x))
        coefficients = optimizer.coefficients

        def closure(x=x, coefficients=coefficients):
            inner.zero_grad()
            loss = sum(c * loss for c, loss in zip(coefficients, plain.losses(x), strict=True))
            loss.backward()
            return loss

        torch.testing.assert_close(torch.as_tensor(returned), torch.as_tensor(inner.step(closure)))
        torch.testing.assert_close(parameters_of(model), parameters_of(plain), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("returned", [list, sum], ids=["returns the losses", "returns their sum"])
@pytest.mark.parametrize(
    "inner", [lambda p: SGD(p, lr=0.05), lambda p: LBFGS(p, lr=0.5, max_iter=6)], ids=["sgd", "lbfgs"]
)
@pytest.mark.parametrize("model", [OneTrunk, TwoHeads])
def test_a_closure_in_torchs_habit_calls_backward_itself(model, inner, returned):
    """``zero_grad``, ``backward``, ``return``: no second backward, and the steps of a closure that returns losses."""
    torch.manual_seed(0)
    one = model()
    two = copy.deepcopy(one)
    first = MarbleOptimizer(inner(one.parameters()), refresh_every=2)
    second = MarbleOptimizer(inner(two.parameters()), refresh_every=2)
    for x in batches(3):

        def closure(x=x):
            second.zero_grad()
            losses = two.losses(x)
            second.backward(losses)
            return returned(losses)

        first.step(lambda x=x: one.losses(x))
        second.step(closure)
        torch.testing.assert_close(parameters_of(one), parameters_of(two))
        assert torch.equal(first.coefficients, second.coefficients)
    assert second.param_groups[0][KEY]["step"] == 3


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("line_search", LINE_SEARCHES)
@pytest.mark.parametrize("step", [0, 1])
def test_a_nan_at_a_later_evaluation_of_lbfgs_undoes_the_step(line_search, nonfinite, step):
    torch.manual_seed(0)
    model = OneTrunk()
    optimizer = lbfgs(model.parameters(), line_search, nonfinite=nonfinite, objective_names=["a", "b", "c"])
    data, evaluations = batches(step + 2), 0
    for x in data[:step]:
        optimizer.step(lambda x=x: model.losses(x))
    parameters, before = parameters_of(model), copy.deepcopy(optimizer.state_dict())

    def closure():
        nonlocal evaluations
        evaluations += 1
        a, b, c = model.losses(data[step])
        return [a, b * (math.nan if evaluations == 3 else 1.0), c]

    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match="'b'"):
            optimizer.step(closure)
    else:
        optimizer.step(closure)
    assert evaluations >= 3
    assert torch.equal(parameters_of(model), parameters)
    assert identical(optimizer.state_dict(), before)
    optimizer.step(lambda: model.losses(data[-1]))  # and training goes on
    assert parameters_of(model).isfinite().all()
    assert not torch.equal(parameters_of(model), parameters)


# --- Around the step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize("name", ["heads", "sparse and dense", "complex", "batch norm"])
def test_zero_grad_trains_alike_both_ways(name, refresh_every):
    results = []
    for set_to_none in (True, False):
        model = build(name)
        optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.05), refresh_every=refresh_every)
        for x in batches(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.backward(model.losses(x))
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        for p in model.parameters():
            assert p.grad is None if set_to_none else not p.grad.to_dense().any()
        results.append(torch.cat([torch.view_as_real(p.detach() + 0j).flatten() for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-15)


def clip_norm(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 0.01)


def clip_value(parameters):
    torch.nn.utils.clip_grad_value_(parameters, 0.001)


@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize("clip", [clip_norm, clip_value])
def test_the_step_uses_the_clipped_gradient_and_clipping_leaves_no_trace_in_the_coefficients(clip, refresh_every):
    model = build("heads")
    plain, unclipped = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = MarbleOptimizer(AdamW(model.parameters(), lr=0.05), refresh_every=refresh_every)
    other = MarbleOptimizer(AdamW(unclipped.parameters(), lr=0.0, weight_decay=0.0), refresh_every=refresh_every)
    inner = AdamW(plain.parameters(), lr=0.05)
    for x in batches(4):
        unclipped.load_state_dict(model.state_dict())
        report = train(unclipped, other, [x])
        rows = by_hand.gradients(plain.parameters(), plain.losses(x))
        for p, gradient in zip(plain.parameters(), by_hand.combine(rows, report.coefficients), strict=True):
            p.grad = gradient
        clip(plain.parameters())
        inner.step()
        optimizer.zero_grad()
        optimizer.backward(model.losses(x))
        clip(model.parameters())
        optimizer.step()
        torch.testing.assert_close(parameters_of(model), parameters_of(plain))
        torch.testing.assert_close(optimizer.coefficients, other.coefficients)


def test_a_model_without_balanced_parameters_gets_the_plain_gradients():
    """Every parameter is some loss's own: there is nothing to balance, and nothing to freeze."""
    problem = [LinearLosses([[1.0, 2.0]]), LinearLosses([[3.0, 4.0]])]
    optimizer = MarbleOptimizer(SGD([p.x for p in problem], lr=0.1), refresh_every=2)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward([p.losses()[0] for p in problem])
        optimizer.step()
        assert [p.x.grad.tolist() for p in problem] == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_is_not_trivial(name):
    """Every model has balanced parameters and losses whose gradients differ in size and direction."""
    model = build(name)
    gramian = by_hand.gramian(by_hand.gradients(model.parameters(), model.losses(batches(1)[0])))
    norms = gramian.diagonal().sqrt()
    assert norms.min() > 0
    assert norms.max() / norms.min() > 1.5
    assert (gramian / norms.outer(norms) - torch.eye(3)).max() < 0.99
