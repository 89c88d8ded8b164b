"""How each library turns losses into ``.grad``, called as its own documentation says, and the answers by hand.

Every call has the form ``call(losses, parameters)`` and leaves the update in the parameters' ``.grad``.
"""

import torch
from conflictfree.grad_operator import ConFIGOperator
from conflictfree.utils import apply_gradient_vector, get_gradient_vector
from pytorch_optimizer import PCGrad
from torchjd.autojac import backward, jac_to_grad

from gradbalance import BalancedOptimizer, MarbleOptimizer
from tests.gradbalance.models import LinearLosses


def torchjd(aggregator, **options):
    def call(losses, parameters):
        backward(losses, **options)
        jac_to_grad(parameters, aggregator)

    return call


def conflictfree(losses, network, operator=None, none_grad_mode="skip"):
    """Of a network, not of a list of parameters."""
    rows = []
    for loss in losses:
        network.zero_grad()
        loss.backward(retain_graph=True)
        rows.append(get_gradient_vector(network, none_grad_mode=none_grad_mode))
    update = (operator or ConFIGOperator()).calculate_gradient(rows)
    apply_gradient_vector(network, update, none_grad_mode=none_grad_mode)


def pcgrad(losses, parameters):
    """pytorch_optimizer's wrapper."""
    PCGrad(torch.optim.SGD(parameters, lr=0.1)).pc_backward(losses)


def marble(losses, parameters):
    MarbleOptimizer(torch.optim.SGD(parameters, lr=0.1), ema_decay=0.0).backward(losses)


def mgda(losses, parameters):
    """gradbalance's solver on the raw gradients: the method that torchjd's MGDA approximates."""
    BalancedOptimizer(torch.optim.SGD(parameters, lr=0.1), "mgda").backward(losses)


def linear_update(call, rows):
    """The update for losses whose gradients are the given rows."""
    problem = LinearLosses(rows, torch.float32)
    call(problem.losses(), [problem.x])
    return problem.x.grad


def flat(tensors):
    """One float64 vector; a complex number counts as two."""
    parts = [t.to_dense() if t.is_sparse else t for t in tensors]
    parts = [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in parts]
    return torch.cat([t.double().reshape(-1) for t in parts])


def gradients(parameters):
    return flat([p.grad for p in parameters])


def cosine(a, b):
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()))


def bisector(losses, parameters):
    """What Marble must give for two objectives: half the sum of the unit gradients, times their mean length."""
    rows = [flat(torch.autograd.grad(loss, parameters, retain_graph=True)) for loss in losses]
    return sum(row.norm() for row in rows) / 2 * sum(row / row.norm() for row in rows) / 2
