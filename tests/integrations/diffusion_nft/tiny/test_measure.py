"""The measurement script: its estimates are unbiased, and its gradient is that of the DiffusionNFT loss."""

import numpy as np
import pytest
import torch
from peft import LoraConfig

from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.tiny import measure
from integrations.diffusion_nft.tiny.pipeline import build


def test_signal_recovers_known_gradients():
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(3, 2000, generator=generator, dtype=torch.float64)
    true[1] = -0.5 * true[0] + 0.75**0.5 * true[1]  # cosine about -0.5
    noise = torch.tensor([0.0, 1.0, 3.0]).view(1, 3, 1)
    samples = true + noise * torch.randn(400, 3, 2000, generator=generator, dtype=torch.float64)
    shares, cosines = measure.signal(samples)
    np.testing.assert_allclose(shares, [1, 0.5**0.5, 0.1**0.5], atol=0.03)
    expected = torch.nn.functional.cosine_similarity(true[:, None], true[None], dim=-1)
    np.testing.assert_allclose(cosines, expected, atol=0.03)
    assert cosines[0, 1] == pytest.approx(-0.5, abs=0.05)


def test_advantages_compare_pictures_of_one_prompt_and_ignore_missing_scores(monkeypatch):
    monkeypatch.setattr(measure, "GROUP", 2)
    scores = np.array([[0, 1, 5, 5], [1, 3, np.nan, np.nan]])
    found = measure.advantages(scores)
    np.testing.assert_allclose(found[0], np.array([-0.5, 0.5, 0, 0]) / (scores[0].std() + 1e-4))
    np.testing.assert_allclose(found[1], np.array([-1, 1, 0, 0]) / (1 + 1e-4))


def test_gradient_is_the_advantage_times_the_velocity_error(monkeypatch):
    """At v = v_old the loss is Σ A · |x̂ − x0|²/w up to a constant, as its derivative worked by hand says."""
    monkeypatch.setattr(measure, "GROUP", 2)
    monkeypatch.setattr(measure, "_TIMESTEPS", 1)
    pipeline = build(0)
    pipeline.transformer.add_adapter(LoraConfig(r=2, init_lora_weights="gaussian", target_modules=["to_q"]))
    scores = {"first": lambda images, prompts: np.array([0.0, 1.0, 0.0, 0.0])}
    batch = measure.Sampled(pipeline, [Prompt("one red circle")] * 4, scores, seed=0)
    (found,) = measure.gradients(pipeline, batch, torch.Generator().manual_seed(3))

    generator = torch.Generator().manual_seed(3)
    sigmas = pipeline.scheduler.sigmas[: int(0.99 * measure.STEPS)]
    t = sigmas[torch.stack([torch.randperm(len(sigmas), generator=generator) for _ in range(4)])[:, 0]].view(
        -1, 1, 1, 1
    )
    noise = torch.randn(batch.latents.shape, generator=generator)
    noisy = (1 - t) * batch.latents + t * noise
    v = pipeline.transformer(noisy, batch.tokens, batch.pooled, 1000 * t.flatten()).sample
    error = (noisy - t * v - batch.latents).detach()
    weight = error.abs().mean((1, 2, 3), keepdim=True)
    advantage = torch.from_numpy(measure.advantages(batch.scores))[0].float().view(-1, 1, 1, 1)
    surrogate = (advantage * -2 * t * error / weight * v).mean((1, 2, 3)).mean()
    parameters = [p for p in pipeline.transformer.parameters() if p.requires_grad]
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(surrogate, parameters)]).double()
    assert found.norm() > 0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
