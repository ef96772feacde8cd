"""Gradients of some rows of a table, and updates of only the rows that have some, with any torch optimizer whose update is elementwise.
*Exact*: rows are skipped only where a zero gradient changes neither them nor their state. *Lazy*: rows that a step does not look up always
keep both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from soap.errors import RuntimeFailure
from soap.model.regions import Box

T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True)
class _Compact:
    """The rows of a shard that are updated. ``at``: their positions in the shard. ``values``, ``state``: before the update."""

    shard: torch.Tensor
    at: torch.Tensor
    values: torch.Tensor
    state: dict[str, Any]


class Updater:
    """Updates tensors with the user's optimizer, which has all of them as parameters. ``tensors``: by number. ``parts``: number ->
    (parameter, region) of the tensor. ``optimizer`` is None if this rank has nothing to train."""

    def __init__(
        self, optimizer: torch.optim.Optimizer | None, tensors: Mapping[int, torch.Tensor], parts: Mapping[int, tuple[str, Box]], lazy: bool
    ) -> None:
        self.optimizer, self.tensors, self.parts, self.lazy = optimizer, tensors, parts, lazy
        groups = enumerate(() if optimizer is None else optimizer.param_groups)
        self._places = {id(own): (number, place) for number, group in groups for place, own in enumerate(group["params"])}
        self._left: set[int] = set()
        """Tensors that this step has not updated yet."""

    def update(
        self,
        dense: Mapping[int, torch.Tensor],
        rows: Mapping[int, RowGradient],
        looked_up: Mapping[str, torch.Tensor],
        only: Collection[int] | None = None,
    ) -> None:
        """One optimizer step, or the part of it for the tensors in ``only``, which costs what a step of these alone would.

        ``dense``, ``rows``: gradients by number of the tensor. ``looked_up``: parameter with a dense gradient -> rows that the step has
        looked up; lazy updates alone need it.
        """
        updated = [number for number in (self.tensors if only is None else only) if number in self.tensors]
        if not self._left.issuperset(updated):  # a new step
            self._left = set(self.tensors)
            for tensor in self.tensors.values():
                tensor.grad = None
        self._left.difference_update(updated)
        for number in updated:
            self.tensors[number].grad = dense.get(number)
        if self.optimizer is None:
            return
        with self._narrowed(self.optimizer, updated):
            if rows or looked_up:
                self._update_rows(self.optimizer, updated, rows, looked_up)
            else:
                self.optimizer.step()

    def _update_rows(
        self,
        optimizer: torch.optim.Optimizer,
        updated: Collection[int],
        rows: Mapping[int, RowGradient],
        looked_up: Mapping[str, torch.Tensor],
    ) -> None:
        """One optimizer step for tensors of which some have gradients by rows, or are updated by rows."""
        by_rows: dict[int, RowGradient] = {}
        for number in updated:
            tensor, (name, box) = self.tensors[number], self.parts[number]
            if id(tensor) not in self._places:
                continue
            if number in rows:
                if self.lazy or spares_rows(optimizer, optimizer.param_groups[self._places[id(tensor)][0]]):
                    by_rows[number] = rows[number]
                else:
                    first, stop = box[0]
                    tensor.grad = rows[number].dense(first, stop - first)
            elif tensor.grad is not None and name in looked_up:
                by_rows[number] = RowGradient.of(tensor.grad, looked_up[name], box[0][0])
                tensor.grad = None
        with self._compacted(optimizer, by_rows):
            optimizer.step()

    @contextmanager
    def _narrowed(self, optimizer: torch.optim.Optimizer, updated: Collection[int]) -> Iterator[None]:
        """Inside, the optimizer's groups have these tensors alone, in their order: a step looks at all that groups have. Afterwards they
        have no gradients, which a next part of the step must not see."""
        if len(updated) == len(self.tensors):
            yield
            return
        chosen: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        known = (own for own in (self.tensors[number] for number in updated) if id(own) in self._places)
        for own in sorted(known, key=lambda own: self._places[id(own)]):
            chosen[self._places[id(own)][0]].append(own)
        try:
            with _instead(optimizer, chosen):
                yield
        finally:
            for number in updated:
                self.tensors[number].grad = None

    @contextmanager
    def _compacted(self, optimizer: torch.optim.Optimizer, gradients: Mapping[int, RowGradient]) -> Iterator[None]:
        """Inside, the optimizer sees compact tensors of the updated rows, with their state, instead of the shards."""
        compacts = parallel(lambda number: self._compact(optimizer, number, gradients[number]), tuple(gradients))
        instead = {id(own.shard): own.values for own in compacts}
        for own in compacts:
            if own.state:
                optimizer.state[own.values] = own.state
        try:
            with _instead(optimizer, [[instead.get(id(own), own) for own in group["params"]] for group in optimizer.param_groups]):
                yield
        finally:
            states = [optimizer.state.pop(own.values, {}) for own in compacts]
        known = [optimizer.state.get(own.shard, {}) for own in compacts]
        pairs = list(zip(compacts, states, known, strict=True))
        for own, state in zip(compacts, parallel(_put_back, pairs), strict=True):
            if state:
                optimizer.state[own.shard] = state

    def _compact(self, optimizer: torch.optim.Optimizer, number: int, gradient: RowGradient) -> _Compact:
        shard = self.tensors[number]
        at = gradient.rows - self.parts[number][1][0][0]
        values = shard.detach().index_select(0, at).requires_grad_()
        values.grad = gradient.values
        state = optimizer.state.get(shard, {})
        return _Compact(shard, at, values, {k: v.index_select(0, at) if _is_by_row(v, shard) else v for k, v in state.items()})


@contextmanager
def _instead(optimizer: torch.optim.Optimizer, parameters: Sequence[list[torch.Tensor]]) -> Iterator[None]:
    """Inside, the optimizer's groups have these tensors."""
    before = [group["params"] for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, parameters, strict=True):
        group["params"] = own
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group["params"] = own


