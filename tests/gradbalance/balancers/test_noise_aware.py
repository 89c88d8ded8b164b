"""Noise-aware balancing: known answers, what it becomes without noise, a slow twin, cvxpy, and attempts to break it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, nnls

from benchmarks.agreement.noise import PAIRS
from gradbalance import BalancedOptimizer
from gradbalance.balancers import Marble, NashMTL, NoiseAware, get
from tests.gradbalance.gradient_zoo import FAMILIES, WELL_POSED, unit, zoo

FAIRNESS = (0.5, 1.0, 3.0, 10.0, math.inf)
every_fairness = pytest.mark.parametrize("fairness", FAIRNESS)


def solve(n, u, fairness=math.inf, **options):
    """λ of a fresh balancer, or of the given one."""
    balancer = fairness if isinstance(fairness, NoiseAware) else NoiseAware(fairness, **options)
    signal = None if u is None else torch.tensor(np.asarray(u), dtype=torch.float64)
    return balancer.coefficients(torch.tensor(np.asarray(n), dtype=torch.float64), signal=signal).numpy()


def progress(u, coefficients):
    """Expected progress of each objective, in units of its own signal."""
    return np.asarray(u) @ coefficients / np.sqrt(np.diag(u))


def length(n, coefficients):
    return math.sqrt(max(coefficients @ np.asarray(n) @ coefficients, 0.0))


def mean_norm(n):
    return np.sqrt(np.diag(n)).mean()


@st.composite
def noisy(draw, max_k=8, spread=0.0, families=WELL_POSED, noises=(0.1, 1.0, 10.0)):
    """N and U of gradients under noise that they share in part; norms are spread over 10^±spread."""
    signals = unit(draw(zoo(families=families, max_k=max_k)))
    signals = signals[np.linalg.norm(signals, axis=1) > 0]
    if not len(signals):
        signals = np.ones((1, 1))
    k = len(signals)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    noise = rng.standard_normal((k, 2 * k + 3)) + rng.standard_normal(2 * k + 3)
    noise *= draw(st.sampled_from(noises)) * rng.uniform(0.3, 1, (k, 1)) / math.sqrt(2 * k + 3)
    units = 10.0 ** rng.uniform(-spread, spread, (k, 1))
    u = (units * signals) @ (units * signals).T
    return u + (units * noise) @ (units * noise).T, u


# --- A slow twin ------------------------------------------------------------------------------------------------------


def twin(n, u, fairness=math.inf, preference=None):
    """The definition, line by line, where all matrices are well-conditioned."""
    norms, wanted = np.sqrt(np.diag(n)), np.ones(len(n))
    if preference is not None:
        wanted = np.array(preference) / np.mean(preference)
    # d = Fᵀλ has ‖d‖² = λᵀNλ; the progress is Gd.
    factor = np.linalg.cholesky(n)
    served = u / np.sqrt(np.diag(u))[:, None] @ np.linalg.inv(factor).T
    if fairness == math.inf:
        # Lawson and Hanson's least distance: the shortest d with Gd ≥ w and λ = F⁻ᵀd ≥ 0.
        rows = np.vstack([served, np.linalg.inv(factor).T * norms[:, None]])
        columns = np.vstack([rows.T, np.append(wanted * abs(served).max(), np.zeros(len(n)))])
        aim = np.append(np.zeros(len(n)), 1.0)
        residual = columns @ nnls(columns, aim)[0] - aim
        d = -residual[:-1] / residual[-1]
    else:
        # Over the logarithms of the progress, which are free. Of the slopes, one is the other times p.
        inverse = np.linalg.inv(served)

        def loss(x):
            d, gained = (
                inverse @ (wanted * np.exp(x)),
                x if fairness == 1 else np.exp((1 - fairness) * x) / (1 - fairness),
            )
            return d @ d / 2 - wanted @ gained

        def slope(x):
            p = wanted * np.exp(x)
            return p * (inverse.T @ inverse @ p) - wanted * np.exp((1 - fairness) * x)

        equal = inverse @ wanted
        start = np.full(len(n), math.log(wanted.sum() / (equal @ equal)) / (1 + fairness))
        d = inverse @ (wanted * np.exp(minimize(loss, start, jac=slope, method="BFGS", options={"gtol": 1e-10}).x))
    d /= np.linalg.norm(d)
    p = served @ d / wanted
    if fairness == math.inf:
        mean = p.min()
    elif fairness <= 1:
        mean = math.exp(wanted @ np.log(p) / wanted.sum())
    else:
        mean = (wanted @ p ** (1 - fairness) / wanted.sum()) ** (1 / (1 - fairness))
    return norms.mean() * mean * np.linalg.solve(factor.T, d)


@settings(max_examples=150, deadline=None)
@given(noisy(max_k=6, families=("many parameters", "shared direction")), st.sampled_from(FAIRNESS), st.booleans())
def test_agrees_with_the_twin(problem, fairness, prefers):
    n, u = problem
    preference = [1.0 + i for i in range(len(n))] if prefers else None
    expected = twin(n, u, fairness, preference)
    np.testing.assert_allclose(
        solve(n, u, fairness, preference=preference), expected, atol=1e-5 * abs(expected).max(), rtol=0
    )


@pytest.mark.parametrize("pair", PAIRS)
def test_agrees_with_cvxpy(pair):
    assert PAIRS[pair]() <= 1e-8


# --- Known answers ----------------------------------------------------------------------------------------------------


@every_fairness
def test_one_objective_is_shortened_by_its_share_of_signal(fairness):
    """λ̂ = 1/√N, p = √(U/N), n̄ = √N."""
    assert solve([[4.0]], [[1.0]], fairness) == pytest.approx([0.5])
    assert solve([[1e-6]], [[0.25e-6]], fairness) == pytest.approx([0.5])


def test_max_min_of_two_signals_that_are_orthogonal():
    """λ_k = t/s_k and t² Σ n_k²/s_k² = 1: with s = (1, 1), n = (3, 4), t = 1/5 and n̄ = 3.5."""
    np.testing.assert_allclose(solve(np.diag([9.0, 16.0]), np.eye(2)), [0.14, 0.14])


def test_max_min_gives_more_noise_the_same_share_but_a_shorter_step():
    quiet, loud = solve(np.diag([1.0, 2.0]), np.eye(2)), solve(np.diag([1.0, 200.0]), np.eye(2))
    assert quiet[1] / quiet[0] == pytest.approx(1)
    assert loud[1] / loud[0] == pytest.approx(1)
    assert progress(np.eye(2), loud).min() / mean_norm(np.diag([1, 200])) < 0.02
    assert progress(np.eye(2), quiet).min() / mean_norm(np.diag([1, 2])) > 0.3


def test_nash_gives_more_noise_less():
    """Each term log p_k − ½ n_k² λ_k² by itself: n_k λ_k all equal, whatever the signals."""
    found = solve(np.diag([9.0, 16.0]), np.diag([1.0, 4.0]), 1.0)
    # λ̂ = (1/3, 1/4)/√2, p = (1/3, 2/4)/√2.
    np.testing.assert_allclose(found, 3.5 * math.sqrt(1 / 12) * np.array([1 / 3, 1 / 4]) / math.sqrt(2))


@pytest.mark.parametrize("a", [0.5, 2.0, 5.0])
def test_fairness_between_the_two_on_orthogonal_signals(a):
    """s_k (s_k λ_k)^−a = n_k² λ_k."""
    n, s = np.array([3.0, 4.0, 1.0]), np.array([1.0, 0.5, 0.7])
    direction = (s ** (1 - a) / n**2) ** (1 / (1 + a))
    direction /= np.linalg.norm(n * direction)
    p = s * direction
    mean = math.exp(np.log(p).mean()) if a <= 1 else (p ** (1 - a)).mean() ** (1 / (1 - a))
    np.testing.assert_allclose(solve(np.diag(n**2), np.diag(s**2), a), n.mean() * mean * direction)


def test_a_signal_that_serves_another_is_left_to_it():
    """The first gradient alone gives both p = (1, .9); the second brings noise of ten times its signal."""
    u = np.array([[1.0, 0.9], [0.9, 1.0]])
    found = solve(u + np.diag([0.0, 100.0]), u)
    assert found[1] / found[0] < 0.02
    assert progress(u, found).min() > 0.89 * length(u + np.diag([0.0, 100.0]), found)
    marble = Marble().coefficients(torch.from_numpy(u + np.diag([0.0, 100.0]))).numpy()
    assert marble[1] / marble[0] > 0.05


def test_a_negative_coefficient_takes_away_noise_that_is_shared():
    u, v = np.array([[1.0, 0.9], [0.9, 1.0]]), np.array([1.0, 3.0])
    n = u + np.outer(v, v)
    nash, max_min = solve(n, u, 1.0), solve(n, u)
    assert nash[1] < 0 < nash[0]
    assert progress(u, nash).min() > 0
    assert max_min.min() >= 0
    assert progress(u, nash).prod() / length(n, nash) ** 2 > 1.2 * progress(u, max_min).prod() / length(n, max_min) ** 2


@settings(max_examples=50, deadline=None)
@given(noisy(families=("many parameters", "shared direction")))
def test_nash_is_the_bargain_between_the_filtered_gradients(problem):
    """ŝ = UN⁻¹g, Wiener's filter, has the Gramian UN⁻¹U; measured by the signals' norms."""
    n, u = problem
    lengths = np.sqrt(np.diag(u))
    filtered = u @ np.linalg.solve(n, u) / np.outer(lengths, lengths)
    shares = NashMTL().coefficients(torch.from_numpy((filtered + filtered.T) / 2)).numpy()
    expected = np.linalg.solve(n, u @ (shares / lengths))
    found = solve(n, u, 1.0)
    np.testing.assert_allclose(found / length(n, found), expected / length(n, expected), rtol=0, atol=1e-7)


# --- Without noise ----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(zoo(spread=3), st.booleans(), st.booleans())
def test_max_min_without_noise_is_marble(gradients, says_so, prefers):
    """Also where λ is not unique."""
    n = gradients @ gradients.T
    preference = [1.0 + i for i in range(len(n))] if prefers else None
    marble = Marble(preference).coefficients(torch.from_numpy(n)).numpy()
    found = solve(n, n if says_so else None, preference=preference)
    norms = np.linalg.norm(gradients, axis=1)
    if np.linalg.norm(marble @ gradients) > 1e-6 * norms.max():
        np.testing.assert_allclose(norms * found, norms * marble, atol=1e-9 * norms.max())
    else:
        assert np.linalg.norm(found @ gradients) <= 1.1e-6 * norms.max()


@settings(max_examples=100, deadline=None)
@given(zoo(families=WELL_POSED, max_k=16, spread=3), st.booleans())
def test_nash_without_noise_is_nash(gradients, says_so):
    n = gradients @ gradients.T
    nash = NashMTL().coefficients(torch.from_numpy(n)).numpy() @ gradients
    found = solve(n, n if says_so else None, 1.0) @ gradients
    np.testing.assert_allclose(unit(found[None]), unit(nash[None]), atol=1e-8)


@every_fairness
def test_a_little_noise_changes_little(fairness):
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((4, 6))
    u = gradients @ gradients.T
    clean = solve(u, u, fairness)
    distances = [
        abs(solve(u + e * np.eye(4), u, fairness) - clean).max() / abs(clean).max() for e in (1e-3, 1e-6, 1e-9)
    ]
    assert distances[0] < 1e-2
    assert distances[1] < 1e-5
    assert distances[2] < 1e-8


# --- What holds for every problem -------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(noisy(max_k=32, spread=7, families=tuple(FAMILIES)), st.sampled_from(FAIRNESS))
def test_everyone_is_expected_to_gain_and_no_step_is_longer_than_the_gradients(problem, fairness):
    n, u = problem
    found = solve(n, u, fairness)
    assert np.isfinite(found).all()
    assert length(n, found) <= mean_norm(n) * (1 + 1e-7)
    assert progress(u, found).min() >= -1e-7 * mean_norm(n)
    if fairness == math.inf:
        assert found.min() >= 0


@settings(max_examples=100, deadline=None)
@given(noisy(), st.integers(0, 1000))
def test_max_min_is_best_for_the_worst(problem, seed):
    n, u = problem
    found = solve(n, u)
    best = progress(u, found).min() / length(n, found)
    norms = np.sqrt(np.diag(n))
    rng = np.random.default_rng(seed)
    for size in (1e-4, 1e-2, 1.0):
        other = np.maximum(found + size * rng.standard_normal((50, len(n))) * abs(found * norms).max() / norms, 0)
        for tried in other[other.any(axis=1)]:
            assert progress(u, tried).min() / length(n, tried) <= best * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(noisy(), st.integers(0, 1000))
def test_nash_has_the_largest_product_of_progresses(problem, seed):
    n, u = problem
    found = solve(n, u, 1.0)
    best = np.log(progress(u, found) / length(n, found)).sum()
    norms = np.sqrt(np.diag(n))
    rng = np.random.default_rng(seed)
    for size in (1e-4, 1e-2, 1.0):
        for tried in found + size * rng.standard_normal((50, len(n))) * abs(found * norms).max() / norms:
            p = progress(u, tried) / length(n, tried)
            assert p.min() <= 0 or np.log(p).sum() <= best + 1e-9


@settings(max_examples=100, deadline=None)
@given(noisy(), st.sampled_from(FAIRNESS), st.integers(0, 1000))
def test_the_units_of_each_loss_leave_the_direction(problem, fairness, seed):
    n, u = problem
    units = 10.0 ** np.random.default_rng(seed).uniform(-7, 7, len(n))
    weights = NoiseAware(fairness).weights(torch.from_numpy(n), signal=torch.from_numpy(u))
    other = NoiseAware(fairness).weights(
        torch.from_numpy(n * np.outer(units, units)), signal=torch.from_numpy(u * np.outer(units, units))
    )
    np.testing.assert_allclose(other, weights, atol=1e-7 * weights.abs().max(), rtol=0)


@settings(max_examples=100, deadline=None)
@given(noisy(), st.sampled_from(FAIRNESS), st.randoms())
def test_exchanging_objectives_exchanges_coefficients(problem, fairness, random):
    n, u = problem
    order = list(range(len(n)))
    random.shuffle(order)
    found = solve(n, u, fairness)
    np.testing.assert_allclose(
        solve(n[np.ix_(order, order)], u[np.ix_(order, order)], fairness), found[order], atol=1e-8 * abs(found).max()
    )


def test_more_and_more_fairness_ends_at_max_min():
    rng = np.random.default_rng(3)
    signals = rng.standard_normal((4, 30)) + 0.3 * rng.standard_normal(30)
    u = signals @ signals.T
    n = u + np.diag(rng.uniform(10, 100, 4))
    worst = [(progress(u, f) / length(n, f)).min() for a in FAIRNESS for f in [solve(n, u, a)]]
    assert worst == sorted(worst)
    assert worst[-2] > 0.95 * worst[-1] > worst[0]
    assert solve(n, u).min() > 0  # else it would not be where they lead to: their λ may be negative


@pytest.mark.parametrize("fairness", [1.0, math.inf])
@pytest.mark.parametrize("angle", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_two_signals_that_are_nearly_opposite(fairness, angle, noise):
    """By symmetry λ ∝ (1, 1); p = c/√(2c + 2·noise), c = 1 + cos(π − angle); the step fades with the last agreement."""
    signals = np.array([[1.0, 0.0], [-math.cos(angle), math.sin(angle)]])
    u = signals @ signals.T
    n = u + noise * np.eye(2)
    common = 1 - math.cos(angle)
    found = solve(n, u, fairness)
    expected = math.sqrt(1 + noise) * common / (2 * common + 2 * noise)
    np.testing.assert_allclose(found, [expected, expected], rtol=1e-2, atol=1e-12)


def test_preference_of_max_min_is_progress():
    u = np.diag([1.0, 4.0, 9.0])
    p = progress(u, solve(u + np.diag([3.0, 2.0, 1.0]), u, preference=[3, 2, 1]))
    np.testing.assert_allclose(p / p[2], [3, 2, 1])


def test_preference_of_nash_is_bargaining_power():
    """Σ w_k log p_k − ½ Σ n_k² λ_k²: n_k λ_k = √w_k."""
    n = np.diag([9.0, 16.0])
    found = solve(n, np.diag([1.0, 4.0]), 1.0, preference=[4, 1])
    assert found[0] * 3 / (found[1] * 4) == pytest.approx(2)


# --- Nothing to agree on ----------------------------------------------------------------------------------------------


@every_fairness
def test_opposite_signals_stop_everyone(fairness):
    """The third has a signal of its own, but no step serves the first two."""
    u = np.array([[4.0, -2.0, 0.0], [-2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert solve(u + np.eye(3), u, fairness).tolist() == [0, 0, 0]


@every_fairness
@pytest.mark.parametrize("k", [2, 3, 5, 16, 32])
def test_a_combination_of_signals_that_vanishes(fairness, k):
    rng = np.random.default_rng(k)
    signals = rng.standard_normal((k, 3 * k))
    signals[-1] = -rng.uniform(0.1, 1, k - 1) @ signals[:-1]
    u = signals @ signals.T
    found = solve(u + np.diag(rng.uniform(1, 100, k)), u, fairness)
    assert abs(found).max() < 1e-6


def test_hold_keeps_the_last_weights():
    agree, opposed = np.array([[1.0, 0.2], [0.2, 1.0]]), np.array([[1.0, -1.0], [-1.0, 1.0]])
    noise = np.diag([3.0, 1.0])
    balancer = NoiseAware(stationary="hold")
    assert solve(opposed + noise, opposed, balancer).tolist() == [0, 0]  # nothing to hold yet
    first = solve(agree + noise, agree, balancer)
    assert first.min() > 0
    np.testing.assert_allclose(solve(opposed + noise, opposed, balancer), first, rtol=1e-12)
    np.testing.assert_allclose(  # relative to the gradients' norms
        solve(100 * (opposed + noise), 100 * opposed, balancer), first, rtol=1e-12
    )
    units = np.diag([1.0, 10.0])
    np.testing.assert_allclose(
        solve(units @ (opposed + noise) @ units, units @ opposed @ units, balancer)
        / mean_norm(units @ (opposed + noise) @ units),
        first / [1, 10] / mean_norm(opposed + noise),
        rtol=1e-12,
    )


def test_what_is_held_survives_a_restart_and_the_absence_of_an_objective():
    agree, opposed = np.array([[1.0, 0.2], [0.2, 1.0]]), np.array([[1.0, -1.0], [-1.0, 1.0]])
    balancer, twin_ = NoiseAware(stationary="hold"), NoiseAware(stationary="hold")
    first = solve(agree + np.eye(2), agree, balancer)
    alone = np.array([[2.0, 0.0], [0.0, 0.0]])
    assert solve(alone, agree, balancer).tolist() == [pytest.approx(math.sqrt(0.5)), 0.0]
    twin_.load_state_dict(balancer.state_dict())
    held = solve(opposed + np.eye(2), opposed, twin_)
    assert held[1] == pytest.approx(first[1])  # as it was when last seen
    assert held[0] == pytest.approx(math.sqrt(0.5))


def test_stop_remembers_nothing():
    balancer = NoiseAware()
    solve(np.eye(2), None, balancer)
    assert balancer.state_dict() == {"last": []}


# --- Attempts to break it ---------------------------------------------------------------------------------------------


@every_fairness
@pytest.mark.parametrize("unseen", [0.0, -0.3, 1e-15])
def test_an_objective_without_signal_leaves_the_problem(fairness, unseen):
    u = np.array([[1.0, 0.3, 0.1], [0.3, 1.0, 0.1], [0.1, 0.1, unseen]])
    n = np.diag([2.0, 3.0, 4.0])
    weights = NoiseAware(fairness).weights(torch.from_numpy(n), signal=torch.from_numpy(u))
    assert weights[2] == 0
    alone = NoiseAware(fairness).weights(torch.from_numpy(n[:2, :2]), signal=torch.from_numpy(u[:2, :2]))
    np.testing.assert_allclose(weights[:2], alone, rtol=1e-12)


@every_fairness
def test_no_signal_at_all(fairness):
    assert solve(np.eye(3), np.zeros((3, 3)), fairness).tolist() == [0, 0, 0]


@every_fairness
def test_an_absent_objective_may_have_a_signal(fairness):
    u = np.array([[1.0, 0.3, 0.1], [0.3, 1.0, 0.1], [0.1, 0.1, 1.0]])
    n = np.diag([2.0, 3.0, 0.0])
    found = solve(n, u, fairness)
    assert found[2] == 0
    np.testing.assert_allclose(found[:2], solve(n[:2, :2], u[:2, :2], fairness), rtol=1e-12)


@every_fairness
def test_a_correlation_beyond_1_counts_as_1(fairness):
    n = np.diag([3.0, 4.0])
    found = solve(n, [[1.0, 2.0], [2.0, 1.0]], fairness)
    np.testing.assert_allclose(found, solve(n, [[1.0, 1.0], [1.0, 1.0]], fairness), rtol=1e-6)


@every_fairness
def test_a_signal_with_more_in_common_than_the_gradients(fairness):
    """N says that g_1 + g_2 vanishes, U that it serves both. N becomes U + ¾ (1, −1)(1, −1)ᵀ: p = 1.5/√3, λ = p/√3."""
    found = solve([[1.0, -1.0], [-1.0, 1.0]], [[1.0, 0.5], [0.5, 1.0]], fairness)
    np.testing.assert_allclose(found, [0.5, 0.5], rtol=1e-9)


@settings(max_examples=200, deadline=None)
@given(zoo(max_k=32, spread=7), st.integers(0, 2**32 - 1), st.sampled_from(FAIRNESS))
def test_any_symmetric_matrix_may_be_called_a_signal(gradients, seed, fairness):
    n = gradients @ gradients.T
    u = np.random.default_rng(seed).standard_normal(n.shape) * np.sqrt(np.outer(n.diagonal(), n.diagonal()))
    found = solve(n, u + u.T, fairness)
    assert np.isfinite(found).all()
    active = np.diag(n) > 0
    assert not active.any() or length(n, found) <= np.sqrt(np.diag(n)[active]).mean() * (1 + 1e-7)


@settings(max_examples=100, deadline=None)
@given(zoo(families=("many parameters",), min_k=2, max_k=16), st.integers(0, 2**32 - 1), st.sampled_from(FAIRNESS))
def test_raw_cross_products_of_two_halves(gradients, seed, fairness):
    """Unbiased and, at this noise, indefinite; their N − U is the Gramian of the halves' difference."""
    rng = np.random.default_rng(seed)
    one, other = (gradients + 3 * rng.standard_normal(gradients.shape) for _ in range(2))
    n, u = (one + other) @ (one + other).T / 4, (one @ other.T + other @ one.T) / 2
    found = solve(n, u, fairness)
    assert np.isfinite(found).all()
    assert length(n, found) <= mean_norm(n) * (1 + 1e-7)


