"""Gramian estimators in the engine: what a refresh measures for them, whom it tells what, and what is kept."""

import copy
import io
import json
import math

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from gradbalance import AffineLoss, BalancedOptimizer, MarbleOptimizer, measurement
from gradbalance.balancers import Balancer, WeightedSum
from gradbalance.estimators import HistoryGramian, Plain, SplitGramian
from gradbalance.history import KEY as PAST
from gradbalance.state import KEY
from tests.gradbalance import by_hand
from tests.gradbalance.models import LinearLosses, OneTrunk, TwoHeads, batches, flat_gradient
from tests.gradbalance.training import build, everything_of, record_of

NAMES = ["a", "b", "c"]
MICRO = 4


def accumulate(model, optimizer, data, absent=(), regularized=False):
    """One step's backward calls; ``absent`` holds pairs (micro-batch, objective)."""
    optimizer.zero_grad()
    for i, x in enumerate(data):
        losses = [None if (i, k) in absent else loss for k, loss in enumerate(model.losses(x))]
        penalty = 1e-2 * sum(p.square().sum() for p in model.parameters()) if regularized else None
        last = i + 1 == len(data)
        report = optimizer.backward(dict(zip(NAMES, losses, strict=True)), regularizer=penalty, accumulate=not last)
    return report


def some_steps(model, optimizer, steps, micro_batches=MICRO):
    """Steps with objectives that are absent from some micro-batches, or from all of them."""
    records = []
    for t in steps:
        absent = {(i, 1) for i in range(micro_batches)} if t % 4 == 2 else {(0, 2)} if t % 3 == 1 else set()
        report = accumulate(model, optimizer, batches(micro_batches, seed=t), absent, regularized=t % 2 == 0)
        optimizer.step()
        records.append(record_of(report))
    return records


def rows_of(model, data, absent=()):
    """The gradients by plain autograd, micro-batch by micro-batch."""
    model = copy.deepcopy(model)
    return [
        by_hand.gradients(
            model.parameters(), [None if (i, k) in absent else loss for k, loss in enumerate(model.losses(x))]
        )
        for i, x in enumerate(data)
    ]


# --- What is measured -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [OneTrunk, TwoHeads])
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("absent", [set(), {(1, 0), (3, 0), (2, 2)}], ids=["all", "some absent"])
def test_the_estimate_is_that_of_the_parts_gradients(model, parts, absent):
    model, optimizer = build(model=model, gramian_estimator=SplitGramian(parts=parts), objective_names=NAMES)
    data = batches(5)
    report = accumulate(model, optimizer, data, absent)

    rows = rows_of(model, data, absent)
    whole = by_hand.gramian(by_hand.add_rows(rows))
    shared = [sum(row[p] is not None for row in by_hand.add_rows(rows)) > 1 for p in range(len(rows[0][0]))]
    sums = [by_hand.add_rows(rows[a::parts]) for a in range(parts)]
    flat = torch.stack(
        [
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).reshape(-1)
                    for g, p, s in zip(row, model.parameters(), shared, strict=True)
                    if s
                ]
            )
            for part in sums
            for row in part
        ]
    )
    counts = np.array([[sum((i, k) not in absent for i in range(a, 5, parts)) for k in range(3)] for a in range(parts)])
    expected = SplitGramian(parts=parts).estimate((flat @ flat.T).numpy(), counts)

    torch.testing.assert_close(report.gramian, whole)
    torch.testing.assert_close(report.gradient_norms, whole.diagonal().sqrt())
    torch.testing.assert_close(report.signal, torch.from_numpy(expected.signal), rtol=1e-9, atol=0)
    ratios = torch.from_numpy(expected.signal_to_noise)
    torch.testing.assert_close(report.signal_to_noise, ratios, rtol=1e-9, atol=0, equal_nan=True)


