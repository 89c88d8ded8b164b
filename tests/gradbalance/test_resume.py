"""Stop and go on: n steps, save, rebuild, n steps are the 2n steps of a run that never stopped, bit for bit."""

import copy
import io
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from gradbalance import BalancedOptimizer, MarbleOptimizer
from gradbalance.balancers import available, get
from gradbalance.state import KEY
from tests.gradbalance.balancers import catalogue
from tests.gradbalance.models import LinearLosses, OneTrunk, TwoHeads, batches, parameters_of
from tests.gradbalance.training import build, everything_of, record_of, train

EVERY = 3  # refresh_every; every phase of it is saved at


def plain_steps(model, optimizer, steps):
    """Three losses in a list, all parameters shared."""
    records = []
    for t in steps:
        optimizer.zero_grad()
        report = optimizer.backward(model.losses(batches(1, seed=t)[0]))
        optimizer.step()
        records.append(record_of(report))
    return records


def rich_steps(model, optimizer, steps):
    """Named losses, heads, a penalty, micro-batches, and objectives that are absent now and then."""
    records = []
    for t in steps:
        data = batches(1 + t % 2, seed=t)
        optimizer.zero_grad()
        for i, x in enumerate(data):
            losses = dict(zip("abc", model.losses(x), strict=True))
            if t % 4 == 1:
                del losses["b"]
            if t % 5 == 3:
                losses["c"] = None
            penalty = 1e-3 * sum(p.square().sum() for p in model.parameters())
            report = optimizer.backward(losses, regularizer=penalty, accumulate=i + 1 < len(data))
        optimizer.step()
        records.append(record_of(report))
    return records


MODES = {"plain": (OneTrunk, plain_steps), "rich": (TwoHeads, rich_steps)}


# --- Routes a checkpoint may take: (model, optimizer) → (fresh model, fresh optimizer) ---------------------------


def through_torch_save(saved, fresh, folder):
    buffer = io.BytesIO()
    torch.save(saved[1].state_dict(), buffer)
    buffer.seek(0)
    fresh[1].load_state_dict(torch.load(buffer, weights_only=True))


def through_dcp_in_memory(saved, fresh, folder, **flags):
    options = StateDictOptions(**flags)
    # torch's load_state_dict keeps the tensors it is given, so a checkpoint in memory is a copy.
    state_dict = copy.deepcopy(get_optimizer_state_dict(*saved, options=options))
    set_optimizer_state_dict(*fresh, state_dict, options=options)


def through_dcp_folder(saved, fresh, folder, **flags):
    options = StateDictOptions(**flags)
    dcp.save(get_optimizer_state_dict(*saved, options=options), checkpoint_id=folder)
    state_dict = get_optimizer_state_dict(*fresh, options=options)
    dcp.load(state_dict, checkpoint_id=folder)
    set_optimizer_state_dict(*fresh, state_dict, options=options)


def through_flat_dcp_in_memory(saved, fresh, folder):
    through_dcp_in_memory(saved, fresh, folder, flatten_optimizer_state_dict=True)


def through_flat_dcp_folder(saved, fresh, folder):
    through_dcp_folder(saved, fresh, folder, flatten_optimizer_state_dict=True)


def through_safetensors(saved, fresh, folder):
    """The tensors are the file's, all else is JSON in its metadata."""
    state_dict, path = saved[1].state_dict(), folder / "optimizer.safetensors"
    tensors = {f"{p}.{name}": value for p, state in state_dict["state"].items() for name, value in state.items()}
    save_file(tensors, path, metadata={"param_groups": json.dumps(state_dict["param_groups"])})

    loaded = {"state": {}}
    with safe_open(path, framework="pt") as file:
        loaded["param_groups"] = json.loads(file.metadata()["param_groups"])
        for key in file.keys():  # noqa: SIM118  a file is no dict
            p, name = key.split(".")
            loaded["state"].setdefault(int(p), {})[name] = file.get_tensor(key)
    fresh[1].load_state_dict(loaded)