@pytest.mark.parametrize("k", [2, 5, 32])
@pytest.mark.parametrize("apart", [0.0, 1e-12, 1e-8, 1e-4])
@every_fairness
def test_near_copies_share(fairness, k, apart):
    """All signals nearly one, each under noise of its own: λ as for a common mean, n_k λ_k = w_k √N_kk ∝ 1/n_k."""
    rng = np.random.default_rng(0)
    signals = np.ones((k, 1)) * rng.standard_normal(3 * k) + apart * rng.standard_normal((k, 3 * k))
    u = signals @ signals.T
    noise = rng.uniform(1, 4, k) * u[0, 0]
    found = solve(u + np.diag(noise), u, fairness)
    np.testing.assert_allclose(found * noise / (found @ noise / k), 1, rtol=100 * apart + 1e-6)


def test_through_the_optimizer_without_an_estimate_it_is_marble():
    updates = []
    for name in ("noise_aware", "marble"):
        w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer = BalancedOptimizer(torch.optim.SGD([w], lr=1.0), name)
        optimizer.backward([w[0] + w[1], 10 * w[1] - w[0], w[2] - 0.1 * w[0]])
        updates.append(w.grad.clone())
    torch.testing.assert_close(*updates, rtol=1e-12, atol=0.0)


# --- Wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 0.1, 11, -math.inf, math.nan, "max_min", True])
def test_a_bad_fairness(value):
    with pytest.raises(ValueError, match=r"fairness must be a number in \[0\.5, 10\] or math\.inf, got"):
        NoiseAware(value)