@pytest.mark.parametrize("micro_batches", [2, 3, 5])
@pytest.mark.parametrize("model", [OneTrunk, TwoHeads])
@pytest.mark.parametrize("estimator", [SplitGramian(parts=2), SplitGramian(parts=3), HistoryGramian()])
def test_the_written_gradient_is_the_plain_one_for_the_same_coefficients(estimator, model, micro_batches):
    gradients = []
    for some in ("plain", estimator):
        trained, optimizer = build(model=model, balancer=WeightedSum([2.0, -0.3, 7.0]), gramian_estimator=some)
        accumulate(trained, optimizer, batches(micro_batches), regularized=True)
        gradients.append(flat_gradient(trained.parameters()))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-14)


def test_plain_is_what_there_was():
    runs = []
    for options in ({}, {"gramian_estimator": "plain"}, {"gramian_estimator": Plain()}):
        run = build(**options)
        runs.append((some_steps(*run, range(6)), everything_of(*run)))
    assert runs[0] == runs[1] == runs[2]
    report = run[1].report
    assert report.signal.isnan().all()
    assert report.signal_to_noise.isnan().all()
    assert not any("signal" in key for key in report.as_dict())


@pytest.mark.parametrize("estimator", ["split", "history"])
@pytest.mark.parametrize("limit", [None, 2])
def test_no_reverse_pass_is_added(estimator, limit, monkeypatch):
    passes = []
    original = measurement.reverse_pass
    monkeypatch.setattr(measurement, "reverse_pass", lambda *a, **o: passes.append(1) or original(*a, **o))
    counts = []
    for some in ("plain", estimator):
        model, optimizer = build(gramian_estimator=some, refresh_micro_batches=limit)
        accumulate(model, optimizer, batches(MICRO))
        counts.append(len(passes))
        passes.clear()
    assert counts[0] == counts[1] == 3 * (limit or MICRO)


