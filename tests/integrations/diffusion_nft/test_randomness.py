import torch

from integrations.diffusion_nft.randomness import generator, noise


def test_same_purpose_same_draw_other_purpose_other_draw():
    def draw(*key):
        return torch.randn(4, generator=generator(*key))

    assert torch.equal(draw(1, "rollout", 3), draw(1, "rollout", 3))
    others = [draw(2, "rollout", 3), draw(1, "train", 3), draw(1, "rollout", 4)]
    assert not any(torch.equal(draw(1, "rollout", 3), other) for other in others)


def test_noise_does_not_depend_on_how_it_is_split():
    whole = noise((3, 5), 7, generator(0, "x"))
    source = generator(0, "x")
    parts = torch.cat([noise((3, 5), count, source) for count in (2, 4, 1)])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole[0], whole[1])
