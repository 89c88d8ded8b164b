"""Small models and losses that the engine's tests share."""

import torch
from torch import nn


class TwoHeads(nn.Module):
    """A shared trunk and one head for each objective."""

    def __init__(self, count=3, width=6, dtype=torch.float64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(count))
        self.to(dtype)

    def losses(self, x):
        """K losses of very different scale."""
        features = self.trunk(x)
        targets = [torch.sin((k + 1) * x.sum(1, keepdim=True)) for k in range(len(self.heads))]
        return [
            10.0 ** (k - 1) * (head(features) - target).square().mean()
            for k, (head, target) in enumerate(zip(self.heads, targets, strict=True))
        ]


class OneTrunk(nn.Module):
    """K objectives on the same outputs: every parameter is shared."""

    def __init__(self, count=3, dtype=torch.float64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, count))
        self.count = count
        self.to(dtype)

    def losses(self, x):
        """K losses that pull the outputs different ways."""
        y = self.net(x)
        return [
            10.0 ** (k - 1) * (y - torch.cos(x.sum(1, keepdim=True) + 2 * k)).square().mean() for k in range(self.count)
        ]


def batches(count, size=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 4, generator=generator, dtype=dtype) for _ in range(count)]


def flat_gradient(parameters):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])


class LinearLosses:
    """K losses L_k = ⟨g_k, x⟩ with gradients given as rows: the geometry with nothing around it."""

    def __init__(self, rows, dtype=torch.float64):
        self.rows = torch.as_tensor(rows, dtype=dtype)
        self.x = nn.Parameter(torch.zeros(self.rows.shape[1], dtype=dtype))

    def losses(self):
        return list(self.rows @ self.x)


def parameters_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(model, optimizer, data, losses=None):
    """Steps of one batch each; the report of the last."""
    for x in data:
        optimizer.zero_grad()
        report = optimizer.backward((losses or model.losses)(x))
        optimizer.step()
    return report
