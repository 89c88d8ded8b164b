"""A torch optimizer that is another one underneath.

It *is* a ``torch.optim.Optimizer``, so schedulers, ``GradScaler``, accelerate, Lightning and checkpointing take it; and
it has no groups and no state of its own, so there is nothing that could differ from the inner one's.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class OptimizerWrapper(Optimizer):
    """Shares the inner optimizer's ``param_groups``, ``state`` and ``defaults``; hooks are its own.

    Args:
        optimizer: The inner optimizer.

    Raises:
        TypeError: If ``optimizer`` is not a ``torch.optim.Optimizer`` or is wrapped already.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Optimizer.__init__ would build param_groups of its own; everything it sets is either shared or set here.
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, OptimizerWrapper):
            raise TypeError(f"optimizer is already a {type(optimizer).__name__}; wrap its inner optimizer instead")
        self.inner = optimizer
        for hooks in _HOOKS:
            setattr(self, hooks, OrderedDict())
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's per-parameter state."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer."""
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer. Post hooks are called only if the step was made."""
        arguments = {} if closure is None else {"closure": closure}
        for pre_hook in self._optimizer_step_pre_hooks.values():
            pre_hook(self, (self,), arguments)
        made, result = self._make_step(closure)
        if made:
            for post_hook in self._optimizer_step_post_hooks.values():
                post_hook(self, (self,), arguments)
        return result

    # torch would call this optimizer's step hooks and the global ones; the global ones are called by the inner step.
    step.hooked = True  # type: ignore[attr-defined]

    def _make_step(self, closure: Callable[[], Any] | None) -> tuple[bool, Any]:
        """Whether the step was made, and what the inner optimizer returned."""
        return True, self.inner.step() if closure is None else self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self.inner.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an optimizer's state dict.

        Raises:
            TypeError: If it is not a dict.
            ValueError: If it is not an optimizer's, or another one's; nothing is loaded then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict: state_dict must be a dict, got {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        groups = state_dict.get("param_groups")
        if (
            "state" not in state_dict
            or not isinstance(groups, Sequence)
            or not all(isinstance(group, Mapping) and "params" in group for group in groups or [None])
        ):
            raise ValueError(
                "load_state_dict: state_dict is not an optimizer's: it must hold 'state' and 'param_groups', a list of "
                f"groups with their 'params', got {state_dict!r:.200}"
            )
        self._load(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler puts a ``step`` on the instance that is tied to it: on a copy it would step the original. As in
        # torch, hooks stay behind as well.
        state = {name: value for name, value in self.__dict__.items() if name != "step"}
        return {**state, **{hooks: OrderedDict() for hooks in _HOOKS}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._patch_step_function()


class Snapshot:
    """Parameters and state as they were, for an optimizer that changes them before a step is known to be good.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._values = [p.detach().clone() for p in self._parameters]
        # Keyed by parameter: the keys must stay the parameters themselves.
        self._state = copy.deepcopy(optimizer.state, {id(p): p for p in self._parameters})

    def restore(self) -> None:
        """Put all back."""
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._values, strict=True):
                parameter.copy_(value)
        self._optimizer.state = self._state
