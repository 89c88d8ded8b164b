"""One objective only."""

import pytest
import torch

from gradbalance.balancers import Specialist


def test_the_one_objective():
    assert Specialist(2).coefficients(torch.ones(4, 4)).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_too_few_objectives():
    with pytest.raises(ValueError, match="index is 2, but there are 2 objectives, counted from 0"):
        Specialist(2).coefficients(torch.eye(2))


@pytest.mark.parametrize("index", [-1, 1.0, True])
def test_bad_index(index):
    with pytest.raises(ValueError, match="index must be an integer ≥ 0, got"):
        Specialist(index)
