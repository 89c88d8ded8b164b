import threading

import numpy as np
import pytest
import torch

from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.rollout import RewardError, collect, score
from integrations.diffusion_nft.sampling import Latents
from tests.integrations.diffusion_nft.miniature import Darkness, Redness

PROMPTS = [
    Prompt("red circle"),
    Prompt('text "A"'),
    Prompt("two blue squares"),
    Prompt('text "B"'),
    Prompt("red circle"),
]
REWARDS = {"redness": Redness(), "darkness": Darkness()}


@pytest.fixture
def latents(pipeline):
    return Latents(pipeline, None, 8)


def rollout(latents, batch, rewards=REWARDS, **options):
    start = torch.randn(len(PROMPTS), *latents.shape, generator=torch.Generator().manual_seed(0))
    return collect(latents, rewards, PROMPTS, start, steps=2, sampler="euler", batch=batch, **options)


def test_pictures_and_rewards_are_in_order_whatever_the_batch(latents):
    whole, parts = rollout(latents, 5), rollout(latents, 2)
    assert parts.images.shape == (5, 16, 16, 3)
    assert parts.images.dtype == np.uint8
    torch.testing.assert_close(whole.latents, parts.latents, rtol=1e-4, atol=1e-5)
    expected = score(REWARDS, parts.images, PROMPTS)
    torch.testing.assert_close(parts.rewards, expected, equal_nan=True)
    assert parts.rewards.isnan().tolist()[1] == [True, False, True, False, True]


def test_rewards_run_beside_the_sampling(latents):
    threads = []

    def reward(images, prompts):
        threads.append(threading.current_thread())
        return np.zeros(len(prompts))

    rollout(latents, 2, {"thread": reward})
    assert len(threads) == 3
    assert threading.main_thread() not in threads


def test_a_failing_reward_is_named(latents):
    def reward(images, prompts):
        raise ZeroDivisionError("no weights")

    with pytest.raises(RewardError, match="'broken' failed: ZeroDivisionError: no weights"):
        rollout(latents, 2, {"broken": reward})


@pytest.mark.parametrize("values", [np.zeros(3), np.full(5, np.inf), np.zeros((5, 1))])
def test_a_wrong_result_is_named(values):
    with pytest.raises(RewardError, match="'odd' must return 5 finite numbers"):
        score({"odd": lambda images, prompts: values}, np.zeros((5, 4, 4, 3), np.uint8), PROMPTS)


def test_check_can_stop_between_batches(latents):
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(latents, 2, check=check)
    assert len(calls) == 2
