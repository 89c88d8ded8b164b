"""Models of every kind that training scripts hold, each with a few losses that pull different ways.

A model has ``losses(x)`` for a batch x of shape (n, 4); whatever it draws at random it draws from torch's generator.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint


def apart(outputs, x):
    """One loss a column of ``outputs``, of sizes 0.1, 1, 10, …"""
    targets = [torch.cos(x.sum(1) + 2 * k) for k in range(outputs.shape[1])]
    return [10.0 ** (k - 1) * (outputs[:, k] - t).square().mean() for k, t in enumerate(targets)]


class Outputs(nn.Module):
    """One loss for each output of ``self.net``."""

    def forward(self, x):
        return self.net(x)

    def losses_of(self, outputs, x):
        return apart(outputs, x)

    def losses(self, x):
        return self.losses_of(self(x), x)


class Trunk(Outputs):
    """Three outputs of one network."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


class Body(nn.Module):
    """Any module from (n, 4) to (n, 3), with three losses on its outputs: everything is shared."""

    def __init__(self, *modules):
        super().__init__()
        self.net = nn.Sequential(*modules)

    def losses(self, x):
        return apart(self.net(x), x)


class Heads(nn.Module):
    """A trunk that ``run`` may wrap, and a head for each of three losses."""

    def __init__(self, trunk=None, run=None):
        super().__init__()
        self.trunk = trunk or nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(3))
        self.run = run or (lambda trunk, x: trunk(x))

    def forward(self, x):
        features = self.run(self.trunk, x)
        return [head(features) for head in self.heads]

    def losses_of(self, outputs, x):
        return [apart(y, x + k)[0] * 10.0**k for k, y in enumerate(outputs)]

    def losses(self, x):
        return self.losses_of(self(x), x)


class PartlyReached(nn.Module):
    """Parameters that all, two, one or none of the losses reach, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.all, self.two, self.one, self.none = (nn.Parameter(torch.randn(4)) for _ in range(4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def losses(self, x):
        y = x * self.all + self.frozen
        return [(y * self.two).sin().mean(), 10 * (y + self.two).cos().mean(), (y * self.one).tanh().mean()]


class TiedWords(nn.Module):
    """A small language model whose output layer is its embedding; the other loss reads the embedding alone."""

    def __init__(self, sparse=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 5, sparse=sparse)
        self.mix = nn.Linear(5, 5)

    def words(self, x):
        return (x.abs() * 3).long() % 7

    def losses(self, x):
        words = self.words(x)
        hidden = self.mix(self.embedding(words[:, :-1])).tanh()
        logits = hidden @ self.embedding.weight.T
        return [
            cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()),
            10 * self.embedding(words).square().mean(),
            (hidden - 1).square().mean(),
        ]


class SparseWords(TiedWords):
    """The embedding is only looked up, so every loss's gradient of it is sparse."""

    def __init__(self):
        super().__init__(sparse=True)

    def losses(self, x):
        hidden = self.mix(self.embedding(self.words(x))).tanh()
        return [(hidden - 1).square().mean(), 10 * self.embedding(self.words(x)).sin().mean(), (hidden.exp()).mean()]


class SparseAndDenseWords(TiedWords):
    """One tied weight with a sparse gradient from one loss and dense ones from two."""

    def __init__(self):
        super().__init__(sparse=True)

    def losses(self, x):
        sparse = self.embedding(self.words(x)).sin().mean()
        dense = self.mix(self.embedding.weight)
        return [sparse, (dense - 1).square().mean(), 10 * self.embedding.weight.cos().mean()]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn(3))

    def losses(self, x):
        return apart((x.to(torch.complex128) @ self.weight * torch.exp(1j * self.phase)).abs(), x)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(1, 5, num_layers=2, batch_first=True)
        self.out = nn.Linear(5, 3)

    def losses(self, x):
        return apart(self.out(self.rnn(x.unsqueeze(-1))[0][:, -1]), x)


class OddShapes(nn.Module):
    """A scalar, an empty and a transposed parameter."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(3, 4).T)

    def losses(self, x):
        return apart(torch.cat([self.scalar * x @ self.transposed, self.empty]), torch.cat([x, x[:0]]))


class Image(Outputs):
    """Convolutions in channels-last memory, whose gradients come in two memory formats."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)),
            nn.Conv2d(1, 8, 2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 2),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(32, 3),
        ).to(memory_format=torch.channels_last)


def _mlp(*between):
    return nn.Linear(4, 8), *between, nn.Linear(8, 3)


def _transformer():
    layer = nn.TransformerEncoderLayer(6, nhead=2, dim_feedforward=8, dropout=0.1, batch_first=True)
    return Body(nn.Unflatten(1, (4, 1)), nn.Linear(1, 6), layer, nn.Flatten(), nn.Linear(24, 3))


def _non_reentrant(trunk, x):
    return checkpoint(trunk, x, use_reentrant=False)


def _reentrant(trunk, x):
    return checkpoint(trunk, x.requires_grad_(), use_reentrant=True)


def _dropout_trunk():
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())


ZOO = {
    "heads": Heads,
    "frozen, unused and partly reached parameters": PartlyReached,
    "batch norm": lambda: Body(*_mlp(nn.BatchNorm1d(8), nn.ReLU())),
    "layer norm": lambda: Body(*_mlp(nn.LayerNorm(8), nn.GELU())),
    "dropout": lambda: Body(*_mlp(nn.Dropout(0.5), nn.Tanh())),
    "transformer": _transformer,
    "convolution": Image,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "tied weights": TiedWords,
    "sparse embedding": SparseWords,
    "sparse and dense": SparseAndDenseWords,
    "complex": Complex,
    "scalar, empty and transposed parameters": OddShapes,
    "weight norm": lambda: Body(weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3)),
    "spectral norm": lambda: Body(spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3)),
    "checkpointed": lambda: Heads(_dropout_trunk(), _non_reentrant),
    "checkpointed, reentrant": lambda: Heads(_dropout_trunk(), _reentrant),
}


def build(name, seed=0):
    torch.manual_seed(seed)
    return ZOO[name]().double()