ROUTES = [
    through_torch_save,
    through_dcp_in_memory,
    through_flat_dcp_in_memory,
    through_dcp_folder,
    through_flat_dcp_folder,
    through_safetensors,
]
one_process_dcp = pytest.mark.filterwarnings("ignore:torch.distributed is")  # DCP says so when one process saves


def stop_and_go_on(route, folder, mode, stop, more=EVERY + 2, **options):
    """A run that is saved after ``stop`` steps goes on; so does its resumed twin; both must be the same."""
    model_class, steps = MODES[mode]
    saved, fresh = build(model=model_class, **options), build(seed=1, model=model_class, **options)
    steps(*saved, range(stop))
    fresh[0].load_state_dict(saved[0].state_dict())
    route(saved, fresh, folder)
    assert everything_of(*fresh) == everything_of(*saved)
    ahead = range(stop, stop + max(stop, more))
    assert steps(*fresh, ahead) == steps(*saved, ahead)
    assert everything_of(*fresh) == everything_of(*saved)


@one_process_dcp
@pytest.mark.parametrize("stop", range(EVERY + 1))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_at_every_phase(route, mode, stop, tmp_path):
    stop_and_go_on(route, tmp_path, mode, stop, refresh_every=EVERY, ema_decay=0.7)


@pytest.mark.parametrize(
    ("refresh_every", "ema_decay", "stop"),
    [(1, 0.0, 2), (EVERY, 0.0, 2), (EVERY, 0.7, EVERY + 1)],  # Marble's tests stop at every phase
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("balancer", available())
def test_every_balancer_exact_and_amortised(balancer, mode, refresh_every, ema_decay, stop, tmp_path):
    options = {"refresh_every": refresh_every, "ema_decay": ema_decay}
    make = catalogue.EVERY[balancer].make
    stop_and_go_on(through_torch_save, tmp_path, mode, stop, balancer=make, **options)


def by_closure(model, optimizer, steps):
    for t in steps:
        (x,) = batches(1, seed=t)
        optimizer.step(lambda x=x: model.losses(x))


@pytest.mark.parametrize("steps", [plain_steps, by_closure])
@pytest.mark.parametrize(
    "inner",
    [
        lambda p: torch.optim.SGD(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    ],
    ids=["SGD", "momentum", "tensor lr", "fused", "Adagrad", "LBFGS"],
)
def test_every_inner_optimizer(inner, steps, tmp_path):
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = OneTrunk()
        runs.append((model, MarbleOptimizer(inner(model.parameters()), refresh_every=EVERY)))
    saved, fresh = runs
    if isinstance(saved[1].inner, torch.optim.LBFGS):
        steps = by_closure  # it has no other way
    steps(*saved, range(4))
    fresh[0].load_state_dict(saved[0].state_dict())
    through_torch_save(saved, fresh, tmp_path)
    steps(*fresh, range(4, 9))
    steps(*saved, range(4, 9))
    assert torch.equal(parameters_of(fresh[0]), parameters_of(saved[0]))
    assert fresh[1].param_groups[0][KEY] == saved[1].param_groups[0][KEY]


@one_process_dcp
@pytest.mark.parametrize("route", ROUTES)
def test_saving_leaves_no_mark(route, tmp_path):
    watched, quiet = build(ema_decay=0.7), build(ema_decay=0.7)
    for t in range(5):
        assert rich_steps(*watched, [t]) == rich_steps(*quiet, [t])
        route(watched, build(seed=1, ema_decay=0.7), tmp_path / str(t)) if "folder" in route.__name__ else None
    assert everything_of(*watched) == everything_of(*quiet)


def test_the_random_order_of_pcgrad_goes_on():
    """Three gradients in conflict, so that the order shows: it is neither restarted nor repeated."""
    problem = LinearLosses([[1.0, 0.0], [-0.6, 0.8], [-0.5, -0.9]])

    def start():
        return BalancedOptimizer(torch.optim.SGD([problem.x], lr=0.0), get("pcgrad", seed=7))

    def coefficients(optimizer, steps):
        seen = []
        for _ in range(steps):
            optimizer.backward(problem.losses())
            optimizer.step()
            seen.append(optimizer.coefficients.tolist())
        return seen

    whole = coefficients(start(), 8)
    half, resumed = start(), start()
    assert coefficients(half, 4) == whole[:4]
    resumed.load_state_dict(half.state_dict())
    assert coefficients(resumed, 4) == whole[4:]
    assert whole[4:] != whole[:4]


def test_a_whole_script_resumes():
    """Model, optimizer, scheduler and scaler in one file, read by weights_only."""

    def start(seed):
        model, optimizer = build(seed, ema_decay=0.7, nonfinite="skip")
        return model, optimizer, OneCycleLR(optimizer, 0.1, total_steps=30), torch.amp.GradScaler("cpu", 2.0**10)

    def go_on(model, optimizer, scheduler, scaler, steps):
        for t in steps:
            optimizer.zero_grad()
            losses = [scaler.scale(loss) for loss in model.losses(batches(1, seed=t)[0])]
            if t % 4 == 2:
                losses[1] = losses[1] * float("inf")
            optimizer.backward(losses)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()

    whole = start(0)
    go_on(*whole, range(12))
    half = start(0)
    go_on(*half, range(5))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in half], file)
    file.seek(0)
    resumed = start(1)
    for part, state_dict in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state_dict)
    go_on(*resumed, range(5, 12))
    assert everything_of(*resumed[:2]) == everything_of(*whole[:2])
    assert resumed[3].get_scale() == whole[3].get_scale() < 2.0**10


