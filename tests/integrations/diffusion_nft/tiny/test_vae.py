"""The stand-in VAE is an exact inverse with AutoencoderKL's interface."""

import torch

from integrations.diffusion_nft.tiny.vae import SpaceToDepthVAE


def test_decode_inverts_encode_exactly():
    vae = SpaceToDepthVAE()
    pixels = torch.rand(3, 3, 32, 48) * 2 - 1
    posterior = vae.encode(pixels).latent_dist
    assert posterior.mode().shape == (3, 12, 16, 24)
    assert torch.equal(posterior.sample(), posterior.mode())
    assert torch.equal(vae.decode(posterior.mode()).sample, pixels)
    assert torch.equal(vae.decode(vae.encode(pixels, return_dict=False)[0].mode(), return_dict=False)[0], pixels)


def test_an_eight_bit_picture_survives_the_scaled_round_trip():
    vae = SpaceToDepthVAE()
    picture = torch.arange(256).repeat(12).reshape(1, 3, 32, 32)
    latents = (vae.encode(picture / 127.5 - 1).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
    pixels = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    assert torch.equal(((pixels + 1) * 127.5).round().long(), picture)


def test_has_a_device_and_a_dtype_but_nothing_to_train():
    vae = SpaceToDepthVAE()
    assert vae.device == torch.device("cpu")
    assert vae.dtype == torch.float32
    assert not list(vae.parameters())


def test_saves_and_loads(tmp_path):
    SpaceToDepthVAE(shift_factor=0.5).save_pretrained(tmp_path)
    assert SpaceToDepthVAE.from_pretrained(tmp_path).config.shift_factor == 0.5
