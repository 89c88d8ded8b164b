"""Methods that remember something from call to call, in a form that every checkpoint keeps."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar


class Stateful:
    """A method with options and a state.

    What it remembers are the attributes that ``STATE`` names: plain numbers or lists of them, replaced at each call and
    never changed in place. Every option is an attribute of the same name.
    """

    STATE: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-equal resume needs, as plain Python values."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned.

        Raises:
            ValueError: the keys are not this method's, or a value is not what its key stands for, finite numbers or
            a list of them. Nothing is restored then.
        """
        if state_dict.keys() != set(self.STATE):
            raise ValueError(
                f"state_dict is not one of {type(self).__name__}: expected keys {sorted(self.STATE)}, "
                f"got {sorted(state_dict)}"
            )
        for name in self.STATE:
            value = state_dict[name]
            numbers = value if isinstance(value, list) else [value]
            if type(value) is not type(getattr(self, name)) or not all(map(_finite, numbers)):
                raise ValueError(f"state_dict of {type(self).__name__}: {name} is {value!r}")
        for name in self.STATE:
            setattr(self, name, state_dict[name])

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in inspect.signature(type(self)).parameters)
        return f"{type(self).__name__}({options})"


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
