"""A short training run that uses much of the engine, and what to compare of two runs."""

import torch

from gradbalance import BalancedOptimizer, MarbleOptimizer
from gradbalance.state import KEY
from tests.gradbalance.models import TwoHeads, parameters_of


def build(seed=0, model=TwoHeads, balancer=None, **options):
    torch.manual_seed(seed)
    model = model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    if balancer is not None:  # one of its own, or what makes one for three objectives
        return model, BalancedOptimizer(inner, balancer(3) if callable(balancer) else balancer, **options)
    return model, MarbleOptimizer(inner, **{"refresh_every": 3, **options})


def train(model, optimizer, data, scheduler=None):
    """One step a batch, three named objectives."""
    for x in data:
        optimizer.zero_grad()
        optimizer.backward(dict(zip("abc", model.losses(x), strict=True)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def everything_of(model, optimizer):
    """All that two runs must have in common, as text: Python prints every digit of a float, and NaN equals NaN."""
    inner = [{name: torch.as_tensor(v).tolist() for name, v in state.items()} for state in optimizer.state.values()]
    options = [
        {k: list(v) if isinstance(v, tuple) else v for k, v in sorted(group.items()) if k != "params"}
        for group in optimizer.param_groups
    ]  # as lists: JSON has no tuples
    return {
        "parameters": parameters_of(model).tolist(),
        "inner state": inner,
        "options": str(options),
        "balance": str(optimizer.param_groups[0][KEY]),
        "coefficients": optimizer.coefficients.tolist(),
    }


def record_of(report):
    """A report as text, for the same reason."""
    return f"{report.as_dict()} {report.refreshed} {report.absent} {report.inactive} {report.gramian.tolist()}"
