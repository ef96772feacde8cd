"""Stages of a pipeline: a chain of layers cut into consecutive parts, one for each group of devices, so that the slowest part or message is
as fast as possible.

In a full pipeline every stage takes a micro-batch in the time of the slowest of them, or of the slowest message between two of them, as
messages travel beside computation (PipeDream, Narayanan et al., 1806.03377, section 3.1: A = min max{A(i), C_i, T(i + 1 → j)}). Here the
groups may differ in speed and memory, and their order may be free; then all orders of their kinds are tried, which is cheap as long as
there are few kinds.

Of the partitions with the same slowest part the result has the least sum of all parts and messages: what filling the pipeline takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

NEVER = 2**60
"""Longer than any time in nanoseconds; twice that still fits into an int64."""


@dataclass(frozen=True, slots=True, eq=False)
class Borders:
    """What stages of layers hold beside what the layers keep. ``received`` [stages]: of how many micro-batches at once what has come from
    the stage before; of the first stage, of how many micro-batches it holds the inputs. ``forward_bytes``, ``back_bytes`` [layers + 1]: of
    a micro-batch, what crosses a border before a layer (before the first one: the inputs), and what of that has gradients.
    ``most_bytes`` [layers]: what a layer takes while it computes, which is that of one layer at a time. ``read_bytes``: what other stages
    than the first read by themselves for a micro-batch."""

    received: tuple[int, ...]
    forward_bytes: Integers
    back_bytes: Integers
    most_bytes: Integers
    read_bytes: int = 0

    def needed_bytes(self, stage: int, in_flight: int) -> Integers:
        """By first layer, and layer behind the last one, of a stage: what has come, the gradients of what it has sent, those that it sends,
        and what the largest of its layers takes. There is always room for one more that comes; nothing comes to the first stage."""
        at_first = (self.received[stage] + 1) * self.forward_bytes + self.back_bytes + self.read_bytes
        at_first[0] = self.received[stage] * self.forward_bytes[0] + self.back_bytes[0]
        layers = len(self.most_bytes)
        most = np.zeros((layers + 1, layers + 1), np.int64)
        for first in range(layers):
            most[first, first + 1 :] = np.maximum.accumulate(self.most_bytes[first:])
        return at_first[:, None] + (in_flight + 1) * self.back_bytes[None, :] + most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Layers in order, and what they cost on each kind of group.

    ``layer_ns`` [kinds, layers]: forward and backward pass of a micro-batch. ``message_ns`` [kinds, kinds, layers - 1]: its messages, both
    ways, over the cut behind a layer, from a group of the first kind to one of the second. ``kept_bytes`` [kinds, layers]: what a device
    keeps all the time, such as parameters. ``activation_bytes`` [kinds, layers]: what it keeps for each micro-batch in flight.
    ``limit_bytes`` [kinds]: the memory of a device. ``borders``: what passes between stages, if memory is to count that. ValueError if
    shapes do not fit.
    """

    layer_ns: Integers
    message_ns: Integers
    kept_bytes: Integers
    activation_bytes: Integers
    limit_bytes: Integers
    borders: Borders | None = None

    def __post_init__(self) -> None:
        kinds, layers = self.layer_ns.shape
        expected = {
            "message_ns": (kinds, kinds, layers - 1),
            "kept_bytes": (kinds, layers),
            "activation_bytes": (kinds, layers),
            "limit_bytes": (kinds,),
        }
        for name, shape in expected.items():
            if (found := getattr(self, name).shape) != shape:
                raise ValueError(f"{name} has shape {found}; expected {shape}, as layer_ns has {kinds} kinds and {layers} layers")

    @property
    def kind_count(self) -> int:
        """Of groups."""
        return int(self.layer_ns.shape[0])

    @property
    def layer_count(self) -> int:
        """In the chain."""
        return int(self.layer_ns.shape[1])


@dataclass(frozen=True, slots=True)
class Partition:
    """Stage s has the layers from ``firsts[s]`` to the next, on a group of kind ``kinds[s]``. ``slowest_ns``: the longest part or message.
    ``sum_ns``: of all parts and messages, what a micro-batch takes through an empty pipeline and back."""

    firsts: tuple[int, ...]
    kinds: tuple[int, ...]
    slowest_ns: int
    sum_ns: int


def partition(
    chain: Chain, groups: Sequence[int], in_flight: Sequence[int], *, any_order: bool = False, banned: Integers | None = None
) -> Partition | None:
    """The partition whose slowest part or message is fastest, all groups with a layer at least; None if none fits into memory.

    ``groups``: the kind of each group, in the order of the stages unless ``any_order``. ``in_flight``: micro-batches of each stage, as
    ``soap.schedules.play`` tells of a table. ``banned`` [stages, layers]: not 0 where a layer may not be in a stage.
    """
    if len(in_flight) != len(groups):
        raise ValueError(f"{len(in_flight)} numbers of micro-batches in flight; expected {len(groups)}, one for each stage")
    if not groups or len(groups) > chain.layer_count:
        return None
    problem = _Problem(chain, tuple(groups), tuple(in_flight), any_order, banned)
    slowest_ns, _, _ = problem.solve(np.maximum, NEVER)
    if slowest_ns >= NEVER:
        return None
    sum_ns, firsts, kinds = problem.solve(np.add, slowest_ns)
    return Partition(firsts, kinds, slowest_ns, sum_ns)


Combine = Callable[[Integers, Integers], Integers]


