"""From an estimated Gramian to the coefficients in use: solve, smooth, scale. A pure function of the committed state.

One refresh:  balancer.weights(N, U) → moving average over steps → balancer.scale(·, N) → λ.

N is the Gramian of the gradients and U that of the expected ones, if the estimator estimates it. A balancer that tells
the two apart is given both; for any other U stands for the Gramian. What a report shows is always the measured one.

An objective that is absent keeps its weight, norm and coefficient; on the simplex the present ones share what is left,
1 − Σ α_absent, and at least 1/K, so that no absent objective can bring the others to a stop. An objective never seen
so far holds 1/K. One whose gradient is zero gets weight 0 from the balancer and leaves the solve; a refresh in which
all are zero has nothing to solve. The moving average of coefficients is known as CR-MOGM
(Zhou et al., NeurIPS 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan

import torch
from torch import Tensor

from gradbalance.balancers import Balancer
from gradbalance.estimators import Estimate
from gradbalance.state import BalanceState


def solve(
    state: BalanceState,
    balancer: Balancer,
    gramian: Tensor,
    estimate: Estimate,
    *,
    present: Sequence[bool],
    losses: Tensor,
    ema_decay: float,
) -> BalanceState:
    """The state after a refresh that measured ``gramian``.

    Args:
        state: The committed state; its ``reach`` and ``solved`` are those of the parameters the Gramian was taken over.
        balancer: Its own state is taken from ``state``, and the one after the solve put into the result.
        gramian: (K, K), float64; rows of absent objectives are zero; not all of it is.
        estimate: What the estimator makes of it.
        present: Which objectives are in this step.
        losses: The K loss values, NaN where absent.
        ema_decay: ρ of the moving average.
    """
    noisy = torch.from_numpy(estimate.gramian)
    signal = None if estimate.signal is None else torch.from_numpy(estimate.signal)
    given = noisy if signal is None or balancer.uses_signal else signal
    ratios = [] if estimate.signal_to_noise is None else estimate.signal_to_noise.tolist()
    state = _updated(state, balancer, given, signal, present, losses, ema_decay)
    return replace(
        measured(state, gramian, present),
        signal=[] if signal is None else signal.tolist(),
        signal_to_noise=[-1.0 if isnan(ratio) else ratio for ratio in ratios],
    )


def measured(state: BalanceState, gramian: Tensor, present: Sequence[bool]) -> BalanceState:
    """The state with what a refresh measured, and the coefficients as they are.

    Args:
        state: The state before.
        gramian: Of this step's gradients, (K, K), float64; rows of absent objectives are zero.
        present: Which objectives are in this step.
    """
    solved = [here or known for here, known in zip(present, state.solved, strict=True)]
    norms = gramian.diagonal().clamp(min=0).sqrt()
    if not bool((norms > 0).any()):
        return replace(state, solved=solved, gramian=gramian.tolist())
    return replace(
        state,
        norms=[new if here else old for new, old, here in zip(norms.tolist(), state.norms, present, strict=True)],
        gramian=gramian.tolist(),
        solved=solved,
    )


def follow(state: BalanceState, balancer: Balancer, *, losses: Tensor, ema_decay: float) -> BalanceState:
    """The state after a step that measured no gradient, with a balancer that looks at losses alone.

    Args:
        state: The state that the step was made with.
        balancer: One whose ``uses_gradients`` is False.
        losses: The K loss values of the step, float64, NaN where absent.
        ema_decay: ρ of the moving average.
    """
    present = ~losses.isnan()
    # Of gradients such a balancer may look only at who has one; those of the last refresh are not those of this step.
    return _updated(state, balancer, torch.diag(present.to(losses)), None, present.tolist(), losses, ema_decay)


def _updated(
    state: BalanceState,
    balancer: Balancer,
    gramian: Tensor,
    signal: Tensor | None,
    present: Sequence[bool],
    losses: Tensor,
    ema_decay: float,
) -> BalanceState:
    """The state with the present objectives' new weights and coefficients, and the balancer's own new state."""
    balancer.load_state_dict(state.balancer)
    fresh = balancer.weights(gramian, losses, signal).tolist()
    share = _share(state.weights, fresh, present) if balancer.simplex else 1.0
    weights = [
        _smooth(old, share * new, ema_decay if state.averaged and (balancer.simplex or known) else 0.0) if here else old
        for old, new, known, here in zip(state.weights, fresh, state.solved, present, strict=True)
    ]
    scaled = balancer.scale(gramian.new_tensor(weights), gramian).tolist()
    return replace(
        state,
        weights=weights,
        coefficients=[new if here else old for new, old, here in zip(scaled, state.coefficients, present, strict=True)],
        averaged=True,
        balancer=balancer.state_dict(),
    )


def _share(kept: Sequence[float], fresh: Sequence[float], present: Sequence[bool]) -> float:
    """What to multiply the present objectives' fresh weights with, so that they share what the absent ones leave."""
    absent = sum(w for w, here in zip(kept, present, strict=True) if not here)
    given = sum(w for w, here in zip(fresh, present, strict=True) if here)  # a ceiling may leave weight to absent ones
    return max(1.0 - absent, 1.0 / len(present)) / given if given > 0 else 1.0


def _smooth(old: float, new: float, decay: float) -> float:
    return decay * old + (1.0 - decay) * new
