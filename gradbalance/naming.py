"""Making things by name, with errors that show the way to the right one."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

Made = TypeVar("Made")


def make(kind: str, classes: Mapping[str, type[Made]], name: str, options: Mapping[str, Any]) -> Made:
    """Make an instance of one of the classes.

    Args:
        kind: what they are, for the message.
        classes: by name.
        name: one of theirs.
        options: the arguments of its class.

    Raises:
        ValueError: none has this name.
        TypeError: it has no such option, or needs one that is missing.
    """
    if name not in classes:
        near = difflib.get_close_matches(str(name).lower(), sorted(classes))
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"no {kind} is called {name!r}; {hint}available: {', '.join(sorted(classes))}")
    known = inspect.signature(classes[name]).parameters
    for option in options:
        if option not in known:
            raise TypeError(f"{kind} {name!r} has no option {option!r}; its options: {', '.join(known)}")
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise TypeError(f"{kind} {name!r} needs the option {option!r}; its options: {', '.join(known)}")
    return classes[name](**options)
