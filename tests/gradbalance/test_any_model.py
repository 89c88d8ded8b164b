"""Every kind of model and training loop gets the gradient that plain autograd gives, combined by hand."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, SparseAdam
from torch.utils.checkpoint import checkpoint

from gradbalance import MarbleOptimizer
from tests.gradbalance import by_hand
from tests.gradbalance.model_zoo import ZOO, SparseWords, build
from tests.gradbalance.models import LinearLosses, TwoHeads, batches, flat_gradient, parameters_of, train


@pytest.fixture(autouse=True)
def checked_sparse_tensors():
    """Torch warns where it is not said whether sparse tensors are to be checked."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


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
