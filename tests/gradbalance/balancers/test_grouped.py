"""Groups: what the inner balancer is shown, how its answer is spread, and members that come and go."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from gradbalance import BalancedOptimizer
from gradbalance.balancers import MGDA, Balancer, GradVac, Grouped, Marble, MoDo, PCGrad, WeightedSum
from tests.gradbalance.gradient_zoo import gramian, zoo

GROUPS = [[0, 1], [2], [3, 4, 5]]


class _Seen(Balancer):
    """Remembers what it is shown."""

    def weights(self, gramian, losses=None, signal=None):
        self.gramian, self.losses, self.signal = gramian, losses, signal
        return torch.arange(1.0, len(gramian) + 1, dtype=torch.float64)


def _means(gradients, groups=GROUPS):
    return np.stack([gradients[members].mean(axis=0) for members in groups])


@pytest.fixture
def gradients():
    return np.random.default_rng(0).standard_normal((6, 10))


def test_the_inner_balancer_sees_the_groups(gradients):
    balancer = Grouped(_Seen(), GROUPS)
    found = balancer.coefficients(gramian(gradients), torch.arange(6.0), gramian(2 * gradients))
    means = _means(gradients)
    torch.testing.assert_close(balancer.balancer.gramian, gramian(means))
    torch.testing.assert_close(balancer.balancer.signal, gramian(2 * means))
    assert balancer.balancer.losses.tolist() == [0.5, 2.0, 4.0]
    np.testing.assert_allclose(found, [1 / 2, 1 / 2, 2, 3 / 3, 3 / 3, 3 / 3])


@pytest.mark.parametrize(
    "inner", [Marble(), MGDA(), MGDA("loss+"), PCGrad(), GradVac(), MoDo(), WeightedSum([1, 2, 3])]
)
def test_the_update_is_the_inner_balancers_on_the_mean_gradients(gradients, inner):
    losses = torch.arange(1.0, 7.0)
    mean_losses = torch.tensor([1.5, 3.0, 5.0])
    alone = copy.deepcopy(inner)
    grouped = Grouped(inner, GROUPS)
    for _ in range(2):
        found = grouped.coefficients(gramian(gradients), losses).numpy() @ gradients
        expected = alone.coefficients(gramian(_means(gradients)), mean_losses).numpy() @ _means(gradients)
        np.testing.assert_allclose(found, expected)


@settings(max_examples=30, deadline=None)
@given(zoo(min_k=6, max_k=6, spread=2))
def test_groups_of_one_are_the_inner_balancer(gradients):
    m = gramian(gradients)
    torch.testing.assert_close(Grouped("marble", [[k] for k in range(6)]).coefficients(m), Marble().coefficients(m))


def test_ten_copies_count_as_one():
    gradients = np.array([[1.0, 0.0]] * 10 + [[0.0, 1.0]])
    found = Grouped("marble", [list(range(10)), [10]]).coefficients(gramian(gradients))
    np.testing.assert_allclose(found.numpy() @ gradients, [0.5, 0.5])


def test_weights_on_the_simplex_are_spread_with_the_same_sum(gradients):
    balancer = Grouped("marble", GROUPS)
    weights = balancer.weights(gramian(gradients))
    assert balancer.simplex
    assert weights.sum() == pytest.approx(1)
    assert weights[3] == weights[4] == weights[5]


def test_averaged_weights_are_gathered_before_scaling(gradients):
    """Marble's scale of the groups' α."""
    m = gramian(gradients)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.1, 0.2], dtype=torch.float64)
    of_groups = Marble().scale(torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64), gramian(_means(gradients)))
    expected = of_groups[[0, 0, 1, 2, 2, 2]] / torch.tensor([2, 2, 1, 3, 3, 3])
    torch.testing.assert_close(Grouped("marble", GROUPS).scale(weights, m), expected)


@pytest.mark.parametrize("loss", [math.nan, 1.0])
def test_a_member_without_gradient_leaves_the_mean(gradients, loss):
    """Whether it is absent or its gradient is zero."""
    gradients[4] = 0
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0, loss, 6.0])
    balancer = Grouped(_Seen(), GROUPS)
    found = balancer.coefficients(gramian(gradients), losses)
    torch.testing.assert_close(balancer.balancer.gramian, gramian(_means(gradients, [[0, 1], [2], [3, 5]])))
    assert balancer.balancer.losses.tolist() == [1.5, 3.0, 5.0]
    np.testing.assert_allclose(found, [1 / 2, 1 / 2, 2, 3 / 2, 0, 3 / 2])


def test_a_group_with_no_one_left_is_absent(gradients):
    gradients[:2] = 0
    losses = torch.tensor([math.nan, math.nan, 3.0, 4.0, 5.0, 6.0])
    balancer = Grouped(_Seen(), GROUPS)
    found = balancer.weights(gramian(gradients), losses)
    assert balancer.balancer.gramian[0].tolist() == [0.0, 0.0, 0.0]
    assert balancer.balancer.losses.isnan().tolist() == [True, False, False]
    assert found[:2].tolist() == [0.0, 0.0]


def test_a_group_that_is_there_without_gradient_has_a_loss(gradients):
    gradients[:2] = 0
    balancer = Grouped(_Seen(), GROUPS)
    balancer.weights(gramian(gradients), torch.tensor([math.nan, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert balancer.balancer.losses.tolist() == [2.0, 3.0, 5.0]


def test_fixed_weights_need_no_gradients():
    balancer = Grouped(WeightedSum([2.0, 4.0]), [[0, 1], [2]])
    assert not balancer.uses_gradients
    assert balancer.coefficients(torch.zeros(3, 3)).tolist() == [1.0, 1.0, 4.0]


def test_the_state_is_the_inner_balancers():
    balancer = Grouped(PCGrad(), [[0], [1, 2]])
    balancer.coefficients(torch.eye(3))
    assert balancer.state_dict() == {"balancer.calls": 1}


@pytest.mark.parametrize("groups", [[[0, 1], [1, 2]], [[0], [2]], [[1], [2]], [[0], [-1]], [[0, 0], [1]]])
def test_groups_that_are_no_partition(groups):
    with pytest.raises(ValueError, match=r"groups must hold each of the objectives 0 … K − 1 exactly once, got \[\["):
        Grouped("marble", groups)


@pytest.mark.parametrize("groups", [[], [[]], [[0], []]])
def test_empty_groups(groups):
    with pytest.raises(ValueError, match=r"groups must each hold an objective, got \["):
        Grouped("marble", groups)


@pytest.mark.parametrize("groups", [3, [0, 1], [["a"], ["b"]], [[0.0], [1.0]], [[True], [False]]])
def test_groups_of_something_else(groups):
    with pytest.raises(TypeError, match=r"groups must be lists of objectives such as \[\[0, 1\], \[2\]\], got"):
        Grouped("marble", groups)


def test_groups_of_another_number_of_objectives():
    with pytest.raises(ValueError, match="groups are of 3 objectives, but there are 4"):
        Grouped("marble", [[0, 1], [2]]).coefficients(torch.eye(4))


@pytest.mark.parametrize(("inner", "part"), [("uniform", 0.5), ("marble", 0.5), ("nash_mtl", 1.0)])
def test_members_that_take_turns_count_as_one_group(inner, part):
    """All nine members at first, then one at a time: the group's pull on its parameter is that of the other group."""
    parameter = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    groups = Grouped(inner, [list(range(9)), [9]])
    optimizer = BalancedOptimizer(torch.optim.SGD([parameter], lr=0.0), groups)
    for step in range(12):
        here = [parameter[0] + 0 * parameter[1] if step == 0 or k == step % 9 else None for k in range(9)]
        optimizer.zero_grad()
        optimizer.backward([*here, parameter[1] + 0 * parameter[0]])
        optimizer.step()
        assert parameter.grad[0].item() == pytest.approx(parameter.grad[1].item())
    if inner == "nash_mtl":
        assert parameter.grad[0].item() == pytest.approx(part)


def test_a_member_absent_from_the_refresh_is_followed_when_it_is_back():
    parameter = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = BalancedOptimizer(
        torch.optim.SGD([parameter], lr=0.0), Grouped("uniform", [[0, 1], [2]]), refresh_every=10
    )
    for step in range(12):
        losses = [parameter.sum() for _ in range(3)]
        if step == 10:
            losses[1] = None
        optimizer.zero_grad()
        optimizer.backward(losses)
        optimizer.step()
    assert optimizer.coefficients.tolist() == pytest.approx([0.25, 0.25, 0.5])
