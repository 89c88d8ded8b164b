import pytest
import torch

from gradbalance import BalancedOptimizer, MarbleOptimizer
from gradbalance.balancers import CommonPart, Grouped, Marble
from integrations.diffusion_nft.balancing import Method
from integrations.diffusion_nft.config import Config, UserError

GRAMIAN = torch.tensor([[1.0, 0.2], [0.2, 4.0]], dtype=torch.float64)


def method(config, **changes) -> Method:
    values = config.model_dump()
    for key, value in changes.items():
        values[key] = {**values[key], **value} if key in ("balance", "loss") else value
    return Method(Config.model_validate(values))


def balancer_of(config, **changes):
    return method(config, **changes).optimizer([torch.nn.Parameter(torch.zeros(2))]).balancer


def test_a_preference_by_name(config):
    by_name = balancer_of(config, balance={"options": {"preference": {"darkness": 3}}})
    assert by_name.preference == Marble([1, 3]).preference
    assert torch.equal(by_name.coefficients(GRAMIAN), Marble([1, 3]).coefficients(GRAMIAN))


def test_floor_and_ceiling_by_name(config):
    gramian = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    options = {"floor": {"darkness": 0.7}}
    assert balancer_of(config, balance={"options": options}).weights(gramian).tolist() == pytest.approx([0.3, 0.7])
    options = {"ceiling": {"darkness": 0.2}, "floor": {"redness": 0.1}}
    assert balancer_of(config, balance={"options": options}).weights(gramian).tolist() == pytest.approx([0.8, 0.2])
    options = {"floor": 0.4, "ceiling": {"redness": 0.45}}  # one for all, and one by name
    assert balancer_of(config, balance={"options": options}).weights(gramian).tolist() == pytest.approx([0.45, 0.55])


def test_groups_by_name_and_the_rest_alone(config):
    rewards = {"rewards": ["a", "b", "c", "d"]}
    built = balancer_of(config, **rewards, reward_groups=[["d", "b"]])
    assert isinstance(built, Grouped)
    assert built.groups == [[3, 1], [0], [2]]
    gramian = torch.eye(4, dtype=torch.float64)
    expected = Grouped("marble", [[3, 1], [0], [2]]).coefficients(gramian)
    assert torch.equal(built.coefficients(gramian), expected)


def test_with_groups_options_by_name_are_the_groups(config):
    rewards = {"rewards": ["a", "b", "c"], "reward_groups": [["a", "b"]]}
    built = balancer_of(config, **rewards, balance={"options": {"preference": {"b": 2, "c": 4}}})
    assert built.balancer.preference == Marble([2, 4]).preference
    with pytest.raises(UserError, match=r"preference: a, b are one group and can have one value only, got \[1, 2\]"):
        method(config, **rewards, balance={"options": {"preference": {"a": 1, "b": 2}}})


def test_a_wrapped_marble_is_averaged_as_marble_is(config):
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    wrapped = method(config, reward_groups=[["redness", "darkness"]]).optimizer(parameters)
    assert type(wrapped) is BalancedOptimizer
    assert wrapped.ema_decay == MarbleOptimizer(torch.optim.SGD(parameters)).ema_decay


def test_signal_gradients_add_an_objective_without_a_reward(config):
    built = method(config, loss={"signal_gradients": True})
    assert built.names == ["redness", "darkness", "common"]
    assert isinstance(built.optimizer([torch.nn.Parameter(torch.zeros(2))]).balancer, CommonPart)
    rewards = torch.tensor([[1.0, 2.0, 4.0], [0.1, 0.5, float("nan")]], dtype=torch.float64)
    advantages = built.advantages(rewards, torch.zeros(3, dtype=torch.long))
    assert advantages[2].tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(
        advantages[:2].nan_to_num(7), method(config).advantages(rewards, torch.zeros(3).long()).nan_to_num(7)
    )


def test_uniform_after_reaches_the_optimizer(config):
    optimizer = method(config, balance={"uniform_after": 5}).optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert optimizer.uniform_after == 5


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"balance": {"options": {"preference": {"darknes": 2}}}}, ["options.preference", "'darkness'?"]),
        ({"balance": {"options": {"preference": {"darkness": -1}}}}, ["preference", "number > 0"]),
        ({"balance": {"options": {"preference": {"darkness": "much"}}}}, ["preference", "much"]),
        ({"balance": {"options": {"floor": {"darkness": "much"}}}}, ["numbers", "much"]),
        (
            {"balance": {"options": {"floor": {"darkness": 0.7}, "ceiling": {"darkness": 0.5}}}},
            ["constraint that no α can meet"],
        ),
        ({"balance": {"options": {"floor": {"darkness": 0.7, "redness": 0.7}}}}, ["floor", "2 rewards"]),
        ({"method": "mgda", "balance": {"options": {"floor": {"darkness": 0.7}}}}, ["floor by name", "not mgda"]),
        ({"method": "mgda", "balance": {"options": {"preference": {"darkness": 2}}}}, ["no option 'preference'"]),
        ({"caps": {"blueness": 1.0}}, ["caps names 'blueness'"]),
        ({"reward_groups": [["redness", "darknes"]]}, ["reward_groups names 'darknes'", "'darkness'?"]),
        ({"reward_groups": [["redness"], ["redness", "darkness"]]}, ["'redness' more than once"]),
        ({"method": "mgda", "balance": {"uniform_after": 3}}, ["uniform_after", "MGDA"]),
        (
            {"balance": {"uniform_after": 3, "options": {"preference": {"darkness": 2}}}},
            ["uniform_after and preference exclude"],
        ),
        ({"method": "weighted_sum", "caps": {"redness": 1.0}}, ["caps is a lever", "weighted_sum"]),
        ({"method": "weighted_sum", "reward_dropout": 0.1}, ["reward_dropout is a lever"]),
        ({"method": "weighted_sum", "reward_groups": [["redness"]]}, ["reward_groups is a lever"]),
        ({"method": "weighted_sum", "loss": {"signal_gradients": True}}, ["signal_gradients is a lever"]),
        ({"method": "weighted_sum", "balance": {"uniform_after": 0}}, ["uniform_after is a lever"]),
    ],
)
def test_wrong_levers_are_named_in_one_line(config, changes, parts):
    with pytest.raises(UserError) as caught:
        method(config, **changes)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts), caught.value
