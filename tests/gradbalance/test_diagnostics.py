"""The applied update against gradients on other data: hand values, what it equals, and what it leaves alone."""

import math

import pytest
import torch
from torch.optim import SGD, AdamW

from gradbalance import AffineLoss, BalancedOptimizer, MarbleOptimizer, applied_update
from tests.gradbalance.identical import identical, snapshot
from tests.gradbalance.models import LinearLosses, OneTrunk, TwoHeads, batches

NAN = math.nan


def stepped(problem, optimizer):
    optimizer.zero_grad()
    with applied_update(optimizer) as update:
        report = optimizer.backward(problem.losses())
        optimizer.step()
    return report, update


def test_by_hand():
    """The update is −(3, 4) times the learning rate."""
    problem = LinearLosses([[3.0, 4.0]])
    inner = SGD([problem.x], lr=0.5)
    problem.losses()[0].backward()
    with applied_update(inner) as update:
        inner.step()
    held_out = LinearLosses([[1.0, 0.0], [0.0, -2.0], [-30.0, -40.0], [0.0, 0.0], [4.0, -3.0]])
    held_out.x = problem.x
    found = update.cosines(held_out.losses())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor([0.6, -0.8, -1.0, NAN, 0.0], dtype=torch.float64), equal_nan=True)


@pytest.mark.parametrize("balancer", ["marble", "pcgrad", "weighted_sum"])
def test_with_sgd_and_the_same_batch_it_is_what_the_report_says(balancer):
    problem = LinearLosses([[1.0, 0.2, 0.0], [-3.0, 1.0, 0.5], [0.1, 0.1, -0.4]])
    report, update = stepped(problem, BalancedOptimizer(SGD([problem.x], lr=0.1), balancer))
    torch.testing.assert_close(update.cosines(problem.losses()), report.update_cosines)


def test_adamw_goes_another_way():
    rows = [[1.0, 0.2, 0.0], [-0.1, 0.03, 0.5], [0.1, 0.1, -0.4]]
    problem = LinearLosses(rows)
    report, update = stepped(problem, MarbleOptimizer(AdamW([problem.x], lr=0.1, weight_decay=0.0)))
    found = update.cosines(problem.losses())
    direction = problem.x.grad.sign()  # Adam's first step
    g = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(found, (g @ direction) / g.norm(dim=1) / direction.norm(), rtol=1e-6, atol=1e-6)
    assert (found - report.update_cosines).abs().max() > 0.1


def test_weight_decay_and_several_steps_are_part_of_the_change():
    problem = LinearLosses([[0.0, 1.0]])
    with torch.no_grad():
        problem.x.fill_(1.0)
    inner = SGD([problem.x], lr=0.1, weight_decay=1.0)
    with applied_update(inner) as update:
        for _ in range(2):
            inner.zero_grad()
            problem.losses()[0].backward()
            inner.step()
    change = torch.tensor([0.19, 0.38], dtype=torch.float64)
    torch.testing.assert_close(update.cosines(problem.losses()), change[1:] / change.norm())


def test_only_the_balanced_parameters_count():
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=1e-9))
    (x,) = batches(1)
    with applied_update(optimizer) as update:
        report = optimizer.backward(model.losses(x))
        optimizer.step()
    assert {id(p) for p in optimizer.balanced_parameters} == {id(p) for p in model.trunk.parameters()}
    found = update.cosines(model.losses(x))
    torch.testing.assert_close(found, report.update_cosines, rtol=1e-5, atol=1e-5)
    # A plain optimizer knows nothing; the same rule is applied to these losses.
    plain = SGD(model.parameters(), lr=1e-9)
    with applied_update(plain) as update:
        plain.step()
    torch.testing.assert_close(update.cosines(model.losses(x)), report.update_cosines, rtol=1e-5, atol=1e-5)
    # One loss alone: all that it reaches, and no other's head.
    reached = [*model.trunk.parameters(), *model.heads[0].parameters()]
    change = torch.cat([p.grad.flatten() for p in reached])
    own = torch.cat([g.flatten() for g in torch.autograd.grad(model.losses(x)[0], reached)])
    alone = update.cosines([model.losses(x)[0], None, None])
    assert alone[0] == pytest.approx(float(own @ change / own.norm() / change.norm()), abs=1e-5)


def test_named_shared_parameters_are_known_before_any_step():
    model = TwoHeads()
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=0.1), shared_parameters=model.heads.parameters())
    assert len(optimizer.balanced_parameters) == 6
    assert MarbleOptimizer(SGD(model.parameters(), lr=0.1)).balanced_parameters is None


