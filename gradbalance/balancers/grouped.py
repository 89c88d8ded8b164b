"""Groups: another method balances between them, the mean is taken within them."""

from collections.abc import Sequence
from numbers import Integral

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbalance.balancers.base import Balancer
from gradbalance.balancers.checks import Array, array, loss_values
from gradbalance.balancers.losses import presence
from gradbalance.balancers.wrapping import Wrapping
from gradbalance.solvers.checks import active_rows

Mask = NDArray[np.bool_]


class Grouped(Wrapping):
    """Balance groups of objectives, each as one objective whose gradient is the mean of its members'.

    With W_Gk = 1 / n_G for the n_G members k of group G, and 0 elsewhere, the inner balancer is given the Gramian
    W M Wᵀ of the groups' mean gradients and the groups' mean losses. If λ_G is its answer, every member has
    λ_k = λ_G / n_G: the update is Σ_G λ_G × the group's mean gradient. So ten variants of one objective count as one.

    An objective that is absent or has no gradient leaves its group's mean and gets 0; a group with no one left is
    absent itself, or has no gradient itself. Scale behaviour and promises are the inner balancer's, between groups:
    a member may be in conflict with the update even if its group is not. The weights, which an optimizer may average
    over steps, are the inner balancer's, spread evenly over all members of a group, with the same sum; before the inner
    balancer scales an average of them it is gathered from the members that take part. A member that comes back between
    two refreshes brings its last coefficient, so that its group is too strong until the next one.

    Args:
        balancer: the inner balancer, or its name. Options with one value per objective then mean groups.
        groups: the objectives of each group, such as ``[[0, 1], [2]]``; each of 0 … K − 1 is in exactly one.
    """

    def __init__(self, balancer: str | Balancer, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(balancer)
        self.groups = _partition(groups)
        self._member = np.zeros((len(self.groups), sum(map(len, self.groups))), dtype=bool)
        for row, members in zip(self._member, self.groups, strict=True):
            row[members] = True

    def weights(self, gramian: Tensor, losses: Tensor | None = None, signal: Tensor | None = None) -> Tensor:
        """Return the inner balancer's weights, divided evenly among the members."""
        size = self._checked(len(gramian))
        values = None if losses is None else loss_values(losses, size, "Grouped")
        present = presence(losses, size, "Grouped")
        counted = self._counted(array(gramian), present)
        mean = _mean(counted)
        inner = self.balancer.weights(
            _of_groups(mean, gramian),
            None if values is None else torch.from_numpy(_mean_losses(counted, values)),
            None if signal is None else _of_groups(mean, signal),
        )
        return torch.from_numpy(array(inner) @ _mean(self._member & counted.any(axis=1, keepdims=True)))

    def scale(self, weights: Tensor, gramian: Tensor) -> Tensor:
        """Return λ_k = λ_G / n_G, n_G the number of members with a gradient."""
        size = self._checked(len(gramian))
        mean = _mean(self._counted(array(gramian), np.full(size, True)))
        gathered = torch.from_numpy(self._member.sum(axis=1) * (mean @ array(weights)))
        return torch.from_numpy(array(self.balancer.scale(gathered, _of_groups(mean, gramian))) @ mean)

    def _counted(self, m: Array, present: Mask) -> Mask:
        """Say which members make up the mean of each group, shape (groups, K).

        They are the present ones with a gradient. In a group where none has one, all present ones count: it has a mean
        loss, and a balancer that looks at losses alone may be given no gradients.
        """
        active = self._member & active_rows(np.sqrt(m.diagonal())) & present
        return np.where(active.any(axis=1, keepdims=True), active, self._member & present)

    def _checked(self, size: int) -> int:
        if size != self._member.shape[1]:
            raise ValueError(f"groups are of {self._member.shape[1]} objectives, but there are {size}")
        return size


def _mean(counted: Mask) -> Array:
    """Return W; the row of a group with no one left is 0."""
    return np.asarray(counted / np.maximum(counted.sum(axis=1, keepdims=True), 1))


def _of_groups(mean: Array, gramian: Tensor) -> Tensor:
    return torch.from_numpy(mean @ array(gramian) @ mean.T)


def _mean_losses(counted: Mask, losses: Array) -> Array:
    """Return the groups' mean losses, NaN for a group with no one left."""
    sums = np.where(counted, losses, 0.0).sum(axis=1)
    numbers = counted.sum(axis=1)
    return np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan)


def _partition(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    try:
        found = [list(members) for members in groups]
    except TypeError as error:
        raise TypeError(f"groups must be lists of objectives such as [[0, 1], [2]], got {groups!r}") from error
    members = [member for group in found for member in group]
    if not all(isinstance(member, Integral) and not isinstance(member, bool) for member in members):
        raise TypeError(f"groups must be lists of objectives such as [[0, 1], [2]], got {groups!r}")
    if not found or not all(found):
        raise ValueError(f"groups must each hold an objective, got {found}")
    if sorted(members) != list(range(len(members))):
        raise ValueError(f"groups must hold each of the objectives 0 … K − 1 exactly once, got {found}")
    return [[int(member) for member in group] for group in found]