def spares_rows(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """True if a zero gradient changes neither a row nor its state. That is known of some optimizers, and assumed of no other."""
    if type(optimizer) is torch.optim.SGD:
        return bool(group["momentum"] == 0 and group["weight_decay"] == 0)
    return type(optimizer) is torch.optim.Adagrad and bool(group["weight_decay"] == 0)


def parallel(work: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """Do the work on all items, with as many threads as torch may use."""
    threads = min(len(items), torch.get_num_threads())
    if threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def _put_back(updated: tuple[_Compact, dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """Copy updated rows and their new state back into the shard and its state. Returns the shard's state."""
    own, state, before = updated
    result: dict[str, Any] = {}
    with torch.no_grad():
        own.shard.index_copy_(0, own.at, own.values)
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                result[key] = value
                continue
            if value.shape != own.values.shape:
                raise RuntimeFailure(
                    f"optimizer state {key!r} has shape {tuple(value.shape)} for rows of shape {tuple(own.values.shape)}; expected a "
                    "number or a value for each element: sparse parameters need an optimizer whose update is elementwise"
                )
            whole = before.get(key)
            result[key] = whole if _is_by_row(whole, own.shard) else torch.zeros_like(own.shard, dtype=value.dtype, requires_grad=False)
            result[key].index_copy_(0, own.at, value)
    return result


def _is_by_row(value: Any, shard: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shard.shape


class RowGradient(NamedTuple):
    """The gradient of some rows. ``rows``: distinct row numbers, ascending, int64. ``values``: their gradients, shape (rows, ...)."""

    rows: torch.Tensor
    values: torch.Tensor

    def dense(self, first: int, count: int) -> torch.Tensor:
        """The gradient of the rows ``first`` to ``first + count``, with zeros for rows that are missing here."""
        whole = self.values.new_zeros((count, *self.values.shape[1:]))
        whole[self.rows - first] = self.values
        return whole

    @staticmethod
    def of(gradient: torch.Tensor, rows: torch.Tensor, first: int) -> RowGradient:
        """The gradients of ascending ``rows``, taken from a dense gradient whose first row has number ``first``; others are left out."""
        there = rows[(rows >= first) & (rows < first + len(gradient))]
        return RowGradient(there, gradient.index_select(0, there - first))


def add_up(parts: Sequence[RowGradient]) -> RowGradient:
    """The sum of one or more row gradients, added in the given order: equal parts give equal bits."""
    if len(parts) == 1:
        return parts[0]
    rows: torch.Tensor = torch.unique(torch.cat([part.rows for part in parts]))
    values = parts[0].values.new_zeros((len(rows), *parts[0].values.shape[1:]))
    for part in parts:
        values.index_add_(0, torch.searchsorted(rows, part.rows), part.values)
    return RowGradient(rows, values)


def common_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The union of one or more lists of rows, ascending."""
    if len(rows) == 1:
        return rows[0]
    found: torch.Tensor = torch.unique(torch.cat(list(rows)))
    return found
