import math

import numpy as np
import pytest
import torch

from integrations.diffusion_nft.sampling import Latents, integrate

TEXTS = ["red circle", 'text "A"', "two blue squares"]


@pytest.fixture
def latents(pipeline):
    return Latents(pipeline, None, 8)


@pytest.fixture
def start(latents):
    return torch.randn(len(TEXTS), *latents.shape, generator=torch.Generator().manual_seed(0))


def test_euler_and_decode_give_what_the_pipeline_gives(pipeline, latents, start):
    settings = {"guidance_scale": 1.0, "num_inference_steps": 4, "max_sequence_length": 8}
    expected = pipeline(TEXTS, latents=start.clone(), output_type="latent", **settings).images
    clean = latents.sample(TEXTS, start, 4, "euler")
    torch.testing.assert_close(clean, expected, rtol=1e-5, atol=1e-5)
    pictures = pipeline(TEXTS, latents=start.clone(), output_type="pil", **settings).images
    difference = latents.decode(clean).astype(int) - np.stack([np.asarray(picture) for picture in pictures])
    assert np.abs(difference).max() <= 1


def test_a_picture_does_not_depend_on_its_batch(latents, start):
    whole = latents.sample(TEXTS, start, 3, "dpm2")
    alone = latents.sample(TEXTS[1:2], start[1:2], 3, "dpm2")
    torch.testing.assert_close(whole[1:2], alone, rtol=1e-4, atol=1e-5)


def test_texts_are_embedded_once(pipeline, latents, monkeypatch):
    latents.embed(TEXTS)
    monkeypatch.setattr(pipeline, "encode_prompt", lambda *args, **kwargs: pytest.fail("embedded again"))
    embeds, pooled = latents.embed([TEXTS[2], TEXTS[0], TEXTS[0]])
    assert len(embeds) == len(pooled) == 3
    assert torch.equal(embeds[1], embeds[2])
    assert not torch.equal(embeds[0], embeds[1])


def test_dpm2_follows_the_published_recursion():
    def velocity(z, sigma):
        return torch.sin(3 * z) + sigma

    levels = torch.tensor([0.98, 0.8, 0.55, 0.3, 0.1, 0.0], dtype=torch.float64)
    z = torch.linspace(-1, 1, 5, dtype=torch.float64)
    result = integrate(velocity, z.clone(), levels, second_order=True)

    def lam(sigma):
        return math.log((1 - sigma) / sigma) if sigma > 0 else math.inf

    s = levels.tolist()
    predictions = []
    for i in range(5):
        predictions.append(z - s[i] * velocity(z, s[i]))
        h = lam(s[i + 1]) - lam(s[i])
        data = predictions[-1]
        if 0 < i < 4:
            ratio = (lam(s[i]) - lam(s[i - 1])) / h
            data = (1 + 1 / (2 * ratio)) * predictions[-1] - 1 / (2 * ratio) * predictions[-2]
        z = s[i + 1] / s[i] * z - (1 - s[i + 1]) * math.expm1(-h) * data
    torch.testing.assert_close(result, z, rtol=1e-12, atol=1e-12)


def errors(second_order):
    """Errors of 160 and 640 steps from σ = .95 to .05 on the exact velocity of Gaussian data (mean 1, std 0.5)."""
    mean, std = 1.0, 0.5

    def velocity(z, sigma):
        variance = (1 - sigma) ** 2 * std**2 + sigma**2
        centred = z - (1 - sigma) * mean
        clean = mean + (1 - sigma) * std**2 / variance * centred
        return (z - clean) / sigma

    def flow(sigma):  # keeps the quantile
        quantiles = torch.tensor([-1.0, 0.3, 2.0], dtype=torch.float64)
        return (1 - sigma) * mean + math.hypot((1 - sigma) * std, sigma) * quantiles

    found = []
    for steps in (160, 640):
        levels = torch.linspace(0.95, 0.05, steps + 1, dtype=torch.float64)
        end = integrate(velocity, flow(0.95), levels, second_order=second_order)
        found.append(float((end - flow(0.05)).abs().max()))
    return found


def test_dpm2_is_more_exact_than_euler_and_converges_faster():
    euler, dpm2 = errors(False), errors(True)
    assert all(b < a / 3 for a, b in zip(euler, dpm2, strict=True))
    assert dpm2[0] / dpm2[1] > 10  # second order: 16
    assert 3 < euler[0] / euler[1] < 6  # first order: 4


def test_first_step_from_pure_noise_and_last_step_to_none_are_finite():
    levels = torch.tensor([1.0, 0.5, 0.25, 0.0])
    assert integrate(lambda z, s: z, torch.ones(2), levels, second_order=True).isfinite().all()
