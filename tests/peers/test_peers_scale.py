"""Losses of any size: torchjd compares with absolute tolerances, so small losses, a GradScaler's scale or one loss much
larger than the other change the direction or stop the training."""

import pytest
import torch
from torch import nn
from torchjd.aggregation import AlignedMTL, CAGrad, FairGrad, GradVac, MGDAWeighting, UPGrad

from gradbalance import MarbleOptimizer
from gradbalance.balancers import get
from tests.peers.calls import cosine, linear_update, marble, torchjd

pytestmark = pytest.mark.slow

ROWS = torch.tensor([[1.0, 0.0], [-0.9, 0.1]])  # at 174°


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 65536.0, 1e7])
def test_gradbalance_keeps_the_direction(scale):
    update = linear_update(marble, scale * ROWS)
    unit = ROWS / ROWS.norm(dim=1, keepdim=True)
    assert cosine(update, unit.sum(0)) > 1 - 1e-6
    assert update.norm() / scale == pytest.approx(linear_update(marble, ROWS).norm().item(), rel=1e-5)


def test_torchjd_cagrad_stops_on_small_losses():
    assert linear_update(torchjd(CAGrad(c=0.5)), ROWS).norm() > 0.05
    assert linear_update(torchjd(CAGrad(c=0.5)), 1e-3 * ROWS).norm() == 0


def test_torchjd_cagrad_without_norm_eps_fails_when_no_objective_has_a_gradient():
    with pytest.raises(torch.linalg.LinAlgError, match="non-finite values"):
        linear_update(torchjd(CAGrad(c=0.5, norm_eps=0.0)), 0 * ROWS)
    assert linear_update(marble, 0 * ROWS).tolist() == [0, 0]


def test_torchjd_upgrad_becomes_the_mean_on_small_losses():
    assert cosine(linear_update(torchjd(UPGrad()), ROWS), ROWS[1]) > 0
    small = linear_update(torchjd(UPGrad()), 1e-3 * ROWS)
    assert cosine(small, ROWS.mean(0)) > 1 - 1e-6
    assert cosine(small, ROWS[1]) == pytest.approx(-0.63, abs=0.01)  # UPGrad promises that there is no conflict


@pytest.mark.parametrize(
    ("aggregator", "scale", "expected"), [(lambda: FairGrad(alpha=1.0), 1e-3, 0.793), (GradVac, 1e-7, 0.747)]
)
def test_torchjd_turns_on_small_losses(aggregator, scale, expected):
    full, small = (linear_update(torchjd(aggregator()), s * ROWS) for s in (1.0, scale))
    assert cosine(full, small) == pytest.approx(expected, abs=1e-3)


def scaled_update(call, scale):
    """The unscaled gradients after a GradScaler; scale None: without one."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    y = model(x)
    losses = [1e-4 * y[:, 0].square().mean(), 1e-4 * ((y[:, 1] - 1).square().mean() - 3 * y[:, 0].mean())]
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call([scaler.scale(loss) for loss in losses], list(model.parameters()))
    scaler.unscale_(optimizer)
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def test_a_grad_scaler_changes_what_torchjd_does():
    assert scaled_update(torchjd(CAGrad(c=0.5)), None).norm() == 0
    assert scaled_update(torchjd(CAGrad(c=0.5)), 65536.0).norm() > 1e-4
    fair = torchjd(FairGrad(alpha=1.0))
    assert cosine(scaled_update(fair, None), scaled_update(fair, 65536.0)) == pytest.approx(0.916, abs=1e-3)

    plain, scaled = scaled_update(marble, None), scaled_update(marble, 65536.0)
    torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=0)
    assert plain.norm() > 1e-4


def test_one_loss_a_million_times_larger():
    """AlignedMTL and UPGrad run against the smaller objective, CAGrad stops."""
    rows = ROWS * torch.tensor([[1.0], [1e6]])
    assert cosine(linear_update(torchjd(AlignedMTL()), rows), ROWS[0]) == pytest.approx(-0.994, abs=1e-3)
    assert linear_update(torchjd(CAGrad(c=0.5)), rows).norm() == 0

    update = linear_update(marble, rows)
    along = [cosine(update, row) for row in ROWS]
    assert along == pytest.approx([0.0553, 0.0553], abs=1e-4)  # cos(174°/2) with each


def test_torchjd_upgrad_conflicts_with_a_small_loss():
    update = linear_update(torchjd(UPGrad()), ROWS * torch.tensor([[1.0], [1e6]]))
    assert cosine(update, ROWS[0]) == pytest.approx(-0.994, abs=1e-3)


@pytest.mark.parametrize(("count", "spread", "ratio"), [(10, 1.0, 1.04), (50, 1.0, 5.0), (50, 2.0, 3000.0)])
def test_torchjd_mgda_is_far_from_the_min_norm_point(count, spread, ratio):
    """Gradients whose norms are log-normal: ‖d‖² of Frank-Wolfe is a multiple of the smallest."""
    torch.manual_seed(1)
    rows = torch.randn(count, 200, dtype=torch.float64)
    rows = rows * (spread * torch.randn(count, 1, dtype=torch.float64)).exp()
    gramian = rows @ rows.T
    exact = get("mgda").coefficients(gramian)
    shortest = exact @ gramian @ exact
    assert (gramian @ exact).min() > (1 - 1e-9) * shortest  # the condition of optimality, so nothing is shorter

    weights = MGDAWeighting()(gramian)
    assert weights @ gramian @ weights > ratio * shortest
    weights = MGDAWeighting(epsilon=1e-9, max_iters=10_000)(gramian)  # 100 times the work
    assert weights @ gramian @ weights > 1.0005 * shortest


def test_the_amortised_step_is_scale_free_too():
    rows = 1e-7 * ROWS
    x = nn.Parameter(torch.zeros(2))
    optimizer = MarbleOptimizer(torch.optim.SGD([x], lr=0.0), refresh_every=2)
    for _ in range(2):
        optimizer.zero_grad()
        report = optimizer.backward(list(rows @ x))
        assert cosine(x.grad, ROWS[0]) == pytest.approx(0.0553, abs=1e-4)
        optimizer.step()
    assert not report.refreshed