def test_a_saved_state_is_not_changed_by_later_steps():
    model, optimizer = build()
    train(model, optimizer, batches(3))
    saved = optimizer.state_dict()["param_groups"][0][KEY]
    before = copy.deepcopy(saved)
    train(model, optimizer, batches(3, seed=1))
    assert saved == before
    assert optimizer.state_dict()["param_groups"][0][KEY] != before


def test_loading_a_plain_optimizers_checkpoint_starts_to_balance():
    model, optimizer = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.5)
    sum(model.losses(batches(1)[0])).backward()
    inner.step()
    optimizer.load_state_dict(inner.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    train(model, optimizer, batches(1))
    assert len(optimizer.coefficients) == 3


# --- Copies -----------------------------------------------------------------------------------------------------


def through_torch_save_of_objects(objects):
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS = [copy.deepcopy, lambda objects: pickle.loads(pickle.dumps(objects)), through_torch_save_of_objects]
copiers = pytest.mark.parametrize("copier", COPIERS, ids=["deepcopy", "pickle", "torch.save"])


@copiers
@pytest.mark.parametrize("stop", range(EVERY + 1))
@pytest.mark.parametrize("mode", MODES)
def test_a_copy_trains_on_alike_and_alone(copier, mode, stop):
    model_class, steps = MODES[mode]
    original = build(model=model_class, refresh_every=EVERY)
    steps(*original, range(stop))
    duplicate = copier(original)
    before, ahead = everything_of(*original), range(stop, stop + EVERY + 2)
    records = steps(*duplicate, ahead)
    assert everything_of(*original) == before
    assert steps(*original, ahead) == records
    assert everything_of(*original) == everything_of(*duplicate)


@copiers
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: StepLR(o, 2, gamma=0.5),
        lambda o: OneCycleLR(o, 0.1, total_steps=20),
        lambda o: StepLR(o.inner, 2, gamma=0.5),
    ],
    ids=["step", "cycle", "of the inner"],
)
def test_a_copy_with_a_scheduler_steps_itself(copier, schedule):
    """A scheduler binds the instance's ``step`` to that instance: a copy that kept it would step the original."""
    model, optimizer = build()
    scheduler = schedule(optimizer)
    train(model, optimizer, batches(4), scheduler)
    before = everything_of(model, optimizer)
    other_model, other, other_scheduler = copier((model, optimizer, scheduler))
    assert other_scheduler.optimizer is (other if scheduler.optimizer is optimizer else other.inner)
    train(other_model, other, batches(4, seed=1), other_scheduler)
    assert everything_of(model, optimizer) == before
    train(model, optimizer, batches(4, seed=1), scheduler)
    assert everything_of(model, optimizer) == everything_of(other_model, other)


