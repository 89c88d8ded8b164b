"""The weighted sum gives back its weights."""

import math

import pytest
import torch

from gradbalance.balancers import WeightedSum


def test_default_is_the_plain_sum():
    assert WeightedSum().coefficients(torch.eye(3)).tolist() == [1.0, 1.0, 1.0]


def test_weights_whatever_the_gradients():
    for m in (torch.eye(3), torch.ones(3, 3), torch.zeros(3, 3)):
        assert WeightedSum([0.5, -2, 3]).coefficients(m).tolist() == [0.5, -2.0, 3.0]
    assert WeightedSum(torch.tensor([0.5, 2.0])).coefficients(torch.eye(2)).tolist() == [0.5, 2.0]


def test_the_result_is_a_copy():
    balancer = WeightedSum([1.0, 2.0])
    balancer.coefficients(torch.eye(2)).zero_()
    assert balancer.coefficients(torch.eye(2)).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("weights", [[math.nan, 1.0], [math.inf], [], [[1.0]], 2.0])
def test_bad_weights(weights):
    with pytest.raises(ValueError, match="weights must hold one finite number per objective, got"):
        WeightedSum(weights)


def test_weights_of_another_length():
    with pytest.raises(ValueError, match="weights has 2 values, but there are 3 objectives"):
        WeightedSum([1, 2]).coefficients(torch.eye(3))
