"""DB-MTL: log losses and equal norms."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from gradbalance.balancers import DBMTL
from tests.gradbalance.balancers.catalogue import losses_of
from tests.gradbalance.gradient_zoo import WELL_POSED, cosines, gramian, zoo


def test_by_hand():
    """Norms 2 and 3, losses 1 and 6: the log losses have norms 2 and ½, so both become 2."""
    m = torch.diag(torch.tensor([4.0, 9.0]))
    assert DBMTL().coefficients(m, torch.tensor([1.0, 6.0])).tolist() == pytest.approx([1.0, 2 / 3])


@settings(max_examples=30, deadline=None)
@given(gradients=zoo(families=WELL_POSED, spread=3))
def test_every_part_of_the_update_has_the_length_of_the_longest_log_gradient(gradients):
    losses = losses_of(gradients)
    found = DBMTL().coefficients(gramian(gradients), losses).numpy()
    norms = np.linalg.norm(gradients, axis=1)
    np.testing.assert_allclose(found * norms, (norms / losses.numpy()).max(), rtol=1e-9)


def test_the_update_does_not_change_when_a_loss_is_multiplied():
    rng = np.random.default_rng(0)
    gradients, losses, factors = rng.standard_normal((4, 9)), rng.uniform(0.5, 2, 4), 10.0 ** rng.uniform(-6, 6, 4)
    plain = DBMTL().coefficients(gramian(gradients), torch.from_numpy(losses)).numpy() @ gradients
    scaled = factors[:, None] * gradients
    found = DBMTL().coefficients(gramian(scaled), torch.from_numpy(factors * losses)).numpy() @ scaled
    np.testing.assert_allclose(found, plain)


@settings(max_examples=30, deadline=None)
@given(gradients=zoo(families=WELL_POSED, min_k=2, max_k=2, spread=3))
def test_two_objectives_never_conflict(gradients):
    assert cosines(DBMTL().coefficients(gramian(gradients), losses_of(gradients)), gradients).min() > -1e-9


def test_three_may_conflict():
    gradients = np.array([[1.0, 0.0], [-0.9, 0.1], [-0.9, -0.1]])
    assert cosines(DBMTL().coefficients(gramian(gradients), torch.ones(3)), gradients).min() < -0.9


def test_a_loss_of_zero_is_left_out_of_the_maximum():
    m = torch.diag(torch.tensor([4.0, 9.0]))
    assert DBMTL().coefficients(m, torch.tensor([1.0, 0.0])).tolist() == pytest.approx([1.0, 2 / 3])
    assert DBMTL().coefficients(m, torch.zeros(2)).tolist() == [0.0, 0.0]