@copiers
def test_a_copy_leaves_the_scheduler_behind(copier):
    """Copied without its scheduler, it steps itself too, and a new scheduler can be attached."""
    model, optimizer = build()
    train(model, optimizer, batches(2), StepLR(optimizer, 1, gamma=0.5))
    before = everything_of(model, optimizer)
    other_model, other = copier((model, optimizer))
    train(other_model, other, batches(2, seed=1), StepLR(other, 1, gamma=0.5))
    assert everything_of(model, optimizer) == before
    assert not torch.equal(parameters_of(other_model), parameters_of(model))
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] / 4


@copiers
@pytest.mark.parametrize("stop", [0, 1, EVERY])
def test_a_copy_between_backward_and_step_is_of_the_last_step(copier, stop):
    """What no step has committed stays with the original; the copy repeats that step."""
    original = build()
    rich_steps(*original, range(stop))
    committed = everything_of(*original)
    model, optimizer = original
    optimizer.zero_grad()
    optimizer.backward(dict(zip("abc", model.losses(batches(1)[0]), strict=True)))
    duplicate = copier(original)
    assert everything_of(*duplicate) == committed
    optimizer.step()
    train(*duplicate, batches(1))
    assert everything_of(*duplicate) == everything_of(*original)


@pytest.mark.parametrize("stop", [0, 1, EVERY])
def test_a_checkpoint_between_backward_and_step_is_of_the_last_step(stop):
    model, optimizer = build()
    rich_steps(model, optimizer, range(stop))
    parameters = copy.deepcopy(model.state_dict())
    committed = everything_of(model, optimizer)
    optimizer.zero_grad()
    optimizer.backward(dict(zip("abc", model.losses(batches(1)[0]), strict=True)))
    fresh = build(seed=1)
    fresh[0].load_state_dict(parameters)
    through_torch_save((model, optimizer), fresh, None)
    assert everything_of(*fresh) == committed
    optimizer.step()  # saving did not disturb the step under way
    train(*fresh, batches(1))
    assert everything_of(*fresh) == everything_of(model, optimizer)


@copiers
def test_a_copy_balances_its_own_shared_parameters(copier):
    torch.manual_seed(0)
    model = OneTrunk()
    optimizer = MarbleOptimizer(
        torch.optim.AdamW(model.parameters()), shared_parameters=[model.net[0].weight], refresh_every=EVERY
    )
    plain_steps(model, optimizer, range(2))
    other_model, other = copier((model, optimizer))
    assert other.shared_parameters[0] is other_model.net[0].weight
    assert plain_steps(model, optimizer, range(2, 7)) == plain_steps(other_model, other, range(2, 7))
    assert everything_of(model, optimizer) == everything_of(other_model, other)


@copiers
def test_a_copy_takes_no_hooks_along_as_in_torch(copier):
    calls = []
    model, optimizer = build()
    plain = torch.optim.AdamW(model.parameters())
    for some in (plain, optimizer):
        some.register_step_post_hook(lambda *_: calls.append("step"))
    other_model, other, other_plain = copier((model, optimizer, plain))
    other_plain.step()
    assert calls == []
    train(other_model, other, batches(1))
    assert calls == []


# --- What does not fit ------------------------------------------------------------------------------------------


def trained(**options):
    model, optimizer = build(**options)
    train(model, optimizer, batches(2))
    return model, optimizer


@pytest.mark.parametrize("route", [through_torch_save, through_dcp_in_memory, through_safetensors])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective_names": ["a", "b"]}, r"checkpoint balances \['a', 'b', 'c'\], this optimizer \['a', 'b'\]"),
        ({"objective_names": ["a", "b", "c", "d"]}, r"this optimizer \['a', 'b', 'c', 'd'\]"),
        ({"objective_names": ["a", "b", "d"]}, r"this optimizer \['a', 'b', 'd'\]"),
        ({"objective_names": ["b", "a", "c"]}, r"this optimizer \['b', 'a', 'c'\]"),
        ({"balancer": "mgda"}, "checkpoint's balancer is Marble, this optimizer's is MGDA"),
    ],
    ids=["fewer", "more", "another", "order", "method"],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(route, options, message, tmp_path):
    saved, fresh = trained(), build(seed=1, **options)
    get_optimizer_state_dict(*fresh)  # DCP sets up an inner state before it loads
    before = everything_of(*fresh)
    with pytest.raises(ValueError, match=message):
        route(saved, fresh, tmp_path)
    assert everything_of(*fresh) == before