def test_a_compiled_models_heads_stay_heads():
    """Its graph gives zeros where an objective does not reach: they are looked for over all parts."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = TwoHeads()
        losses = torch.compile(model.losses, backend="aot_eager") if compiled else model.losses
        optimizer = MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), gramian_estimator="split")
        for i, x in enumerate(batches(3)):
            report = optimizer.backward(losses(x), accumulate=i < 2)
        found.append((flat_gradient(model.parameters()), report.signal, optimizer._window.state.reach))
    torch.testing.assert_close(*found)


def test_low_precision_parameters_are_rounded_once():
    """Σ over parts and objectives in float32, as without parts."""
    gradients = []
    for some in ("plain", "split"):
        torch.manual_seed(0)
        model = OneTrunk(dtype=torch.bfloat16)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = BalancedOptimizer(inner, WeightedSum([1.0, 0.1, 0.01]), gramian_estimator=some)
        accumulate(model, optimizer, batches(2, dtype=torch.bfloat16))
        gradients.append(flat_gradient(model.parameters()))
    assert torch.equal(*gradients)


# --- Who is told what -------------------------------------------------------------------------------------------


class Listening(Balancer):
    """Keeps what it is given."""

    def __init__(self, uses_signal=False):
        self.uses_signal = uses_signal
        self.told = []

    def weights(self, gramian, losses=None, signal=None):
        self.told.append((gramian.clone(), None if signal is None else signal.clone()))
        return torch.ones(len(gramian), dtype=torch.float64)

    def scale(self, weights, gramian):
        assert torch.equal(gramian, self.told[-1][0])
        return weights


@pytest.mark.parametrize("uses_signal", [True, False])
def test_a_balancer_is_told_both_or_the_signal_alone(uses_signal):
    listening = Listening(uses_signal)
    model, optimizer = build(balancer=lambda count: listening, gramian_estimator="split")
    report = accumulate(model, optimizer, batches(MICRO))
    ((gramian, signal),) = listening.told
    torch.testing.assert_close(signal, report.signal)
    torch.testing.assert_close(gramian, report.gramian if uses_signal else report.signal)
    assert not torch.allclose(report.gramian, report.signal)


def test_with_plain_there_is_no_signal():
    listening = Listening(uses_signal=True)
    model, optimizer = build(balancer=lambda count: listening)
    report = accumulate(model, optimizer, batches(MICRO))
    ((gramian, signal),) = listening.told
    assert torch.equal(gramian, report.gramian)
    assert signal is None


def test_marble_divides_by_the_signals_norms():
    model, optimizer = build(gramian_estimator="split", ema_decay=0.0)
    report = accumulate(model, optimizer, batches(MICRO))
    norms = report.signal.diagonal().sqrt()
    alpha = optimizer.balancer.weights(report.signal)
    torch.testing.assert_close(report.coefficients, norms.mean() * alpha / norms)


def test_the_report_says_what_is_known():
    model, optimizer = build(gramian_estimator="split", objective_names=NAMES, refresh_every=1)
    gone = {(i, 1) for i in range(MICRO)}
    report = accumulate(model, optimizer, batches(MICRO), gone)
    assert report.signal.isnan().tolist() == [[k == 1 or j == 1 for j in range(3)] for k in range(3)]
    assert report.signal_to_noise.isnan().tolist() == [False, True, False]
    values = report.as_dict()
    assert math.isnan(values["balance/signal_norm/b"])
    assert values["balance/signal_norm/c"] == pytest.approx(report.signal[2, 2].sqrt().item())
    assert values["balance/signal_to_noise/a"] == pytest.approx(report.signal_to_noise[0].item())
    assert 0 < values["balance/signal_to_noise/a"] <= 1
    optimizer.step()
    accumulate(model, optimizer, batches(MICRO, seed=1))
    optimizer.step()
    known = optimizer.report.signal_to_noise
    report = accumulate(model, optimizer, batches(MICRO, seed=2), gone)
    assert report.signal[1].isnan().all()
    assert report.signal_to_noise[1] == known[1]  # absent: its averages stay
    assert report.as_dict().keys() == values.keys()


def test_cosines_and_conflicts_are_of_the_measured_gradients():
    rows = torch.tensor([[3.0, 0.1, 0.0], [-1.0, 2.0, 0.0]], dtype=torch.float64)
    noise = torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, -5.0]], dtype=torch.float64)
    problem = LinearLosses(rows)
    optimizer = MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.0), gramian_estimator="split")
    for sign, more in ((1, True), (0.5, False)):
        report = optimizer.backward(list((rows + sign * noise) @ problem.x), accumulate=more)
    whole = 2 * rows + 1.5 * noise
    torch.testing.assert_close(report.gramian, whole @ whole.T)
    update = report.coefficients @ whole
    torch.testing.assert_close(problem.x.grad, update)
    expected = (whole @ update) / whole.norm(dim=1) / update.norm()
    torch.testing.assert_close(report.update_cosines, expected)


# --- Steps ------------------------------------------------------------------------------------------------------


def test_amortised_steps_learn_nothing_and_show_the_last_estimate():
    model, optimizer = build(gramian_estimator="split", refresh_every=3)
    seen = []
    for t in range(4):
        report = accumulate(model, optimizer, batches(MICRO, seed=t))
        optimizer.step()
        seen.append((report.refreshed, str(optimizer.param_groups[0][KEY]["estimates"]), str(report.signal.tolist())))
    assert [refreshed for refreshed, *_ in seen] == [True, False, False, True]
    assert seen[0][1:] == seen[1][1:] == seen[2][1:]
    assert seen[3][1:] != seen[0][1:]


def test_one_micro_batch_at_first_is_an_error_and_later_is_not():
    model, optimizer = build(gramian_estimator="split", refresh_every=1)
    before = everything_of(model, optimizer)
    with pytest.raises(RuntimeError, match="accumulate=True"):
        accumulate(model, optimizer, batches(1))
    assert everything_of(model, optimizer) == before
    accumulate(model, optimizer, batches(2))
    optimizer.step()
    estimates = optimizer.param_groups[0][KEY]["estimates"]
    report = accumulate(model, optimizer, batches(1, seed=5))
    optimizer.step()
    assert report.refreshed
    assert optimizer.param_groups[0][KEY]["estimates"] == estimates


@pytest.mark.parametrize("estimator", ["split", "history"])
def test_a_step_that_is_not_made_teaches_nothing(estimator):
    model, optimizer = build(gramian_estimator=estimator, nonfinite="skip", refresh_every=1)
    some_steps(model, optimizer, range(2))
    before = everything_of(model, optimizer)
    data = batches(MICRO)
    data[2][0, 0] = math.nan
    report = accumulate(model, optimizer, data)
    assert report.skipped
    optimizer.step()
    assert everything_of(model, optimizer) == before
    accumulate(model, optimizer, batches(MICRO))
    optimizer.zero_grad()  # a GradScaler's overflow, or a change of mind
    assert everything_of(model, optimizer) == before


def test_no_gradient_at_all_teaches_nothing():
    problem = LinearLosses([[1.0, 2.0], [0.5, -1.0]])
    optimizer = MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.0), gramian_estimator="split")
    for _ in range(2):
        for i in range(2):
            optimizer.backward([0 * loss for loss in problem.losses()], accumulate=i == 0)
        optimizer.step()
    assert optimizer.param_groups[0][KEY]["estimates"]["mass"] == []


def test_a_reward_that_an_affine_loss_leaves_out_of_a_micro_batch_is_absent_there():
    """The coefficients of the rare reward are 0 in the second and fourth micro-batch."""

    def optimizer_of(model):
        return MarbleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), gramian_estimator="split")

    torch.manual_seed(0)
    model, reports = OneTrunk(), []
    for affine in (True, False):
        optimizer = optimizer_of(model)
        optimizer.zero_grad()
        for i, x in enumerate(batches(MICRO)):
            terms = (model.net(x) - 1).square()
            coefficients = torch.rand(2, *terms.shape, generator=torch.Generator().manual_seed(i), dtype=terms.dtype)
            coefficients[1] *= i % 2 == 0
            losses = AffineLoss(terms, coefficients)
            given = (
                losses if affine else [loss if i % 2 == 0 or k == 0 else None for k, loss in enumerate(losses.losses())]
            )
            report = optimizer.backward(given, accumulate=i + 1 < MICRO)
        reports.append(report)
    torch.testing.assert_close(reports[0].signal, reports[1].signal)
    assert reports[0].signal_to_noise.isnan().tolist() == [False, True]
    torch.testing.assert_close(reports[0].signal[1, 1], reports[0].gramian[1, 1])  # one part: nothing to compare


def test_what_was_learned_over_other_parameters_is_forgotten():
    """A head that a second objective comes to reach is shared from then on."""
    torch.manual_seed(0)
    trunk, head = nn.Linear(4, 3), nn.Linear(3, 1)
    inner = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.0)
    optimizer = MarbleOptimizer(inner, gramian_estimator="split")

    def step(both, seed):
        for i, x in enumerate(batches(2, seed=seed, dtype=torch.float32)):
            features = trunk(x)
            second = head(features).abs().mean() if both else features.square().mean()
            optimizer.backward([head(features).square().mean(), second], accumulate=i == 0)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.param_groups[0][KEY]["estimates"]["mass"][0]

    assert step(False, 0) == 0.5
    assert step(False, 1) == pytest.approx(0.5 * 0.9 + 0.5)
    assert step(True, 2) == 0.5
    assert step(True, 3) == pytest.approx(0.5 * 0.9 + 0.5)


# --- A history of gradients -------------------------------------------------------------------------------------


def past_of(model, optimizer, k):
    return torch.cat(
        [optimizer.state[p][PAST][k].reshape(-1) for p in model.parameters() if PAST in optimizer.state[p]]
    )


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_averages_are_those_of_the_past_gradients(micro_batches):
    model, optimizer = build(model=OneTrunk, gramian_estimator=HistoryGramian(history_decay=0.8), refresh_every=2)
    seen = []
    for t in range(7):
        data = batches(micro_batches, seed=t)
        if t % 2 == 0:
            rows = by_hand.add_rows(rows_of(model, data))
            seen.append(torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows]))
        accumulate(model, optimizer, data)
        optimizer.step()
    weights = 0.8 ** torch.arange(len(seen)).flip(0).double()
    expected = torch.tensordot(weights / weights.sum(), torch.stack(seen), 1)
    for k in range(3):
        torch.testing.assert_close(past_of(model, optimizer, k), expected[k])


def test_the_estimate_is_that_of_gradients_and_averages():
    model, optimizer = build(
        model=OneTrunk, gramian_estimator=HistoryGramian(ema_decay=0.0, min_signal=1e-6), refresh_every=1
    )
    accumulate(model, optimizer, batches(1))
    optimizer.step()
    (x,) = batches(1, seed=1)
    rows = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in by_hand.add_rows(rows_of(model, [x]))])
    past = torch.stack([past_of(model, optimizer, k) for k in range(3)])
    accumulate(model, optimizer, [x])
    optimizer.step()
    found = torch.tensor(optimizer.param_groups[0][KEY]["estimates"]["signal"], dtype=torch.float64).view(3, 3)
    torch.testing.assert_close(found, (rows @ past.T + past @ rows.T) / 2)


@pytest.mark.parametrize(
    "inner",
    [
        lambda p: torch.optim.SGD(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    ],
    ids=["SGD", "momentum", "AdamW", "RMSprop", "Adagrad", "LBFGS"],
)
def test_the_inner_optimizer_does_what_it_did(inner):
    """Buffers of ours among its state do not change its steps: with fixed coefficients they are the plain ones."""
    parameters = []
    for some in ("plain", "history"):
        torch.manual_seed(0)
        model = OneTrunk()
        optimizer = BalancedOptimizer(inner(model.parameters()), WeightedSum(), gramian_estimator=some)
        for x in batches(4):
            optimizer.step(lambda model=model, x=x: model.losses(x))
        parameters.append(flat_gradient(model.parameters()))
    torch.testing.assert_close(parameters[0], parameters[1], rtol=0, atol=0)
    assert all(PAST in optimizer.state[p] for p in model.parameters())


def test_a_parameter_that_the_inner_optimizer_skips_gets_no_buffer():
    """Adam takes any state for its own: it would miss the step count."""
    model, optimizer = build(model=OneTrunk, gramian_estimator="history", refresh_every=1)
    bias = model.net[2].bias
    accumulate(model, optimizer, batches(1))
    bias.grad = None
    optimizer.step()
    assert bias not in optimizer.state or not optimizer.state[bias]
    for t in range(2):
        accumulate(model, optimizer, batches(1, seed=t))
        optimizer.step()
    assert PAST in optimizer.state[bias]


def test_buffers_are_as_precise_as_their_parameters():
    torch.manual_seed(0)
    model = OneTrunk(dtype=torch.bfloat16)
    optimizer = MarbleOptimizer(torch.optim.AdamW(model.parameters()), gramian_estimator="history", refresh_every=1)
    for x in batches(3, dtype=torch.bfloat16):
        report = accumulate(model, optimizer, [x])
        optimizer.step()
    assert {optimizer.state[p][PAST].dtype for p in model.parameters()} == {torch.bfloat16}
    assert report.signal.isfinite().all()


def test_sparse_and_complex_gradients_have_a_past_too():
    table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    z = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    inner = torch.optim.SGD([table.weight, z], lr=0.1)
    optimizer = MarbleOptimizer(inner, gramian_estimator="history")
    for i in range(3):
        optimizer.zero_grad()
        y = table(torch.tensor([i, i + 1])).sum()
        report = optimizer.backward([y * (z.real.sum() + 2), (y - 1).square() + z.abs().sum()])
        optimizer.step()
    assert report.signal.isfinite().all()
    assert optimizer.state[z][PAST].is_complex()


# --- Saving and loading -----------------------------------------------------------------------------------------


def through_torch_save(saved, fresh, folder):
    buffer = io.BytesIO()
    torch.save(saved[1].state_dict(), buffer)
    buffer.seek(0)
    fresh[1].load_state_dict(torch.load(buffer, weights_only=True))


def through_dcp_folder(saved, fresh, folder):
    dcp.save(get_optimizer_state_dict(*saved), checkpoint_id=folder)
    state_dict = get_optimizer_state_dict(*fresh)
    dcp.load(state_dict, checkpoint_id=folder)
    set_optimizer_state_dict(*fresh, state_dict)


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # DCP says so when one process saves
@pytest.mark.parametrize("route", [through_torch_save, through_dcp_folder])
@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("estimator", [SplitGramian(), SplitGramian(parts=3), HistoryGramian()], ids=str)
@pytest.mark.parametrize("model", [OneTrunk, TwoHeads])
def test_a_resumed_run_is_the_run_that_never_stopped(model, estimator, stop, route, tmp_path):
    options = {"gramian_estimator": estimator, "refresh_every": 2, "objective_names": NAMES}
    saved, fresh = build(model=model, **options), build(seed=1, model=model, **options)
    some_steps(*saved, range(stop))
    fresh[0].load_state_dict(saved[0].state_dict())
    route(saved, fresh, tmp_path)
    ahead = range(stop, stop + 5)
    assert some_steps(*fresh, ahead) == some_steps(*saved, ahead)
    assert everything_of(*fresh) == everything_of(*saved)


@pytest.mark.parametrize("estimator", ["split", "history"])
def test_a_copy_trains_on_alike_and_alone(estimator):
    original = build(gramian_estimator=estimator)
    some_steps(*original, range(4))
    duplicate = copy.deepcopy(original)
    before = everything_of(*original)
    records = some_steps(*duplicate, range(4, 8))
    assert everything_of(*original) == before
    assert some_steps(*original, range(4, 8)) == records


def test_the_state_is_plain():
    model, optimizer = build(gramian_estimator="split")
    some_steps(model, optimizer, range(3))
    state = optimizer.param_groups[0][KEY]
    assert json.loads(json.dumps(state, allow_nan=False)) == state


def test_a_checkpoint_of_another_estimator_is_refused():
    model, optimizer = build(gramian_estimator="split")
    some_steps(model, optimizer, range(2))
    other_model, other = build(gramian_estimator="history")
    before = everything_of(other_model, other)
    with pytest.raises(ValueError, match="Gramian estimator is SplitGramian, this optimizer's is HistoryGramian"):
        other.load_state_dict(optimizer.state_dict())
    assert everything_of(other_model, other) == before


@pytest.mark.parametrize("estimator", ["plain", "split", "history"])
def test_a_checkpoint_from_before_there_were_estimators_goes_on(estimator):
    model, optimizer = build()
    some_steps(model, optimizer, range(3))
    old = copy.deepcopy(optimizer.state_dict())
    for key in ("estimator", "estimates", "signal", "signal_to_noise"):
        del old["param_groups"][0][KEY][key]
    resumed_model, resumed = build(seed=1, gramian_estimator=estimator)
    resumed_model.load_state_dict(model.state_dict())
    resumed.load_state_dict(old)
    assert torch.equal(resumed.coefficients, optimizer.coefficients)
    records = some_steps(resumed_model, resumed, range(3, 8))
    if estimator == "plain":
        assert records == some_steps(model, optimizer, range(3, 8))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("estimates", {"foreign": 1}),
        ("estimates", {"noisy": ["a"], "signal": [], "mass": []}),
        ("signal", [[1.0]]),
        ("signal_to_noise", ["a", "b", "c"]),
    ],
)
def test_a_damaged_state_is_explained_and_loads_nothing(key, value):
    model, optimizer = build(gramian_estimator="split")
    some_steps(model, optimizer, range(2))
    damaged, before = copy.deepcopy(optimizer.state_dict()), everything_of(model, optimizer)
    damaged["param_groups"][0][KEY][key] = value
    with pytest.raises(ValueError, match=key):
        optimizer.load_state_dict(damaged)
    assert everything_of(model, optimizer) == before


# --- Wrong options ----------------------------------------------------------------------------------------------


def test_wrong_options_are_explained():
    with pytest.raises(TypeError, match="gramian_estimator must be a GramianEstimator or the name of one, got int"):
        build(gramian_estimator=3)
    with pytest.raises(ValueError, match="no Gramian estimator is called 'spilt'; did you mean 'split'"):
        build(gramian_estimator="spilt")
    with pytest.raises(ValueError, match="refresh_micro_batches must be at least 2 for SplitGramian"):
        build(gramian_estimator="split", refresh_micro_batches=1)
