"""Walks through graphs, and the two ways of a reverse pass."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradbalance.passes import accumulate_pass, reverse_pass, walk


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
