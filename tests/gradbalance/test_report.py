import json
import math

import pytest
import torch

from gradbalance import BalancedOptimizer, MarbleOptimizer
from tests.gradbalance.models import LinearLosses


def report_of(rows, balancer=None, losses=None, **options):
    problem = LinearLosses(rows)
    inner = torch.optim.SGD([problem.x], lr=0.0)
    optimizer = MarbleOptimizer(inner, **options) if balancer is None else BalancedOptimizer(inner, balancer, **options)
    return optimizer.backward(problem.losses() if losses is None else losses(problem))


def test_fields_of_two_gradients_at_120_degrees():
    report = report_of([[10.0, 0.0], [-0.5, 3**0.5 / 2]])
    assert report.names == ["objective_0", "objective_1"]
    assert report.losses.tolist() == [0.0, 0.0]
    torch.testing.assert_close(report.gramian, torch.tensor([[100.0, -5.0], [-5.0, 1.0]], dtype=torch.float64))
    assert report.gradient_norms.tolist() == pytest.approx([10.0, 1.0])
    assert report.cosines.tolist() == [pytest.approx([1.0, -0.5]), pytest.approx([-0.5, 1.0])]
    assert report.weights.tolist() == pytest.approx([0.5, 0.5])
    assert report.coefficients.tolist() == pytest.approx([0.275, 2.75])
    assert report.update_cosines.tolist() == pytest.approx([0.5, 0.5])
    assert report.min_cosine == pytest.approx(0.5)
    assert (report.conflicts, report.refreshed, report.absent, report.inactive, report.skipped) == (0, True, [], [], [])


def test_a_plain_sum_shows_its_conflict():
    report = report_of([[10.0, 0.0], [-0.5, 3**0.5 / 2]], "weighted_sum")
    assert report.conflicts == 1
    assert report.min_cosine == pytest.approx((1 - 5) / math.sqrt(100 + 1 - 10))
    assert report.weights.tolist() == pytest.approx([10 / 11, 1 / 11])


def test_absent_and_inactive_objectives():
    rows = [[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]
    report = report_of(rows, losses=lambda p: [p.losses()[0], None, p.losses()[2]])
    assert (report.absent, report.inactive) == (["objective_1"], ["objective_2"])
    assert report.losses.isnan().tolist() == [False, True, False]
    assert report.update_cosines.isnan().tolist() == [False, True, True]
    assert report.min_cosine == pytest.approx(1.0)


def test_as_dict_is_flat_floats_with_stable_keys():
    some = report_of([[1.0, 0.0], [0.0, 2.0]]).as_dict()
    other = report_of([[1.0, 0.0], [0.0, 2.0]], losses=lambda p: [p.losses()[0], None]).as_dict()
    assert some.keys() == other.keys()
    assert all(type(value) is float for value in some.values())
    assert some["balance/coefficient/objective_1"] == pytest.approx(1.5 * 0.5 / 2)
    assert some["balance/cosine/objective_0|objective_1"] == 0.0
    assert math.isnan(other["balance/loss/objective_1"])
    json.dumps(some, allow_nan=False)
    assert "x/min_cosine" in report_of([[1.0, 0.0]]).as_dict(prefix="x/")


def test_update_cosines_survive_norms_over_many_orders():
    report = report_of([[1e-9, 0.0], [0.0, 1e9]])
    assert report.update_cosines.tolist() == pytest.approx([0.5**0.5] * 2)


def test_losses_add_up_over_micro_batches_and_are_read_late():
    problem = LinearLosses([[1.0, 0.0], [0.0, 2.0]])
    optimizer = MarbleOptimizer(torch.optim.SGD([problem.x], lr=0.0))
    assert optimizer.report is None
    assert optimizer.backward([loss + 1 for loss in problem.losses()], accumulate=True).losses.tolist() == [1.0, 1.0]
    assert optimizer.report is None
    report = optimizer.backward([loss + 2 for loss in problem.losses()])
    assert optimizer.report is report
    assert report.losses.tolist() == [3.0, 3.0]
    assert "refreshed" in repr(report)
