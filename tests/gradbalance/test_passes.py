"""Walks through graphs, and the two ways of a reverse pass."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradbalance.passes import accumulate_pass, reverse_pass, stacked, walk


def layers():
    torch.manual_seed(0)
    return nn.Linear(3, 4), nn.Linear(4, 2)


def ids(tensors):
    return {id(tensor) for tensor in tensors}


def test_a_walk_finds_every_leaf_once():
    first, second = layers()
    x = torch.randn(5, 3, requires_grad=True)
    y = second(torch.tanh(first(x)))
    graph = walk([y.sum(), (y * y).sum(), first.weight])
    assert ids(graph.leaves) == ids([x, *first.parameters(), *second.parameters()])
    assert len(graph.leaves) == 5
    assert not graph.reentrant
    assert graph.compiled == []


def test_a_walk_of_nothing():
    assert walk([]).leaves == []
    assert walk([torch.zeros(2)]).leaves == []


@pytest.mark.parametrize("as_method", [False, True])
def test_a_walk_sees_reentrant_checkpoints_and_the_module_inside(as_method):
    first, second = layers()
    x = torch.randn(5, 3, requires_grad=True)
    y = second(checkpoint(first.forward if as_method else first, x, use_reentrant=True))
    graph = walk([y.sum()])
    assert graph.reentrant
    assert ids(graph.leaves) == ids([x, *first.parameters(), *second.parameters()])
    assert not walk([second(checkpoint(first, x, use_reentrant=False)).sum()]).reentrant


def test_a_walk_finds_compiled_parts():
    first, second = layers()
    y = second(torch.compile(first, backend="aot_eager")(torch.randn(5, 3)))
    assert [node.name() for node in walk([y.sum()]).compiled] == ["CompiledFunctionBackward"]


def held(parameters):
    for p in parameters:
        p.grad = torch.full_like(p, 7.0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_whole_reverse_pass_equals_the_other_and_changes_no_grad(reentrant):
    first, second = layers()
    parameters = [*first.parameters(), second.weight]
    x = torch.randn(5, 3, requires_grad=True)
    run = partial(checkpoint, first, use_reentrant=True) if reentrant else first
    held([*parameters, second.bias, x])
    y = second(first(x)).square().sum()
    expected = reverse_pass([y], [torch.tensor(2.0)], parameters, retain_graph=False)
    y = second(run(x)).square().sum()
    found = reverse_pass([y], [torch.tensor(2.0)], parameters, retain_graph=False, whole=True)
    torch.testing.assert_close(found, expected)
    for leaf in (*parameters, second.bias, x):
        assert leaf.grad.unique().tolist() == [7.0]


@pytest.mark.parametrize("whole", [False, True])
def test_an_accumulating_pass_adds_to_its_parameters_and_to_nothing_else(whole):
    first, second = layers()
    chosen, others = list(first.parameters()), list(second.parameters())
    y = second(first(torch.randn(5, 3))).square().sum()
    expected = torch.autograd.grad(y, chosen, retain_graph=True)
    held([*chosen, *others])
    accumulate_pass([y], [torch.tensor(1.0)], chosen, retain_graph=False, whole_but=others if whole else None)
    torch.testing.assert_close([p.grad - 7.0 for p in chosen], list(expected))
    assert all(p.grad.unique().tolist() == [7.0] for p in others)


def test_the_grads_are_put_back_when_a_whole_pass_fails():
    first, _ = layers()
    held(first.parameters())
    y = first(torch.randn(5, 3)).square().sum()
    y.backward(retain_graph=False)
    held(first.parameters())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        reverse_pass([y], [torch.tensor(1.0)], list(first.parameters()), retain_graph=False, whole=True)
    assert all(p.grad.unique().tolist() == [7.0] for p in first.parameters())


class Hiding(torch.autograd.Function):
    """Runs a module whose parameters the graph does not show, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        return helper(ctx, grad), None


def helper(ctx, grad):
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        y = ctx.module(x)
    torch.autograd.backward(y, grad)
    return x.grad


def test_a_backward_inside_a_function_is_not_lost_nor_left_in_grad():
    first, second = layers()
    third = nn.Linear(3, 3)
    parameters = [*third.parameters(), *first.parameters(), *second.parameters()]
    x = torch.randn(5, 3)
    expected = torch.autograd.grad(second(first(third(x))).square().sum(), parameters)
    held(parameters)
    y = second(Hiding.apply(third(x), first)).square().sum()
    found = reverse_pass([y], [torch.tensor(1.0)], parameters, retain_graph=False)
    torch.testing.assert_close(found, list(expected))
    assert all(p.grad.unique().tolist() == [7.0] for p in parameters)


def test_a_function_whose_backward_says_backward_counts_as_reentrant():
    class Open(Hiding):
        @staticmethod
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                ctx.module(x).backward(grad)
            return x.grad, None

    first, _ = layers()
    x = torch.randn(5, 3, requires_grad=True)
    assert walk([Open.apply(x, first).sum()]).reentrant
    assert not walk([Hiding.apply(x, first).sum()]).reentrant


def test_stacked_losses_know_their_leaves():
    first, second = layers()
    x = torch.randn(5, 3)
    a, b = first(x).square().mean(), second(torch.tanh(first(x))).abs().mean()
    own = ids(first.parameters())
    for losses in (
        torch.stack([a, b]),
        torch.stack([a, b]) / 3 + 1,
        torch.cat([a.reshape(1), b.reshape(1)]).double(),
    ):
        assert stacked(losses) == [own, own | ids(second.parameters())]
    assert stacked(torch.stack([a, torch.tensor(1.0)])) == [own, set()]
    assert stacked(first(x).mean(0)) is None
    assert stacked(torch.stack([a, b])[[1, 0]]) is None
    assert stacked(torch.zeros(2)) is None
