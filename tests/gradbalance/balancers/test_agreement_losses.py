"""The balancers that look at losses, chance or norms agree with independent implementations."""

import pytest
import torch
from torchjd.aggregation import ExcessMTLWeighting
from torchjd.scalarization import DWA as TorchjdDWA

from benchmarks.agreement.losses import PAIRS
from gradbalance.balancers import DWA, ExcessMTL


@pytest.mark.parametrize("pair", PAIRS, ids=" / ".join)
def test_agreement(pair):
    assert PAIRS[pair]() <= 1e-6


def test_torchjd_takes_a_negative_loss_that_improves_for_one_that_gets_worse():
    """Its ratio of −2 to −1 is 2, as that of a positive loss that doubles; ours is 0, as it fell by its own size."""
    older, newer = torch.tensor([-1.0, 1.0]), torch.tensor([-2.0, 1.0])
    theirs = TorchjdDWA()
    for losses in (older, newer):
        theirs(losses)
        theirs.step()
    values = torch.ones(2, requires_grad=True)
    worse, steady = torch.autograd.grad(theirs(values), values)[0].tolist()
    assert worse > steady
    ours = DWA(period=1)
    for losses in (older, newer):
        ours.coefficients(torch.eye(2), losses)
    better, steady = ours.coefficients(torch.eye(2), newer).tolist()
    assert better < steady


def test_without_warm_up_torchjd_is_decided_by_the_units_of_the_first_gradients():
    """As published code is; ours starts uniform whatever the units."""
    gradients = torch.tensor([[100.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert ExcessMTLWeighting()(gradients)[1] < 1e-40
    assert ExcessMTL().coefficients(gradients @ gradients.T).tolist() == [0.5, 0.5]


def test_per_parameter_accumulators_see_more_than_norms():
    """Two gradients of one length: in torchjd, the one whose entries alternate has the larger excess risk."""
    alternating = torch.tensor([[1e3, 0.0], [0.0, 1e3]], dtype=torch.float64)
    theirs, ours = ExcessMTLWeighting(n_warmup_steps=1), ExcessMTL()
    for call in range(2):
        gradients = torch.stack([alternating[call], alternating[0]])
        expected, found = theirs(gradients), ours.coefficients(gradients @ gradients.T)
    assert expected[0] > expected[1]
    assert found.tolist() == pytest.approx([0.5, 0.5])
