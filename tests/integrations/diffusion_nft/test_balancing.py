import pytest
import torch

from gradbalance import AffineLoss, MarbleOptimizer
from integrations.diffusion_nft.advantages import group_advantages, summed_advantages
from integrations.diffusion_nft.balancing import Method
from integrations.diffusion_nft.config import Config, UserError

NAN = float("nan")


def method(config, **changes) -> Method:
    return Method(Config.model_validate({**config.model_dump(), **changes}))


def quadratic(built: Method, gradients: torch.Tensor):
    """A parameter whose objective k has gradient `gradients[k]`, and the method's optimizer on it."""
    parameter = torch.nn.Parameter(torch.zeros(gradients.shape[1], dtype=torch.float64))
    return parameter, built.optimizer([parameter]), lambda: AffineLoss(parameter.clone(), gradients, names=built.names)


def test_marble_is_the_marble_optimizer_with_one_objective_per_reward(config):
    built = method(config, balance={"ema_decay": 0.5, "refresh_every": 3, "options": {"preference": [1, 2]}})
    optimizer = built.optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer, MarbleOptimizer)
    assert (optimizer.ema_decay, optimizer.refresh_every) == (0.5, 3)
    assert built.names == ["redness", "darkness"]


def test_weighted_sum_steps_along_the_sum_alone_and_measures_the_rewards(config):
    built = method(config, method="weighted_sum", weighted_sum={"measure_every": 2})
    assert built.names == ["redness", "darkness", "weighted_sum"]
    gradients = torch.tensor([[1.0, 0.0], [-1.0, 1.0], [3.0, 4.0]], dtype=torch.float64)
    parameter, optimizer, losses = quadratic(built, gradients)
    optimizer.backward(losses())
    assert parameter.grad.tolist() == [3.0, 4.0]
    record = built.record(optimizer.report)
    assert record["update_cosines"] == pytest.approx({"redness": 0.6, "darkness": 1 / (5 * 2**0.5)})
    assert record["min_cosine"] == pytest.approx(1 / (5 * 2**0.5))
    assert record["conflicts"] == 0
    assert len(record["cosines"]) == 2
    optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(losses())
    assert parameter.grad.tolist() == [3.0, 4.0]
    assert built.record(optimizer.report)["update_cosines"] is None


def test_a_conflict_of_the_weighted_sum_is_counted(config):
    built = method(config, method="weighted_sum")
    _, optimizer, losses = quadratic(built, torch.tensor([[-1.0, 0.0], [1.0, 1.0], [1.0, 0.0]], dtype=torch.float64))
    optimizer.backward(losses())
    record = built.record(optimizer.report)
    assert record["conflicts"] == 1
    assert record["min_cosine"] == pytest.approx(-1)


def test_weighted_sum_advantages_are_those_of_the_raw_sum(config):
    built = method(config, method="weighted_sum", weighted_sum={"weights": [1.0, 10.0]})
    rewards = torch.tensor([[1.0, 2.0, 4.0], [0.1, 0.5, NAN]], dtype=torch.float64)
    groups = torch.zeros(3, dtype=torch.long)
    result = built.advantages(rewards, groups)
    torch.testing.assert_close(result[:2], group_advantages(rewards, groups), equal_nan=True)
    torch.testing.assert_close(result[2:], group_advantages(torch.tensor([[2.0, 7.0, 4.0]]), groups))


def test_gdpo_steps_along_the_sum_of_normalised_rewards(config):
    built = method(config, method="gdpo")
    assert built.names == ["redness", "darkness", "gdpo"]
    rewards = torch.tensor([[1.0, 2.0, 4.0], [100.0, 500.0, NAN]], dtype=torch.float64)
    groups = torch.zeros(3, dtype=torch.long)
    result = built.advantages(rewards, groups)
    each = group_advantages(rewards, groups)
    torch.testing.assert_close(result[:2], each, equal_nan=True)
    torch.testing.assert_close(result[2], summed_advantages(each))
    parameter, optimizer, losses = quadratic(built, torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64))
    optimizer.backward(losses())
    assert parameter.grad.tolist() == [5.0]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"method": "marbel"}, ["unknown method 'marbel'", "'marble'"]),
        ({"balance": {"options": {"preference": [1, 2, 3]}}}, ["preference", "2 rewards"]),
        ({"balance": {"options": {"flor": 0.1}}}, ["flor", "floor"]),
        ({"balance": {"options": {"floor": 0.9}}}, ["floor"]),
        ({"method": "weighted_sum", "weighted_sum": {"weights": [1.0]}}, ["weights=[1.0]", "1 values for 2 rewards"]),
        ({"method": "weighted_sum", "balance": {"options": {"weights": [1, 1]}}}, ["weighted_sum.weights"]),
        ({"method": "gdpo", "balance": {"options": {"weights": [1, 1]}}}, ["gdpo takes none"]),
    ],
)
def test_wrong_methods_are_named_in_one_line(config, changes, parts):
    with pytest.raises(UserError) as caught:
        method(config, **changes)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("name", ["mgda", "pcgrad"])
def test_other_balancers_build_and_step(config, name):
    built = method(config, method=name)
    parameter, optimizer, losses = quadratic(built, torch.eye(2, dtype=torch.float64))
    optimizer.backward(losses())
    assert (parameter.grad > 0).all()


def test_micro_batches_chosen_from_the_noise_need_an_estimator_that_compares_them(config):
    balance = {"refresh_micro_batches": "auto", "gramian_estimator": "split"}
    optimizer = method(config, balance=balance).optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert optimizer.refresh_micro_batches == "auto"
    with pytest.raises(UserError, match='refresh_micro_batches="auto" chooses by comparing micro-batches'):
        method(config, balance={"refresh_micro_batches": "auto"})
    for wrong in ("all", 0, 1.5):
        with pytest.raises(ValueError, match="input should be 'auto' or an integer of at least 1"):
            method(config, balance={"refresh_micro_batches": wrong, "gramian_estimator": "split"})


def test_a_step_of_one_micro_batch_has_nothing_to_compare(config):
    pictures = config.rollout.prompts * config.rollout.images_per_prompt
    one = config.model_copy(update={"loss": config.loss.model_copy(update={"micro_batch": pictures})})
    with pytest.raises(UserError, match=f"loss.micro_batch={pictures} puts all {pictures} pictures of a step into one"):
        method(one, balance={"gramian_estimator": "split"})
    method(one, balance={"gramian_estimator": "history"})
