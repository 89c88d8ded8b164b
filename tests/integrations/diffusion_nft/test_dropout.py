import torch

from integrations.diffusion_nft.dropout import dropped


def draws(present, probability, count=400):
    source = torch.Generator().manual_seed(0)
    return torch.stack([dropped(torch.tensor(present), probability, source) for _ in range(count)])


def test_each_reward_sits_out_as_often_as_said():
    out = draws([True] * 4, 0.25)
    assert (out.double().mean(0) - 0.25).abs().max() < 0.08  # four standard errors


def test_never_all_of_them():
    for present in ([True, True], [True, False, False], [False, True, True]):
        out = draws(present, 0.95)
        here = torch.tensor(present)
        assert (here & ~out).any(1).all()
        assert not (out & ~here).any()


def test_nobody_with_probability_0_or_if_nobody_is_there():
    assert not draws([True] * 3, 0.0).any()
    assert not draws([False] * 3, 0.9).any()
