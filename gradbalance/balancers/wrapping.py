"""Balancers around another balancer: they take its promises and keep its state with their own."""

from collections.abc import Mapping
from typing import Any

from gradbalance.balancers.base import Balancer

INNER = "balancer."
"""Prefix of the inner balancer's keys in the state."""


class Wrapping(Balancer):
    """A balancer that asks another one.

    Attributes:
        balancer: The inner balancer.
    """

    def __init__(self, balancer: str | Balancer) -> None:
        from gradbalance.balancers import get  # here, since that package imports this module

        if not isinstance(balancer, str | Balancer):
            raise TypeError(f"balancer must be a name or a Balancer, got {balancer!r}")
        self.balancer = get(balancer) if isinstance(balancer, str) else balancer
        self.simplex = self.balancer.simplex
        self.uses_gradients = self.balancer.uses_gradients
        self.uses_signal = self.balancer.uses_signal

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-equal resume needs; the inner balancer's keys begin with ``balancer.``."""
        inner = {INNER + name: value for name, value in self.balancer.state_dict().items()}
        return {**super().state_dict(), **inner}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, all of it or nothing.

        Raises:
            ValueError: the keys are not those of both balancers, or a value is not what its key stands for.
        """
        own = {name: value for name, value in state_dict.items() if not name.startswith(INNER)}
        before = super().state_dict()
        super().load_state_dict(own)
        try:
            self.balancer.load_state_dict(
                {name.removeprefix(INNER): value for name, value in state_dict.items() if name not in own}
            )
        except ValueError:
            super().load_state_dict(before)
            raise
