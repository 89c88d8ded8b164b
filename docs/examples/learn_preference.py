"""Learn a preference by gradient descent through the solver: python docs/examples/learn_preference.py.

Three tasks share one model. Wanted is progress in the ratio 3 : 2 : 1 on held-out data. Asking for that ratio on the
training data misses it, for part of each training gradient only serves to memorise. Inner problem: the min-norm point
of the training gradients g_k / p_k under constraints on the weights, solved and differentiated by cvxpylayers. Outer
problem: the preference p for which held-out progress has the wanted ratio.
"""

import torch

from gradbalance.solvers import min_norm

WANTED = torch.tensor([3.0, 2.0, 1.0])
MEMORISED = torch.tensor([0.2, 1.0, 0.5])  # length of that part of each training gradient
STEPS, BATCH = 60, 3


def constraints(alpha):
    """Anything that cvxpy takes for convex; here: no task is lost, none takes over."""
    return [alpha >= 0.05, alpha[0] <= 0.7]


def draw(generator):
    """Unit gradients of the three tasks, shape (3, 40), on training and on held-out data."""
    useful = torch.eye(3, 40) + 0.1 * torch.ones(40) / 40**0.5
    memorised = MEMORISED[:, None] * torch.eye(6, 40)[3:]
    noise = 0.03 * torch.randn(2, 3, 40, generator=generator)
    return torch.nn.functional.normalize(torch.stack([useful + memorised, useful]) + noise, dim=2)


def held_out_progress(preference, generator, solver):
    """Progress on held-out data along the balanced training gradient, as a ratio: its sum is that of WANTED."""
    training, held_out = draw(generator)
    gramian = training @ training.T
    alpha = min_norm(gramian, preference=preference, constraints=constraints, solver=solver)
    progress = held_out @ ((alpha.float() / preference) @ training)
    return WANTED.sum() * progress / progress.sum()


def distance(preference, generator, solver):
    """Squared distance to the wanted ratio, averaged over draws."""
    ratios = [held_out_progress(preference, generator, solver) for _ in range(BATCH)]
    return (torch.stack(ratios) - WANTED).square().sum(1).mean()


def learn(solver):
    """Gradient descent on the distance, from the wanted ratio itself."""
    log_preference = WANTED.log().requires_grad_()  # p > 0
    optimizer = torch.optim.Adam([log_preference], lr=0.03)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        distance(log_preference.exp(), generator, solver).backward()
        optimizer.step()
    return log_preference.detach().exp()


def main():
    """Print a table, before and after, on draws not seen before."""
    print(f"{'':8}{'preference':>22}{'held-out progress':>22}")
    misses = {}
    for name, preference in {"before": WANTED, "after": learn("cvxpylayers")}.items():
        test = torch.Generator().manual_seed(1)
        ratio = torch.stack([held_out_progress(preference, test, "exact") for _ in range(100)]).mean(0)
        misses[name] = (ratio - WANTED).abs().max().item()
        columns = [" : ".join(f"{value:.2f}" for value in row) for row in (preference / preference[2], ratio)]
        print(f"{name:8}{columns[0]:>22}{columns[1]:>22}")
    assert misses["after"] < misses["before"] / 5, misses


if __name__ == "__main__":
    main()
