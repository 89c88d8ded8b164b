import numpy as np
import pytest
import torch

from integrations.diffusion_nft.evaluation import HeldOut, compare, mean_and_error, spread
from integrations.diffusion_nft.sampling import Latents
from tests.integrations.diffusion_nft.miniature import stub_rewards

NAN = float("nan")


def test_standard_error_of_single_pictures_is_the_usual_one():
    values = np.random.default_rng(0).normal(size=50)
    mean, error = mean_and_error(values, np.arange(50))
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / 50**0.5)


def test_pictures_of_a_prompt_count_as_one_draw():
    values = np.random.default_rng(0).normal(size=20)
    repeated, groups = np.repeat(values, 7), np.repeat(np.arange(20), 7)
    assert mean_and_error(repeated, groups) == pytest.approx(mean_and_error(values, np.arange(20)))


def test_missing_values_are_left_out():
    values = np.array([1.0, NAN, 3.0, NAN])
    assert mean_and_error(values, np.arange(4)) == pytest.approx((2.0, 1.0))
    assert np.isnan(mean_and_error([NAN], np.zeros(1))).all()
    mean, error = mean_and_error([1.0, 2.0], np.zeros(2))
    assert mean == 1.5
    assert np.isnan(error)


def test_standard_error_covers_the_truth_for_ragged_groups():
    draw = np.random.default_rng(1)
    hits, trials = 0, 400
    for _ in range(trials):
        sizes = draw.integers(1, 5, size=40)
        groups = np.repeat(np.arange(40), sizes)
        values = draw.normal(size=40)[groups] + draw.normal(size=len(groups))
        mean, error = mean_and_error(values, groups)
        hits += abs(mean) < 2 * error
    assert 0.91 < hits / trials < 0.99


def test_compare_is_paired_by_picture():
    before = np.random.default_rng(2).normal(size=30)
    row = compare(before, before + 0.1, np.arange(30))
    assert row["change"] == pytest.approx(0.1)
    assert row["se"] == pytest.approx(0, abs=1e-12)
    assert row["se_unpaired"] == pytest.approx(2**0.5 * before.std(ddof=1) / 30**0.5)
    assert row["pictures"] == 30


def test_measuring_twice_gives_the_same_pictures_and_rewards(config, pipeline):
    latents = Latents(pipeline, None, 8)
    held_out = HeldOut(config, latents, stub_rewards(config.rewards))
    first, second = held_out.measure(), held_out.measure()
    assert np.array_equal(first.images, second.images)
    torch.testing.assert_close(first.rewards, second.rewards, rtol=0, atol=0, equal_nan=True)
    table = held_out.table(first)
    assert list(table) == config.rewards
    assert np.isnan(table["darkness"]).tolist() == [True, True, False, False]


def test_another_evaluation_seed_gives_other_pictures(config, pipeline):
    latents = Latents(pipeline, None, 8)
    other = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"seed": 1})})
    rewards = stub_rewards(config.rewards)
    pictures = [HeldOut(c, latents, rewards).measure().images for c in (config, other)]
    assert not np.array_equal(*pictures)


def held_out_of(config, pipeline, pictures):
    changed = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"pictures": pictures})})
    return HeldOut(changed, Latents(pipeline, None, 8), stub_rewards(config.rewards))


def test_repeats_are_grouped_by_prompt(config, pipeline):
    held_out = held_out_of(config, pipeline, 12)
    assert len(held_out.prompts) == 12
    assert np.bincount(held_out.groups).tolist() == [3, 3, 3, 3]
    for group in range(4):
        assert len({held_out.prompts[i] for i in np.flatnonzero(held_out.groups == group)}) == 1


def test_a_prompt_can_be_given_several_pictures(config, pipeline):
    changed = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"pictures": 12, "images_per_prompt": 4})}
    )
    held_out = HeldOut(changed, Latents(pipeline, None, 8), stub_rewards(["redness"]))
    assert sorted(np.bincount(held_out.groups).tolist()) == [2, 2, 4, 4]


def test_few_pictures_are_equal_shares_of_the_strata(config, pipeline):
    held_out = held_out_of(config, pipeline, 2)
    assert [prompt.quoted is not None for prompt in held_out.prompts] == [False, True]


@pytest.mark.parametrize(("share", "available"), [(5, 2), (2, 5), (7, 7), (1, 9)])
def test_spread_is_even(share, available):
    drawn = [spread(i, share, available) for i in range(share)]
    assert drawn == sorted(drawn)
    assert 0 <= min(drawn) <= max(drawn) < available
    counts = np.bincount(drawn, minlength=available)
    assert counts.max() - counts.min() <= 1
