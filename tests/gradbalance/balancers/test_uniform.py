"""Uniform weights."""

import math

import pytest
import torch

from gradbalance.balancers import Uniform


def test_one_over_k():
    assert Uniform().coefficients(torch.zeros(4, 4)).tolist() == [0.25] * 4


def test_absent_objectives_leave_their_share():
    found = Uniform().coefficients(torch.eye(4), torch.tensor([1.0, math.nan, 2.0, -3.0]))
    assert found.tolist() == pytest.approx([1 / 3, 0.0, 1 / 3, 1 / 3])