@dataclass(frozen=True, slots=True, eq=False)
class _Reached:
    """Stages up to one of a kind, with groups used up by kind. By how many layers these stages have: the least combination of their parts
    and messages, the first layer of the last stage, and what stands before it, as an index into the list of the stage before."""

    used: tuple[int, ...]
    kind: int
    least_ns: Integers
    first: Integers
    before: Integers


class _Problem:
    """A chain, the groups, and what every part takes and keeps. Arrays are [kinds, layers + 1, layers + 1]: of the layers from the first
    index up to, but not including, the second."""

    def __init__(
        self, chain: Chain, groups: tuple[int, ...], in_flight: tuple[int, ...], any_order: bool, banned: Integers | None
    ) -> None:
        self.chain, self.groups, self.in_flight, self.any_order = chain, groups, in_flight, any_order
        self.totals = tuple(groups.count(kind) for kind in range(chain.kind_count))
        self.part_ns, self.kept_bytes, self.activation_bytes = map(_parts, (chain.layer_ns, chain.kept_bytes, chain.activation_bytes))
        self.banned = None if banned is None else _parts(banned)
        self.part_ns[:, np.tri(chain.layer_count + 1, dtype=np.bool_)] = NEVER  # no stage without a layer

    def solve(self, combine: Combine, at_most_ns: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The least combination of parts and messages that take ``at_most_ns`` each, with first layers and kinds of its stages."""
        layers = self.chain.layer_count
        begun = np.full(layers + 1, NEVER)
        begun[0] = 0
        nowhere = np.full(layers + 1, -1)
        reached = [[_Reached((0,) * self.chain.kind_count, -1, begun, nowhere, nowhere)]]
        for stage in range(len(self.groups)):
            reached.append(self._next(reached[-1], stage, combine, at_most_ns))
        last = min(reached[-1], key=lambda found: int(found.least_ns[layers]))
        least_ns = int(last.least_ns[layers])
        return (least_ns, (), ()) if least_ns >= NEVER else (least_ns, *_walked_back(reached, last, layers))

    def _next(self, reached: Sequence[_Reached], stage: int, combine: Combine, at_most_ns: int) -> list[_Reached]:
        found: dict[tuple[tuple[int, ...], int], _Reached] = {}
        kinds = set(self.groups) if self.any_order else {self.groups[stage]}
        parts = {kind: self._part_ns(kind, stage, at_most_ns) for kind in kinds}
        for i, before in enumerate(reached):
            for kind in self._next_kinds(before.used):
                so_far = combine(before.least_ns, self._message_ns(before.kind, kind, at_most_ns))
                both = np.minimum(combine(so_far[:, None], parts[kind]), NEVER)
                first = both.argmin(axis=0)
                least_ns = both[first, np.arange(len(first))]
                used = (*before.used[:kind], before.used[kind] + 1, *before.used[kind + 1 :])
                new = _Reached(used, kind, least_ns, first, np.full(len(first), i))
                found[used, kind] = _better(found[used, kind], new) if (used, kind) in found else new
        return list(found.values())

    def _next_kinds(self, used: tuple[int, ...]) -> list[int]:
        if not self.any_order:
            return [self.groups[sum(used)]]
        return [kind for kind, (taken, total) in enumerate(zip(used, self.totals, strict=True)) if taken < total]

    def _part_ns(self, kind: int, stage: int, at_most_ns: int) -> Integers:
        """What parts take as this stage; for ever if they do not fit, or take too long."""
        needed_bytes = self.kept_bytes[kind] + self.in_flight[stage] * self.activation_bytes[kind]
        if self.chain.borders is not None:
            needed_bytes = needed_bytes + self.chain.borders.needed_bytes(stage, self.in_flight[stage])
        part_ns = self.part_ns[kind]
        fits = (needed_bytes <= self.chain.limit_bytes[kind]) & (part_ns <= at_most_ns)
        return np.where(fits if self.banned is None else fits & (self.banned[stage] <= 0), part_ns, NEVER)

    def _message_ns(self, sender: int, receiver: int, at_most_ns: int) -> Integers:
        """What messages take, by the first layer behind them; nothing before the first stage."""
        message_ns = np.zeros(self.chain.layer_count + 1, np.int64)
        if sender >= 0:
            between_ns = self.chain.message_ns[sender, receiver]
            message_ns[1:-1] = np.where(between_ns <= at_most_ns, between_ns, NEVER)
        return message_ns


def _better(one: _Reached, other: _Reached) -> _Reached:
    """The lesser of both, by number of layers."""
    less = other.least_ns < one.least_ns
    arrays = ((one.least_ns, other.least_ns), (one.first, other.first), (one.before, other.before))
    return _Reached(one.used, one.kind, *(np.where(less, new, old) for old, new in arrays))


def _walked_back(reached: Sequence[Sequence[_Reached]], last: _Reached, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First layers and kinds of all stages."""
    firsts, kinds = [], []
    for before in reversed(reached[:-1]):
        firsts.append(int(last.first[layers]))
        kinds.append(last.kind)
        last, layers = before[int(last.before[layers])], firsts[-1]
    return tuple(reversed(firsts)), tuple(reversed(kinds))


def _parts(values: Integers) -> Integers:
    """[kinds, layers] -> sums of all parts, [kinds, layers + 1, layers + 1]; below 0 where the second index is the smaller one."""
    sums = np.zeros((values.shape[0], values.shape[1] + 1), np.int64)
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums[:, None, :] - sums[:, :, None]
