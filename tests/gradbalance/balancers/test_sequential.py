"""A schedule by hand."""

import pytest
import torch

from gradbalance.balancers import Sequential


def test_the_stages_follow_each_other_and_the_last_goes_on():
    balancer = Sequential([(2, [1, 0]), (1, [0.5, 0.5]), (1, torch.tensor([0.0, 2.0]))])
    found = [balancer.coefficients(torch.eye(2)).tolist() for _ in range(6)]
    assert found == [[1.0, 0.0]] * 2 + [[0.5, 0.5]] + [[0.0, 2.0]] * 3


def test_a_resumed_schedule_goes_on_where_it_was():
    balancer, twin = (Sequential([(2, [1, 0]), (1, [0, 1])]) for _ in range(2))
    balancer.coefficients(torch.eye(2))
    balancer.coefficients(torch.eye(2))
    assert balancer.state_dict() == {"calls": 2}
    twin.load_state_dict({"calls": 2})
    assert twin.coefficients(torch.eye(2)).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("stages", [[], [1, 2], [(1, [1.0], 3)], 5, None])
def test_not_pairs(stages):
    with pytest.raises(ValueError, match=r"stages must be pairs \(calls, weights\) like .*, got"):
        Sequential(stages)


def test_bad_calls():
    with pytest.raises(ValueError, match="calls of stage 1 must be an integer ≥ 1, got 0"):
        Sequential([(1, [1.0]), (0, [1.0])])


def test_bad_weights():
    with pytest.raises(ValueError, match="weights of stage 0 must hold one finite number per objective"):
        Sequential([(1, [float("nan")])])


def test_weights_of_another_length():
    with pytest.raises(ValueError, match="weights of stage 0 has 2 values, but there are 3 objectives"):
        Sequential([(1, [1.0, 2.0])]).coefficients(torch.eye(3))
