"""The balanced gradient by plain autograd, one ``loss.backward()`` after the other: what the engine is compared with.

Works on a copy of the model, whose ``.grad`` it uses, and shares no code with the library.
"""

import torch


def gradients(parameters, losses):
    """K rows with the gradient of one loss for each parameter, None where it does not reach or there is no loss."""
    parameters, rows = list(parameters), []
    for loss in losses:
        for p in parameters:
            p.grad = None
        if loss is not None and loss.requires_grad:
            loss.backward(retain_graph=True)
        rows.append([p.grad for p in parameters])
    for p in parameters:
        p.grad = None
    return rows


def _dense(gradient):
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)


def add_rows(several):
    """The rows of several micro-batches as one."""
    return [
        [_sum(_dense(g) for g in cell if g is not None) for cell in zip(*rows, strict=True)]
        for rows in zip(*several, strict=True)
    ]


def _sum(tensors):
    tensors = list(tensors)
    return sum(tensors[1:], tensors[0]) if tensors else None


def combine(rows, coefficients):
    """For each parameter Σ λ_k g_k where two losses or more reach it (one, if K = 1), the one g_k where one does."""
    result = []
    for column in zip(*rows, strict=True):
        reached = [(float(c), _dense(g)) for c, g in zip(coefficients, column, strict=True) if g is not None]
        shared = len(reached) >= min(2, len(rows))
        result.append(_sum(c * g if shared else g for c, g in reached))
    return result


def gramian(rows):
    """⟨g_k, g_l⟩ over the parameters that two losses or more reach, as pairs of reals where complex."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for column in zip(*rows, strict=True):
        if sum(g is not None for g in column) < min(2, len(rows)):
            continue
        flat = [None if g is None else _dense(g).reshape(-1) for g in column]
        for k, a in enumerate(flat):
            for j, b in enumerate(flat):
                if a is not None and b is not None:
                    total[k, j] += torch.vdot(a, b).real
    return total


def assert_gradients(parameters, expected, **tolerance):
    """Each ``.grad`` is the expected one, in its parameter's dtype, and None where None is expected."""
    for i, (parameter, gradient) in enumerate(zip(parameters, expected, strict=True)):
        assert (parameter.grad is None) == (gradient is None), f"parameter {i}: {parameter.grad} for {gradient}"
        if gradient is not None:
            assert parameter.grad.dtype == parameter.dtype
            torch.testing.assert_close(_dense(parameter.grad), gradient, **tolerance)
