"""EPO: both linear programs on examples worked out by hand, where descent ends, and scipy as an oracle."""

import math

import numpy as np
import pytest
import torch

from benchmarks.agreement.solving import PAIRS
from gradbalance.balancers import EPO
from tests.gradbalance.gradient_zoo import gramian


def _coefficients(gradients, losses, **options):
    return EPO(**options).coefficients(gramian(gradients), torch.tensor(losses, dtype=torch.float64)).numpy()


def test_the_larger_loss_is_balanced_alone():
    """Orthogonal gradients: the anchor has a_1 > 0 > a_2, so ⟨d, Σ a_k g_k⟩ is largest at λ = (1, 0)."""
    np.testing.assert_allclose(_coefficients(np.eye(2), [3.0, 1.0]), [1.0, 0.0])


def test_balancing_lets_the_smaller_loss_rise():
    gradients = np.array([[1.0, 0.0], [-0.8, 0.6]])
    update = _coefficients(gradients, [3.0, 1.0]) @ gradients
    assert gradients[0] @ update > 0 > gradients[1] @ update


def test_a_preference_moves_the_balance():
    """With p = (1, 6) it is the second weighted loss, 6 against 3, that is too large."""
    np.testing.assert_allclose(_coefficients(np.eye(2), [3.0, 1.0], preference=[1.0, 6.0]), [0.0, 1.0])


def test_only_ratios_of_the_preference_matter():
    gradients = np.random.default_rng(0).standard_normal((4, 3))
    losses = [1.0, 2.0, 3.0, 4.0]
    one, other = (_coefficients(gradients, losses, preference=p) for p in ([1, 2, 3, 1], [10, 20, 30, 10]))
    np.testing.assert_allclose(one, other, atol=1e-12)


def test_in_balance_the_losses_descend_together():
    """Norms 1 and 2, cosine −½: Σ_k ⟨g_k, d⟩ = 3 λ_2 has its largest value where 4 λ_2 ≥ λ_1 ≥ λ_2 stops it: (½, ½)."""
    gradients = np.array([[1.0, 0.0], [-1.0, math.sqrt(3)]])
    np.testing.assert_allclose(_coefficients(gradients, [1.0, 1.0]), [0.5, 0.5])


def test_tolerance_says_where_balance_ends():
    """Shares (0.6, 0.4) have μ = 0.0201; the second gradient is longer, so descent prefers it and balance does not."""
    gradients = np.diag([1.0, 2.0])
    np.testing.assert_allclose(_coefficients(gradients, [0.6, 0.4], tolerance=0.020), [1.0, 0.0])
    assert _coefficients(gradients, [0.6, 0.4], tolerance=0.021)[1] > 0.1


def test_descent_that_cannot_keep_the_proportion_leaves_it():
    """Nearly opposite gradients: every common descent brings the losses a little further apart."""
    gradients = np.array([[1.0, 0.0], [-1.0, 0.1]])
    update = _coefficients(gradients, [1.01, 1.0], tolerance=1.0) @ gradients
    assert (gradients @ update).min() >= -1e-12
    assert np.linalg.norm(update) > 0


@pytest.mark.parametrize("preference", [[1.0, 1.0], [1.0, 4.0], [5.0, 1.0]])
@pytest.mark.parametrize("start", [[0.0, 2.0], [1.0, -0.5], [-0.9, 0.1]])
def test_descent_ends_on_the_pareto_front_in_the_wanted_proportion(preference, start):
    """L_k = ‖x − c_k‖²: the front is the segment between the c_k, and on it √p_1 ‖x − c_1‖ = √p_2 ‖x − c_2‖."""
    centres = np.array([[-1.0, 0.0], [1.0, 0.0]])
    balancer = EPO(preference, tolerance=1e-3)
    x = np.array(start)
    for step in range(2000):
        gradients = 2 * (x - centres)
        losses = torch.from_numpy((gradients**2).sum(1) / 4)
        x = x - 0.05 / (1 + step / 20) * balancer.coefficients(gramian(gradients), losses).numpy() @ gradients
    roots = np.sqrt(preference)
    wanted = (roots[1] - roots[0]) / roots.sum()
    np.testing.assert_allclose(x, [wanted, 0.0], atol=0.03)


def test_before_the_minimum_of_a_single_loss_it_heads_for_it():
    """x = −1.01 between loss minima at ∓1: the first loss is too small already, yet only its gradient is followed."""
    gradients = 2 * np.array([[-1.01 + 1.0], [-1.01 - 1.0]])
    np.testing.assert_allclose(_coefficients(gradients, [0.01**2, 2.01**2]), [1.0, 0.0])


def test_exchanging_objectives_exchanges_the_coefficients():
    """Where the program has one solution, as it has in general."""
    gradients = np.random.default_rng(0).standard_normal((6, 20))
    losses, order = np.arange(1.0, 7.0), [3, 1, 5, 0, 2, 4]
    for tolerance in (1e-4, 10.0):
        plain = _coefficients(gradients, losses, tolerance=tolerance)
        exchanged = _coefficients(gradients[order], losses[order], tolerance=tolerance)
        np.testing.assert_allclose(exchanged, plain[order], atol=1e-12)


@pytest.mark.parametrize("losses", [[0.0, 1.0], [0.0, 0.0]])
def test_a_loss_of_zero(losses):
    assert _coefficients(np.eye(2), losses).sum() == pytest.approx(1)


def test_an_absent_objective_leaves_the_proportion_to_the_others():
    gradients = np.random.default_rng(0).standard_normal((3, 5))
    without = _coefficients(gradients[[0, 2]], [1.0, 2.0], preference=[1.0, 3.0])
    gradients[1] = 0
    found = _coefficients(gradients, [1.0, math.nan, 2.0], preference=[1.0, 5.0, 3.0])
    np.testing.assert_allclose(found[[0, 2]], without)
    assert found[1] == 0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_loss_that_is_not_a_size(value):
    with pytest.raises(ValueError, match=r"EPO needs losses ≥ 0, got .* for objective 1"):
        _coefficients(np.eye(2), [1.0, value])


def test_losses_missing():
    with pytest.raises(ValueError, match="EPO needs the loss values: pass losses"):
        EPO().coefficients(torch.eye(2))


def test_bad_options():
    with pytest.raises(ValueError, match="preference must hold one finite number > 0 per objective"):
        EPO(preference=[1.0, 0.0])
    with pytest.raises(ValueError, match=r"tolerance must be a number in \[0, ∞\)"):
        EPO(tolerance=-1.0)
    with pytest.raises(ValueError, match="preference has 2 values, but there are 3 objectives"):
        EPO(preference=[1.0, 2.0]).coefficients(torch.eye(3), torch.ones(3))


@pytest.mark.parametrize("mode", ["balance", "descent"])
def test_agrees_with_scipy(mode):
    assert PAIRS[f"epo, {mode}", "scipy"]() < 1e-6
