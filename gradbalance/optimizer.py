"""The optimizer wrapper: *losses → gradients → Gramian → coefficients → one weighted gradient → inner optimizer*.

``backward`` computes, ``step`` commits; between the two lives a :class:`~gradbalance.window.Window`. A step that never
happens (a GradScaler overflow, an error, ``nonfinite="skip"``) leaves no trace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from gradbalance import history, objectives, options
from gradbalance.balancers import Balancer
from gradbalance.balancers.equal_weights import EqualWeights
from gradbalance.dtensor import whole
from gradbalance.estimators import GramianEstimator
from gradbalance.objectives import Losses, Objectives
from gradbalance.ranks import Ranks
from gradbalance.report import BalanceReport
from gradbalance.state import KEY, BalanceState, why_foreign
from gradbalance.window import NonFiniteError, Window
from gradbalance.wrapper import OptimizerWrapper, Snapshot


class _SkipStep(Exception):
    """Unwinds an inner optimizer's closure when the step is to be skipped."""


class BalancedOptimizer(OptimizerWrapper):
    """Wraps a torch optimizer so that it steps along a balanced combination of K objectives' gradients.

    It *is* a ``torch.optim.Optimizer`` that shares the inner one's ``param_groups``, ``state`` and ``defaults``, so LR
    schedulers, ``GradScaler``, gradient clipping, accelerate and checkpointing work as on the inner optimizer.

    Args:
        optimizer: The inner optimizer; it makes the step.
        balancer: A :class:`~gradbalance.balancers.Balancer` or its name, such as ``"pcgrad"``.
        ema_decay: ρ in [0, 1): the balancer's weights are averaged over solves, w̄ ← ρ w̄ + (1−ρ) w.
        refresh_every: N: measure the gradients (K reverse passes) and solve on every N-th step; the N−1 steps in
            between cost one plain backward with the cached coefficients, or two where heads cannot have a short pass of
            their own (FSDP2, reentrant checkpointing, heads in a compiled graph). A balancer that looks at losses alone
            (``uses_gradients`` is False) brings them up to date at the end of each of those, for the next one.
        refresh_micro_batches: With gradient accumulation, how many of a refresh's micro-batches are measured; the rest
            cost one backward each. ``"auto"``: as many as make noise and signal equal in the noisiest objective, chosen
            on each refresh for the next; the first measures all (see :mod:`gradbalance.micro_batches`). It needs
            ``gramian_estimator="split"``, and losses divided by the same number in every step. Default: all.
        uniform_after: From this step on (the first is 0) each refresh gives all present objectives equal weights, not
            averaged, in place of the balancer's: for Marble a sum of unit gradients. The best runs of the MARBLE paper
            end so. For balancers whose weights sum to 1 and that have no ``preference``. Default: never.
        gramian_estimator: What the balancer is told of the measured Gramian: a
            :class:`~gradbalance.estimators.GramianEstimator` or its name. ``"plain"``: the Gramian itself.
            ``"split"``: noise is told from signal by comparing two parts of a refresh's micro-batches, so that a
            refresh holds 2·K gradients, not K. ``"history"``: by comparing with averages of the past gradients, for
            one micro-batch a step and one process; K buffers in the inner optimizer's state, and K gradients held
            until ``step`` (give ``objective_names`` if DCP is to load them). None needs another reverse pass.
        shared_parameters: The parameters whose gradients are balanced; all others get the plain sum of the losses'
            gradients. Default: found from the graph: parameters that two or more objectives reach.
        objective_names: K names. Default: a dict's keys or an ``AffineLoss``'s names at the first ``backward``, else
            ``objective_0``, ….
        nonfinite: What to do about a NaN or infinite loss or gradient: ``"raise"`` an error that names the objective,
            or ``"skip"`` the step. Either way parameters, optimizer state and coefficients stay as they were.
        process_group: The ranks over which gradients are averaged. Default: those of the model's
            ``DistributedDataParallel``, else the default group.

    Raises:
        TypeError: If ``optimizer`` is not a ``torch.optim.Optimizer`` or is already balanced.
        ValueError: If an option is out of range; the message names it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        balancer: Balancer | str,
        *,
        ema_decay: float = 0.0,
        refresh_every: int = 1,
        refresh_micro_batches: int | Literal["auto"] | None = None,
        uniform_after: int | None = None,
        gramian_estimator: GramianEstimator | str = "plain",
        shared_parameters: Iterable[Tensor] | None = None,
        objective_names: Sequence[str] | None = None,
        nonfinite: str = "raise",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.balancer = options.balancer(balancer)
        self.gramian_estimator = options.gramian_estimator(gramian_estimator)
        options.check_decay(ema_decay)
        options.check_count("refresh_every", refresh_every)
        options.check_micro_batches(refresh_micro_batches, self.gramian_estimator)
        options.check_count("uniform_after", uniform_after, least=0, optional=True)
        if uniform_after is not None:
            EqualWeights(self.balancer)  # raises if its weights cannot be equal
        options.check_choice("nonfinite", nonfinite, ("raise", "skip"))
        names = options.objective_names(objective_names)
        self.ema_decay = float(ema_decay)
        self.refresh_every = refresh_every
        self.refresh_micro_batches = refresh_micro_batches
        self.uniform_after = uniform_after
        self.nonfinite = nonfinite
        self.process_group = process_group
        # By position: accelerate replaces the parameters by sharded ones under FSDP2.
        self._balanced = None if shared_parameters is None else self._positions(shared_parameters)
        self._objective_names = names
        self._ranks: Ranks | None = None
        self._window: Window | None = None
        self._held: Window | None = None
        self._calls = 0
        self._report: BalanceReport | None = None
        saved = self.param_groups[0].get(KEY)
        if saved is None or self._foreign(saved) is not None:
            self._commit(self._initial_state())

    # --- What can be read -------------------------------------------------------------------------------------------

    @property
    def shared_parameters(self) -> list[Tensor] | None:
        """The parameters named as shared, None if they are found from the graph."""
        if self._balanced is None:
            return None
        return [p for i, p in enumerate(self._parameters()) if i in self._balanced]

    @property
    def balanced_parameters(self) -> list[Tensor] | None:
        """The parameters whose gradients are balanced, named or found; None as long as no step has found them."""
        state = self._committed
        if self._balanced is None and not any(mask >= 0 for mask in state.reach):
            return None
        return [p for p, shared in zip(self._parameters(), self._shared(state), strict=False) if shared]

    @property
    def objective_names(self) -> list[str]:
        """The K names in order; empty before the first step if none were given."""
        return list(self._committed.names)

    @property
    def coefficients(self) -> Tensor:
        """λ in use, shape (K,), float64: the step's under way, else the committed one; empty before the first."""
        state = self._committed if self._window is None else self._window.state
        return torch.tensor(state.coefficients, dtype=torch.float64)

    @property
    def report(self) -> BalanceReport | None:
        """The report of the last completed ``backward``, None before the first."""
        return self._report

    # --- The step ---------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and drop whatever ``backward`` computed that no ``step`` has committed."""
        self._window = None
        self.inner.zero_grad(set_to_none)

    def backward(self, losses: Losses, *, regularizer: Tensor | None = None, accumulate: bool = False) -> BalanceReport:
        """Add the balanced gradient of the losses to ``.grad``.

        On a refresh this takes K reverse passes over the one graph and solves for new coefficients λ; on the steps in
        between it is one plain backward of Σ_k λ_k L_k. Shared parameters get Σ_k λ_k g_k, all others Σ_k g_k. Only
        this optimizer's parameters get a ``.grad``.

        Args:
            losses: K scalar losses as a list, a dict of named losses, a 1-D tensor, or an ``AffineLoss``. None, or a
                key missing from the dict: the objective is absent from this step.
            regularizer: A loss that is added unbalanced, such as a KL or weight penalty.
            accumulate: More micro-batches of this optimizer step follow. Gradients add up, as in torch; one λ serves
                them all; the call with ``accumulate=False`` completes the step.

        Returns:
            The report of the step; with ``accumulate=True`` of the step so far, whose coefficients are not solved yet
            if it is a refresh.

        Raises:
            TypeError, ValueError: If ``losses`` is malformed; the message says how.
            RuntimeError: If nothing to differentiate is left.
            NonFiniteError: With ``nonfinite="raise"``, if a loss or gradient is not finite.
        """
        self._calls += 1
        window = self._window if self._window is not None and self._window.open else None
        given = objectives.read(losses, (self._committed if window is None else window.state).names or None)
        if regularizer is not None and (
            not isinstance(regularizer, Tensor) or regularizer.numel() != 1 or regularizer.is_complex()
        ):
            raise ValueError(f"backward: regularizer must be a real scalar tensor, got {regularizer!r:.100}")
        regularizer = None if regularizer is None else whole(regularizer)  # a weight penalty under FSDP2 comes in parts
        ranks = self._find_ranks()
        if ranks.size == 1 and not any(given.connected) and any(given.present):
            raise objectives.nothing_to_differentiate(given.names)
        if not accumulate:
            ranks.refuse_nothing(given.mask)
        if not any(p.requires_grad for p in self._parameters()):
            raise RuntimeError("backward: none of the optimizer's parameters requires grad; all are frozen")
        if self._held is not None:
            self._held.evaluate_again(given, regularizer, last=not accumulate)
            self._window = self._held
            return self._held.report()
        if window is None:
            window = self._open(given, accumulate, ranks)
        window.refuse_new(self._parameters())
        self._window = None  # an error below ends the step
        balancer, ema_decay = self._rule
        # Coefficients that are to be made from losses alone need those of the whole step.
        first = not balancer.uses_gradients and not all(window.state.solved)
        limit, choose = self.refresh_micro_batches, False
        if isinstance(limit, str):
            limit, choose = window.state.wanted or None, True
        if window.add(given, regularizer, last=not accumulate, limit=None if first else limit):
            window.solve(balancer, self.gramian_estimator, ema_decay, choose=choose)
            if window.nonfinite and self.nonfinite == "raise":
                raise NonFiniteError(window.nonfinite)
            window.write()
        self._window = window
        report = window.report()
        if not accumulate:
            self._report = report
        return report

    def step(self, closure: Callable[[], Losses] | None = None) -> Any:  # type: ignore[override]
        """Step the inner optimizer with the gradients in ``.grad`` and commit what ``backward`` computed.

        With no preceding ``backward`` it steps the inner optimizer only.

        Args:
            closure: Returns the K losses, in any form that ``backward`` takes. Gradients are zeroed before each
                evaluation; λ is solved at the first and held for the whole step (LBFGS evaluates several times). It may
                also call ``backward`` itself, as torch's closures do; then what it returns is not looked at.

        Returns:
            What the inner optimizer returns: with a closure Σ_k λ_k L_k of the first evaluation, else None.
        """
        return super().step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # see OptimizerWrapper

    def _make_step(self, closure: Callable[[], Losses] | None) -> tuple[bool, Any]:
        return self._step_window() if closure is None else self._step_closure(closure)

    def _step_window(self) -> tuple[bool, Any]:
        window = self._window
        if window is None:
            result = self.inner.step()
            if self.gramian_estimator.uses_history and self._committed.names:
                # DCP prepares an optimizer for loading with such a step.
                history.reserve(self.inner, self._parameters(), len(self._committed.names))
            return True, result
        if window.open:
            raise RuntimeError(
                "step: the last backward said accumulate=True, so the step is not complete; the last micro-batch's "
                "backward must have accumulate=False"
            )
        finite = self._is_finite(window)
        if finite:
            following = window.following(*self._rule)  # before the step: a balancer may refuse
            self.inner.step()
            self._commit_step(window, following)
        self._window = None
        return finite, None

    def _step_closure(self, closure: Callable[[], Losses]) -> tuple[bool, Any]:
        """Step an inner optimizer that evaluates the losses itself, once or often."""
        # What backward computed before this call is part of the step: micro-batches that the closure completes, or, for
        # a closure that does nothing (Lightning's), all of it.
        begun = self._window
        before = Snapshot(self.inner) if isinstance(self.inner, torch.optim.LBFGS) else None

        def evaluate() -> Tensor:
            if begun is not None and self._held is not None:
                raise RuntimeError(
                    "step: the inner optimizer evaluates the closure again, but backward was called before "
                    "step(closure); make the whole step in the closure"
                )
            self._window = begun
            if begun is None:
                self.inner.zero_grad()
            calls = self._calls
            with torch.enable_grad():
                losses = closure()
                # A closure may call backward itself, as torch's do.
                if self._calls == calls and (begun is None or losses is not None):
                    if begun is not None and not begun.open:
                        self.zero_grad()
                    self.backward(losses)
            window = self._window
            assert window is not None
            if window.open:
                raise RuntimeError("step: the closure's last backward said accumulate=True; it must be False")
            self._held = window
            if not self._is_finite(window):
                raise _SkipStep
            return window.objective()

        try:
            result = self.inner.step(cast("Callable[[], float]", evaluate))
            if self._held is not None:
                self._commit_step(self._held, self._held.following(*self._rule))
            return True, result
        except (_SkipStep, NonFiniteError) as stop:
            if before is not None:
                before.restore()
            if isinstance(stop, NonFiniteError):
                raise
            return False, None
        finally:
            self._window = self._held = None

    def _open(self, given: Objectives, accumulate: bool, ranks: Ranks) -> Window:
        """Begin an optimizer step: decide whether it measures the gradients."""
        state, parameters, estimator = self._committed, self._parameters(), self.gramian_estimator
        if estimator.uses_history and (ranks.size > 1 or ranks.sharded):
            raise RuntimeError(
                f"backward: {type(estimator).__name__} works in one process: with several, each would hold averages of "
                "its own gradients, and a checkpoint those of one rank; pass two or more micro-batches with "
                'accumulate=True and use gramian_estimator="split"'
            )
        if not state.names:
            state = state.named(given.names, simplex=self.balancer.simplex)
        # Whatever no solve has seen has no coefficient: an objective that is here or may come with a later
        # micro-batch, and a parameter that is new or was frozen.
        new_objective = False
        if not all(state.solved):
            # Looked at only where it matters, and agreed on: with an AffineLoss it may lie on the device.
            unseen = zip(given.present, state.solved, strict=True)
            wanted = int(any((here or accumulate) and not known for here, known in unseen))
            new_objective = ranks.agree([wanted], parameters[0].device) == [1]
        state = replace(state, reach=state.reach + [-1] * (len(parameters) - len(state.reach)))
        new_parameter = any(p.requires_grad and mask < 0 for p, mask in zip(parameters, state.reach, strict=True))
        due = state.step % self.refresh_every == 0 or new_objective or new_parameter
        refresh = due or state.doubtful
        past = history.past(self.inner, parameters, len(state.names)) if refresh and estimator.uses_history else ()
        return Window(
            state, parameters, self._shared, ranks, refresh=refresh, look=not due, parts=estimator.parts, past=past
        )

    def _is_finite(self, window: Window) -> bool:
        """Whether the step may be made. Amortised steps are looked at here, by one copy of a few numbers."""
        names = window.check()
        if names:
            # Gone before they can do harm: a GradScaler has looked at them by now.
            self._window = None
            self.inner.zero_grad()
        if names and self.nonfinite == "raise":
            raise NonFiniteError(names)
        return not names

    def _find_ranks(self) -> Ranks:
        """The processes that train together, looked for at the first ``backward``."""
        if self._ranks is None or not self._ranks.still_valid(self._parameters()):
            self._ranks = Ranks(self._parameters(), self.process_group)
        return self._ranks

    @property
    def _rule(self) -> tuple[Balancer, float]:
        """The balancer and the averaging of the step under way."""
        if self.uniform_after is None or self._committed.step < self.uniform_after:
            return self.balancer, self.ema_decay
        return EqualWeights(self.balancer), 0.0

    # --- Parameters -------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _positions(self, parameters: Iterable[Tensor]) -> set[int]:
        """Where in the optimizer the parameters are."""
        chosen = list(parameters) if isinstance(parameters, Iterable) else [parameters]
        strange = [p for p in chosen if not isinstance(p, Tensor)]
        if strange:
            raise TypeError(
                f"shared_parameters must hold tensors, such as model.trunk.parameters(), got {strange[0]!r}"
            )
        own = {id(p): i for i, p in enumerate(self._parameters())}
        foreign = [tuple(p.shape) for p in chosen if id(p) not in own]
        if foreign:
            raise ValueError(f"shared_parameters holds tensors that the optimizer does not train, of shapes {foreign}")
        return {own[id(p)] for p in chosen}

    def _shared(self, state: BalanceState) -> list[bool]:
        """For each parameter, whether its gradients are balanced."""
        if self._balanced is not None:
            return [p in self._balanced for p in range(len(self._parameters()))]
        least = min(2, len(state.names))
        return [mask > 0 and mask.bit_count() >= least for mask in state.reach]

    # --- State ------------------------------------------------------------------------------------------------------

    @property
    def _committed(self) -> BalanceState:
        saved = self.param_groups[0].get(KEY)
        return self._initial_state() if saved is None else self._restored(saved)

    def _restored(self, saved: Mapping[str, Any]) -> BalanceState:
        """A saved state; one from before there were estimators starts to estimate."""
        state = BalanceState.from_dict(saved)
        return state if state.estimator else replace(state, **self._nothing_estimated())

    def _commit_step(self, window: Window, following: BalanceState) -> None:
        """Keep what a step that was made has taught."""
        self._commit(following)
        if window.newest is not None:
            shared = zip(self._parameters(), self._shared(following), strict=True)
            chosen = [parameter for parameter, balanced in shared if balanced]
            history.reserve(self.inner, self._parameters(), len(following.names))
            history.remember(self.inner, chosen, window.gradients, window.newest)

    def _commit(self, state: BalanceState) -> None:
        self.param_groups[0][KEY] = state.to_dict()

    def _initial_state(self) -> BalanceState:
        state = BalanceState(
            method=type(self.balancer).__name__,
            balancer=dict(self.balancer.state_dict()),
            **self._nothing_estimated(),
        )
        return state.named(self._objective_names, simplex=self.balancer.simplex) if self._objective_names else state

    def _nothing_estimated(self) -> dict[str, Any]:
        return {
            "estimator": type(self.gramian_estimator).__name__,
            "estimates": self.gramian_estimator.fresh().state_dict(),
        }

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Resume, or start balancing from a plain inner optimizer's checkpoint."""
        saved = state_dict["param_groups"][0].get(KEY)
        problem = None if saved is None else self._foreign(saved)
        if problem is not None:
            raise ValueError(f"load_state_dict: {problem}")
        state = self._initial_state() if saved is None else self._restored(saved).check()
        for key, method in (("balancer", self.balancer), ("estimates", self.gramian_estimator)):
            try:
                method.load_state_dict(getattr(state, key))
            except ValueError as error:
                raise ValueError(f"load_state_dict: {key} of the balancing state: {error}") from error
        self.inner.load_state_dict(state_dict)
        self._commit(state)
        self._window, self._report = None, None

    def _foreign(self, saved: Mapping[str, Any]) -> str | None:
        """Why a saved balancing state is not this optimizer's; None if it is."""
        method, estimator = type(self.balancer).__name__, type(self.gramian_estimator).__name__
        return why_foreign(saved, method, estimator, self._objective_names or self._committed.names)

    def __getstate__(self) -> dict[str, Any]:
        # A process group is no process's but this one's: set it again after unpickling elsewhere.
        gone = ("_window", "_held", "_ranks", "process_group")
        return {**super().__getstate__(), **dict.fromkeys(gone)}

    def __deepcopy__(self, memo: dict[int, Any]) -> BalancedOptimizer:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.process_group = self.process_group
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.inner).__name__}, {self.balancer!r})"
