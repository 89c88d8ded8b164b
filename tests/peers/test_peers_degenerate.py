"""Objectives that are zero, tiny, constant, absent, repeated or not finite: the peers freeze, crash or pass NaN on."""

import math

import pytest
import torch
from conflictfree.grad_operator import ConFIGOperator, IMTLGOperator
from torch import nn
from torchjd.aggregation import (
    IMTLG,
    MGDA,
    AlignedMTL,
    CAGrad,
    ConFIG,
    CRMOGMWeighting,
    ExcessMTL,
    FairGrad,
    MGDAWeighting,
    PCGrad,
    UPGrad,
)

from gradbalance import MarbleOptimizer, NonFiniteError
from tests.gradbalance.models import LinearLosses
from tests.peers.calls import conflictfree, cosine, gradients, linear_update, marble, mgda, pcgrad, torchjd

pytestmark = pytest.mark.slow

NAN, INF = math.nan, math.inf


def config(rows):
    return ConFIGOperator().calculate_gradient(torch.tensor(rows))


@pytest.mark.parametrize("aggregator", [MGDA(), CAGrad(c=0.5)])
def test_a_zero_gradient_freezes_torchjd(aggregator):
    rows = [[0.0, 0.0], [1.0, 0.2], [0.1, 1.0]]
    assert linear_update(torchjd(aggregator), rows).tolist() == [0, 0]

    for call in (marble, mgda):  # zero for one objective: as if it were not there
        torch.testing.assert_close(linear_update(call, rows), linear_update(call, rows[1:]))
        assert linear_update(call, rows).norm() > 0.5


def test_a_zero_gradient_makes_conflictfree_nan():
    assert config([[0.0, 0.0], [1.0, 0.2]]).isnan().all()
    assert linear_update(marble, [[0.0, 0.0], [1.0, 0.2]]).tolist() == pytest.approx([1.0, 0.2])


def test_a_tiny_gradient_stops_torchjd():
    """For MGDA that is its definition, the shortest combination; CAGrad takes it for a stationary point."""
    rows = torch.tensor([[1.0, 0.2, 0.0], [0.1, 1.0, 0.3], [-1e-12, -1e-13, 1e-12]])
    assert linear_update(torchjd(MGDA()), rows).norm() < 1e-11
    assert linear_update(torchjd(CAGrad(c=0.5)), rows).norm() == 0

    update = linear_update(marble, rows)
    assert update.norm() > 0.2
    assert all(cosine(update, row) > -1e-6 for row in rows)


def test_a_constant_loss():
    x = nn.Parameter(torch.tensor([1.0, 2.0]))
    losses = [x.sum(), torch.tensor(3.0)]
    with pytest.raises(ValueError, match="should have a `grad_fn`"):
        torchjd(PCGrad())(losses, [x])
    with pytest.raises(RuntimeError, match="does not require grad"):
        pcgrad(losses, [x])
    x.grad = None
    marble(losses, [x])
    assert x.grad.tolist() == [1, 1]


def test_an_absent_loss():
    x = nn.Parameter(torch.tensor([1.0, 2.0]))
    for call in (torchjd(PCGrad()), pcgrad):
        with pytest.raises(AttributeError, match="'NoneType' object"):
            call([x.sum(), None], [x])

    optimizer = MarbleOptimizer(torch.optim.SGD([x], lr=0.1))
    x.grad = None
    report = optimizer.backward([x.sum(), None])
    assert x.grad.tolist() == [1, 1]
    assert report.absent == ["objective_1"]


def test_one_objective():
    """The gradient itself; conflictfree's IMTL-G crashes, torchjd's CAGrad and FairGrad change its length."""
    row = [[1.0, 2.0, 2.0]]
    with pytest.raises(RuntimeError, match="non-empty TensorList"):
        IMTLGOperator().calculate_gradient(torch.tensor(row))
    assert linear_update(torchjd(CAGrad(c=0.5)), row).norm() == pytest.approx(4.5)
    assert linear_update(torchjd(FairGrad(alpha=1.0)), row).norm() == pytest.approx(1.0)
    assert linear_update(marble, row).tolist() == [1, 2, 2]


def test_the_same_loss_twice():
    x = nn.Parameter(torch.tensor([1.0, 2.0]))
    loss = x @ torch.tensor([3.0, 4.0])
    with pytest.raises(ValueError, match="unique elements"):
        torchjd(MGDA())([loss, loss], [x])
    marble([loss, loss], [x])
    assert x.grad.tolist() == pytest.approx([3, 4])