def test_all_forms_of_losses():
    model = OneTrunk()
    optimizer = MarbleOptimizer(AdamW(model.parameters(), lr=0.01))
    first, second = batches(2)
    with applied_update(optimizer) as update:
        optimizer.backward(dict(zip("abc", model.losses(first), strict=True)))
        optimizer.step()
    expected = update.cosines(model.losses(second))
    assert expected.isfinite().all()
    forms = {
        "dict in another order": lambda losses: dict(reversed(list(zip("abc", losses, strict=True)))),
        "tensor": torch.stack,
        "affine": lambda losses: AffineLoss(torch.stack(losses), torch.eye(3, dtype=torch.float64), names=list("abc")),
    }
    for form in forms.values():
        torch.testing.assert_close(update.cosines(form(model.losses(second))), expected)
    some = update.cosines({"c": model.losses(second)[2], "a": model.losses(second)[0]})
    torch.testing.assert_close(some[[0, 2]], expected[[0, 2]])
    assert some[1].isnan()
    with pytest.raises(ValueError, match=r"cosines: unknown objective\(s\) \['d'\]"):
        update.cosines({"d": model.losses(second)[0]})


def test_nothing_is_touched():
    model = TwoHeads()
    optimizer = MarbleOptimizer(AdamW(model.parameters(), lr=0.01), refresh_every=2)
    data = batches(4)
    with applied_update(optimizer) as update:
        optimizer.backward(model.losses(data[0]))
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(model.losses(data[1]), accumulate=True)  # a step under way
    before = snapshot(model, optimizer)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    report = optimizer.report
    update.cosines(model.losses(data[2]))
    assert identical(snapshot(model, optimizer), before)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)
    assert optimizer.report is report
    optimizer.backward(model.losses(data[3]))
    optimizer.step()


@pytest.mark.parametrize("scale", [1e-7, 1e7])
def test_the_scale_of_a_loss_does_not_matter(scale):
    problem = LinearLosses([[1.0, 0.2], [-0.5, 1.0]])
    _, update = stepped(problem, MarbleOptimizer(SGD([problem.x], lr=1e-3)))
    expected = update.cosines(problem.losses())
    torch.testing.assert_close(update.cosines([scale**5 * loss for loss in problem.losses()]), expected)


def test_no_change_is_zero_cosine():
    problem = LinearLosses([[1.0, 0.2], [-0.5, 1.0]])
    _, update = stepped(problem, MarbleOptimizer(SGD([problem.x], lr=0.0)))
    assert update.cosines([problem.losses()[0], None]).nan_to_num(7.0).tolist() == [0.0, 7.0]


def test_frozen_and_bf16_parameters():
    torch.manual_seed(0)
    model = OneTrunk(dtype=torch.bfloat16)
    model.net[0].bias.requires_grad_(False)
    optimizer = MarbleOptimizer(SGD(model.parameters(), lr=1.0))
    x = batches(1)[0].to(torch.bfloat16)
    with applied_update(optimizer) as update:
        optimizer.backward(model.losses(x))
        optimizer.step()
    assert (update.cosines(model.losses(x)).abs() <= 1).all()


def test_errors_say_what_to_do():
    problem = LinearLosses([[1.0, 0.2], [-0.5, 1.0]])
    optimizer = MarbleOptimizer(SGD([problem.x], lr=0.1))
    with pytest.raises(TypeError, match=r"applied_update: optimizer must be a torch.optim.Optimizer, got list"):
        applied_update([problem.x]).__enter__()
    with applied_update(optimizer) as update, pytest.raises(RuntimeError, match="not made yet; call it after"):
        update.cosines(problem.losses())
    with pytest.raises(RuntimeError, match=r"without torch.no_grad\(\)"):
        update.cosines([loss.detach() for loss in problem.losses()])
    with pytest.raises(FloatingPointError, match="gradient of 'objective_1' is NaN or infinite"):
        update.cosines([problem.losses()[0], NAN * problem.losses()[1]])
    with pytest.raises(ValueError, match="cosines: got one scalar loss"):
        update.cosines(problem.losses()[0])


def test_an_error_in_the_block_comes_through():
    problem = LinearLosses([[1.0, 0.2], [-0.5, 1.0]])
    with pytest.raises(ZeroDivisionError), applied_update(SGD([problem.x], lr=0.1)):
        raise ZeroDivisionError