def test_names_from_the_first_backward_are_checked_too():
    _, saved = trained()
    model, optimizer = build(model=OneTrunk)
    optimizer.backward(model.losses(batches(1)[0]))
    optimizer.step()
    before = everything_of(model, optimizer)
    with pytest.raises(ValueError, match=r"this optimizer \['objective_0', 'objective_1', 'objective_2'\]"):
        optimizer.load_state_dict(saved.state_dict())
    assert everything_of(model, optimizer) == before


def test_a_fresh_optimizer_takes_the_names_and_refuses_another_number_of_losses():
    _, saved = trained()
    model, optimizer = build(seed=1)
    optimizer.load_state_dict(saved.state_dict())
    losses = model.losses(batches(1)[0])
    with pytest.raises(ValueError, match="got 4 losses, but this optimizer balances 3 objectives"):
        optimizer.backward([*losses, losses[0]])
    with pytest.raises(ValueError, match=r"unknown objective\(s\) \['d'\]"):
        optimizer.backward({"a": losses[0], "d": losses[1]})


def test_a_checkpoint_of_another_model_loads_nothing():
    _, saved = trained()
    model, optimizer = build(model=OneTrunk)
    before = everything_of(model, optimizer)
    with pytest.raises(ValueError, match="parameter group"):  # torch's own words
        optimizer.load_state_dict(saved.state_dict())
    assert everything_of(model, optimizer) == before


# --- More parameters --------------------------------------------------------------------------------------------


def in_two_groups(seed, split):
    """An optimizer of the trunk, and with ``split=False`` of the heads as a second group."""
    torch.manual_seed(seed)
    model = TwoHeads()
    optimizer = MarbleOptimizer(torch.optim.AdamW(model.trunk.parameters(), lr=0.01), refresh_every=EVERY)
    return (model, optimizer) if split else (model, with_heads(model, optimizer))


def with_heads(model, optimizer):
    optimizer.add_param_group({"params": list(model.heads.parameters()), "lr": 0.003, "weight_decay": 0.2})
    return optimizer


@pytest.mark.parametrize("stop", range(1, EVERY + 1))
def test_parameters_that_are_added_after_loading(stop):
    model, optimizer = in_two_groups(0, split=True)
    rich_steps(model, optimizer, range(stop))
    resumed_model, resumed = in_two_groups(1, split=True)
    resumed_model.load_state_dict(model.state_dict())
    through_torch_save((model, optimizer), (resumed_model, resumed), None)
    with_heads(model, optimizer)
    with_heads(resumed_model, resumed)
    ahead = range(stop, stop + EVERY + 2)
    assert rich_steps(resumed_model, resumed, ahead) == rich_steps(model, optimizer, ahead)
    assert everything_of(resumed_model, resumed) == everything_of(model, optimizer)
    assert len(resumed.state) == len(list(model.parameters()))


@one_process_dcp
@pytest.mark.parametrize("route", ROUTES)
def test_a_checkpoint_with_several_groups(route, tmp_path):
    model, optimizer = in_two_groups(0, split=True)
    rich_steps(model, optimizer, range(2))
    with_heads(model, optimizer)
    rich_steps(model, optimizer, range(2, 4))
    resumed_model, resumed = in_two_groups(1, split=False)
    resumed_model.load_state_dict(model.state_dict())
    route((model, optimizer), (resumed_model, resumed), tmp_path)
    assert everything_of(resumed_model, resumed) == everything_of(model, optimizer)
    assert rich_steps(resumed_model, resumed, range(4, 9)) == rich_steps(model, optimizer, range(4, 9))
    assert everything_of(resumed_model, resumed) == everything_of(model, optimizer)