def test_equal_gradients_turn_conflictfree():
    """It divides what is left of each gradient after projection, which is rounding here, by its norm."""
    update = config([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    assert cosine(update, torch.tensor([1.0, 2.0, 3.0])) < 0.999
    assert linear_update(marble, [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]).tolist() == pytest.approx([1, 2, 3])


def test_the_sum_of_the_losses_by_mistake():
    """torchjd takes it for one objective: plain training, and no word of it. PCGrad's error does not say what to do."""
    x = nn.Parameter(torch.tensor([1.0, 2.0]))
    total = x.square().sum() + 3 * x[0]
    torchjd(MGDA())(total, [x])
    assert x.grad.tolist() == [5, 4]
    with pytest.raises(TypeError, match="iteration over a 0-d tensor"):
        pcgrad(total, [x])
    with pytest.raises(ValueError, match="got one scalar loss"):
        marble(x.square().sum() + 3 * x[0], [x])


def nan_in_one_gradient(x):
    """Both losses are finite; √0 makes the second one's gradient infinite, and ∞ · 0 makes it NaN."""
    return {"quality": (x - 1).square().sum(), "distance": (0 * x).square().sum().sqrt()}


@pytest.mark.parametrize("aggregator", [MGDA(), ConFIG(), PCGrad()])
def test_nan_passes_through_torchjd(aggregator):
    x = nn.Parameter(torch.tensor([3.0, 2.0]))
    torchjd(aggregator)(list(nan_in_one_gradient(x).values()), [x])
    assert x.grad.isnan().all()


def test_nan_passes_through_the_other_peers():
    linear = nn.Linear(2, 1, bias=False)
    for call in (lambda losses: conflictfree(losses, linear), lambda losses: pcgrad(losses, [linear.weight])):
        linear.weight.grad = None
        call(list(nan_in_one_gradient(linear.weight).values()))
        assert linear.weight.grad.isnan().all()


@pytest.mark.parametrize(
    ("aggregator", "error", "message"),
    [
        (CAGrad(c=0.5), torch.linalg.LinAlgError, "linalg.svd: The algorithm failed to converge"),
        (IMTLG(), torch.linalg.LinAlgError, "linalg.svd: The algorithm failed to converge"),
        (FairGrad(alpha=1.0), ValueError, "Residuals are not finite"),
    ],
)
def test_torchjds_errors_do_not_name_the_objective(aggregator, error, message):
    x = nn.Parameter(torch.tensor([3.0, 2.0]))
    with pytest.raises(error, match=message):
        torchjd(aggregator)(list(nan_in_one_gradient(x).values()), [x])


def test_gradbalance_names_the_objective_that_is_nan():
    x = nn.Parameter(torch.tensor([3.0, 2.0]))
    optimizer = MarbleOptimizer(torch.optim.SGD([x], lr=0.1))
    with pytest.raises(NonFiniteError, match="the loss or gradient of 'distance' is NaN"):
        optimizer.backward(nan_in_one_gradient(x))
    optimizer.step()
    assert x.tolist() == [3, 2]


def test_one_overflow_poisons_the_averages_of_the_peers():
    """After one infinite gradient torchjd's averaged weights are NaN for good; GradScaler cannot undo that."""
    good, bad = torch.tensor([[1.0, 0.2], [0.2, 1.0]]), torch.tensor([[1.0, NAN], [NAN, INF]])
    weighting = CRMOGMWeighting(MGDAWeighting())
    for gramian in (good, bad, good, good):
        weights = weighting(gramian)
    assert weights.isnan().all()

    aggregator = ExcessMTL()
    for rows in (good, good * torch.tensor([[1.0], [INF]]), good, good):
        update = aggregator(rows)
    assert update.isnan().all()

    x = nn.Parameter(torch.zeros(2))
    optimizer = MarbleOptimizer(torch.optim.SGD([x], lr=0.0), ema_decay=0.9, nonfinite="skip")
    seen = []
    for scale in (1.0, INF, 1.0):
        optimizer.zero_grad()
        loss_a, loss_b = good @ x
        report = optimizer.backward([loss_a, scale * loss_b])
        seen.append(optimizer.coefficients.tolist())
        optimizer.step()
    assert seen[0] == seen[2]
    assert gradients([x]).isfinite().all()
    assert report.skipped == []


OPPOSITES_AND_A_THIRD = [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("aggregator", [PCGrad, ConFIG, IMTLG, AlignedMTL, UPGrad])
def test_some_peers_serve_the_third_objective_where_two_are_exact_opposites(aggregator):
    """A point for them: the two leave a combination that is zero, and there min-norm stands still. A floor helps."""
    update = linear_update(torchjd(aggregator()), OPPOSITES_AND_A_THIRD)
    assert update[1] > 0.3
    assert linear_update(marble, OPPOSITES_AND_A_THIRD).norm() < 1e-6
    assert linear_update(mgda, OPPOSITES_AND_A_THIRD).norm() < 1e-6

    problem = LinearLosses(OPPOSITES_AND_A_THIRD)
    MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.1), floor=0.1).backward(problem.losses())
    assert problem.x.grad.tolist() == pytest.approx([0, 0.1])