def test_a_bad_answer_to_stationarity():
    with pytest.raises(ValueError, match="stationary must be one of 'stop', 'hold', got 'wait'"):
        get("noise_aware", stationary="wait")


@pytest.mark.parametrize("preference", [[1.0, 0.0], [math.nan, 1.0], []])
def test_a_bad_preference(preference):
    with pytest.raises(ValueError, match="preference must hold one finite number > 0 per objective, got"):
        NoiseAware(preference=preference)


def test_a_preference_of_another_length():
    with pytest.raises(ValueError, match="preference has 2 values, but there are 3 objectives"):
        NoiseAware(preference=[1, 2]).coefficients(torch.eye(3))


@pytest.mark.parametrize(
    ("signal", "error", "message"),
    [
        (torch.eye(3), ValueError, r"signal must have the gramian's shape \(2, 2\), got \(3, 3\)"),
        (torch.eye(2, dtype=torch.int64), TypeError, "signal must be a real floating-point tensor .* got torch.int64"),
        ([[1.0, 0.0], [0.0, 1.0]], TypeError, "signal must be a real floating-point tensor .* got list"),
        (torch.tensor([[1.0, 0.0], [math.nan, 1.0]]), ValueError, "signal has non-finite values in row 1"),
        (torch.tensor([[math.inf, 0.0], [0.0, -math.inf]]), ValueError, "signal has non-finite values in row 0"),
    ],
)
def test_a_bad_signal(signal, error, message):
    with pytest.raises(error, match=message):
        NoiseAware().coefficients(torch.eye(2), signal=signal)
