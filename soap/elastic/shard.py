"""One partition at its server: values, the optimizer's state, how many pushes it has counted and of which leases."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from soap.elastic.faults import ElasticError
from soap.elastic.layout import Partition
from soap.elastic.leases import Ledger, Steps
from soap.runtime.sync.row_update import RowGradient, Updater, add_up
from soap.runtime.updates.optimizers import OptimizerFactory, Recipe
from soap.runtime.updates.trial import try_optimizer

Gradient = RowGradient | Tensor
"""Of some rows, or of the whole cell. Rows count from the cell's first."""


class TooOld(ElasticError):
    """A version was asked for that is not there yet; the caller waits. ``version``: the one that is."""

    def __init__(self, partition: str, least: int, version: int) -> None:
        super().__init__(f"partition {partition!r} is at version {version}; expected at least {least}: ask again when more has been pushed")
        self.version = version


@dataclass(frozen=True)
class ShardState:
    """All that a partition is. ``optimizer``: the state that the optimizer keeps for it, tensors and numbers by key. ``pending``: by lease,
    the gradients of a step that are counted, but not in the values yet."""

    version: int
    counted: Ledger
    values: Tensor
    optimizer: Mapping[str, Any]
    pending: Mapping[int, Gradient] = field(default_factory=dict)


class Shard:
    """A partition's values, updated by one optimizer step for each push.

    With ``steps`` an update is that of a whole step: the sum of its leases' gradients, in their order, whoever pushed first. It is made
    when a later step reads (``bring_to``), so that all of a step read the same values, even those whose lease is dealt again.

    Whoever calls it holds ``lock``. ``version``: pushes that are counted. ``counted``: their leases. With ``lazy`` an update changes the
    rows that have a gradient alone, whatever the optimizer; else rows without one are left out only where a zero gradient changes nothing.
    """

    def __init__(
        self, partition: Partition, values: Tensor, make: OptimizerFactory, *, lazy: bool = False, steps: Steps | None = None
    ) -> None:
        if tuple(values.shape) != partition.cell:
            raise ElasticError(f"values of {partition.name!r} have shape {list(values.shape)}; expected {list(partition.cell)}")
        self.partition, self.lock = partition, threading.Lock()
        self.values = values.detach().clone(memory_format=torch.contiguous_format)
        self.version, self.counted = 0, Ledger()
        self.steps, self.pending = steps, dict[int, Gradient]()
        self.optimizer = make([self.values])
        self._updater = Updater(self.optimizer, {0: self.values}, {0: (partition.name, tuple((0, size) for size in partition.cell))}, lazy)

    def checked(self, gradient: Gradient) -> Gradient:
        """The gradient, if it can be applied. ElasticError in one line otherwise: a log must not hold what cannot be done again."""
        if isinstance(gradient, RowGradient):
            self._check_rows(gradient.rows)
            expected, found = (len(gradient.rows), *self.partition.cell[1:]), gradient.values
        else:
            expected, found = self.partition.cell, gradient
        if tuple(found.shape) != expected or found.dtype is not self.values.dtype:
            raise ElasticError(
                f"gradient {str(found.dtype).removeprefix('torch.')}{list(found.shape)} for partition {self.partition.name!r}; expected "
                f"{str(self.values.dtype).removeprefix('torch.')}{list(expected)}"
            )
        return gradient

    def _check_rows(self, rows: Tensor) -> None:
        cell = self.partition.cell
        if not cell:
            raise ElasticError(f"partition {self.partition.name!r} is a number; expected a dense gradient")
        fits = rows.dim() == 1 and rows.dtype is torch.int64
        if not fits or (len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= cell[0] or bool((rows[1:] <= rows[:-1]).any()))):
            raise ElasticError(f"rows of a gradient for {self.partition.name!r}; expected int64 that rise, from 0 to {cell[0] - 1}")

    def apply(self, gradient: Gradient, lease: int) -> int:
        """Count a lease's checked gradient: one step of the optimizer, or with ``steps`` a part of one. Returns the new version. Equal
        calls from equal states give equal bits, on one kind of machine with one number of threads."""
        if self.steps is None:
            self._update(gradient)
        else:
            self.bring_to(self.steps.of(lease))
            self.pending[lease] = gradient
        self.counted.add(lease)
        self.version += 1
        return self.version

    def bring_to(self, step: int) -> None:
        """Make the updates of all steps before this one, with ``steps``. ``TooOld`` if one of their leases is not counted."""
        if self.steps is None:
            return
        if self.pending and (own := self.steps.of(next(iter(self.pending)))) < step:
            if len(self.pending) < len(self.steps.members(own)):
                raise TooOld(self.partition.name, step, own)
            self._update(_sum([self.pending[lease] for lease in sorted(self.pending)]))
            self.pending.clear()
        if step and self.steps.members(step - 1)[-1] not in self.counted:
            raise TooOld(self.partition.name, step, self.steps.of(len(self.counted)))

    def _update(self, gradient: Gradient) -> None:
        if isinstance(gradient, RowGradient):
            self._updater.update({}, {0: gradient}, {})
        else:
            self._updater.update({0: gradient}, {}, {})

    def state(self) -> ShardState:
        """A copy of all that the partition is."""
        kept = self.optimizer.state.get(self.values, {})
        copied = {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in kept.items()}
        return ShardState(self.version, self.counted.copy(), self.values.clone(), copied, dict(self.pending))

    def load(self, state: ShardState) -> None:
        """Go on from a state. ElasticError in one line if it is another partition's."""
        if state.values.shape != self.values.shape or state.values.dtype is not self.values.dtype:
            raise ElasticError(
                f"saved values of {self.partition.name!r} are {state.values.dtype}{list(state.values.shape)}; expected "
                f"{self.values.dtype}{list(self.values.shape)}: choose another folder"
            )
        self.values.copy_(state.values)
        self.version, self.counted, self.pending = state.version, state.counted.copy(), dict(state.pending)
        if state.optimizer:
            self.optimizer.state[self.values] = dict(state.optimizer)


def _sum(gradients: Sequence[Gradient]) -> Gradient:
    """The sum of one or more gradients, added in the given order. Where some are of rows and some of the whole cell, it is of the whole."""
    rows = [gradient for gradient in gradients if isinstance(gradient, RowGradient)]
    if len(rows) == len(gradients):
        return add_up(rows)
    size = next(len(gradient) for gradient in gradients if isinstance(gradient, Tensor)) if rows else 0
    whole = [gradient.dense(0, size) if isinstance(gradient, RowGradient) else gradient for gradient in gradients]
    total = whole[0].clone()
    for other in whole[1:]:
        total += other
    return total


def check_optimizer(make: OptimizerFactory, shape: tuple[int, ...]) -> None:
    """ElasticError in one line unless the update is elementwise, so that a parameter's cells may be updated each by itself."""
    tried = try_optimizer(Recipe(make).layout({"cell": shape}), {"cell": shape})
    if tried.whole:
        raise ElasticError(
            f"optimizer {tried.name} updates a parameter as a whole, but servers keep it in partitions; use one that updates each element "
            "by itself, such as torch.optim.Adagrad"
        )
