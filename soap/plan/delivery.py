"""What travels from one operator's tiles to their readers: fetches, and the messages and collectives that carry them. No costs, no torch.

Positions count from the operator's own first holding and fetch. So an answer stays valid as long as the configurations of the operator and
its readers stay the same.

A collective is used only where it cannot be slower than messages, if every device has one port in each direction. An all-gather or
all-to-all among n devices takes n-1 rounds on every port, just as messages do, but it is one call and no message waits behind another: it
is used from three devices on. Those that send rows to experts need not be those that receive them. A broadcast along a tree takes
ceil(log2 n) rounds, messages n-1. Halos between neighbours are messages.

Flows say who sends how many bytes to whom. A collective is a list of rounds, one after the other; the flows of a round run at once. In the
backward pass each collective runs as its transpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from soap.model.graph import OperatorGraph
from soap.model.regions import Box, volume
from soap.plan.collectives import Flow, tree_rounds
from soap.plan.coverage import LocalPiece
from soap.plan.plan import Exchange, Holding, Message, Part, Pattern, Plan, Reduction, remote_parts
from soap.plan.tiling import Tile

Round = tuple[tuple[Flow, ...], int]
"""Flows that run at once, and the most bytes that one target then adds up."""


def exchange_rounds(plan: Plan, exchange: Exchange, parts: Sequence[Part], *, gradient: bool) -> list[Round]:
    """Rounds that move ``parts`` of an exchange, or their gradients: one round, or for a broadcast those of a tree."""
    moved = [(source, target, box_bytes(plan, exchange.tensor, box)) for source, target, box, _ in remote_parts(plan, parts)]
    if exchange.pattern is not Pattern.BROADCAST:
        return [(joined(_turned(flow) for flow in moved) if gradient else joined(moved), 0)]
    source, _, size = moved[0]
    rounds = tree_rounds((source, *(device for device in exchange.devices if device != source)), size)
    if not gradient:
        return [(tuple(flows), 0) for flows in rounds]
    return [(tuple(map(_turned, flows)), size) for flows in reversed(rounds)]


def scatter_rounds(plan: Plan, reduction: Reduction, *, gradient: bool) -> list[Round]:
    """The one round of a reduce-scatter; with ``gradient`` that of the all-gather of its cells' gradients."""
    cells = {
        device: box_bytes(plan, reduced_tensor(plan, reduction), cell) if gradient else partial_bytes(plan, reduction, cell)
        for device, cell in zip(reduction.devices, reduction.cells, strict=True)
    }
    flows = tuple((a, b, size) for b, size in cells.items() for a in reduction.devices if a != b and size)
    if gradient:
        return [(tuple(map(_turned, flows)), 0)]
    return [(flows, (len(cells) - 1) * max(cells.values()))]


def reduced_tensor(plan: Plan, reduction: Reduction) -> str:
    """The tensor that a reduction computes, or computes a region of."""
    return plan.graph.operators[reduction.operator].outputs[reduction.output].tensor


def partial_bytes(plan: Plan, reduction: Reduction, box: Box) -> int:
    """Size of a region of the partial results that a reduction adds up."""
    return volume(box) * plan.graph.tensors[reduced_tensor(plan, reduction)].partial_itemsize


def box_bytes(plan: Plan, tensor: str, box: Box) -> int:
    """Size of a region of a tensor in the model's own dtype."""
    return volume(box) * plan.graph.tensors[tensor].itemsize


def _turned(flow: Flow) -> Flow:
    source, target, size = flow
    return target, source, size


def joined(flows: Iterable[Flow]) -> tuple[Flow, ...]:
    """The flows added up, one for each pair of devices; pairs ascend."""
    found: dict[tuple[int, int], int] = {}
    for source, target, size in flows:
        found[source, target] = found.get((source, target), 0) + size
    return tuple((source, target, size) for (source, target), size in sorted(found.items()))


SMALLEST_EXCHANGE = 3
"""The fewest devices that use a collective; two devices send each other messages."""

Reader = tuple[int, int, int]
"""Who a fetch is for: (operator, tile, input position)."""


@dataclass(frozen=True, slots=True)
class LocalFetch:
    """A ``plan.Fetch`` with local positions: pieces name the operator's own holdings, consumers name tiles of their own operators."""

    tensor: str
    box: Box
    device: int
    pieces: tuple[LocalPiece, ...]
    consumers: tuple[Reader, ...]


@dataclass(frozen=True, eq=False)
class Delivery:
    """What one operator leaves on devices for its readers, and how it reaches them. Positions count from the operator's own first.

    ``position``: of the operator. ``readers``: position of an operator that reads it -> the tiles of that. ``devices``: of all these tiles,
    ascending.
    """

    tiles: tuple[Tile, ...]
    reductions: tuple[Reduction, ...]
    holdings: tuple[Holding, ...]
    fetches: tuple[LocalFetch, ...]
    messages: tuple[Message, ...]
    exchanges: tuple[Exchange, ...]
    position: int
    readers: Mapping[int, tuple[Tile, ...]]
    devices: tuple[int, ...]

    @cached_property
    def gatherers(self) -> frozenset[int]:
        """The readers for which regions are put together of parts from other devices and own ones; none if a region comes from others
        alone, or a part is a sum."""
        found = set[int]()
        for fetch in self.fetches:
            held = [self.holdings[holding] for _, holding in fetch.pieces]
            if all(own.device == fetch.device for own in held):
                continue
            if all(own.device != fetch.device for own in held) or any(own.reduction is not None for own in held):
                return frozenset()
            found |= {reader for reader, *_ in fetch.consumers}
        return frozenset(found)

    @cached_property
    def leaves_sums(self) -> bool:
        """Whether all that it leaves are sums over several devices, which are read where they are, as they are."""
        if not self.reductions or self.messages or self.exchanges or any(len(own.devices) < 2 for own in self.reductions):
            return False
        return all(own.reduction is not None for own in self.holdings) and all(len(fetch.pieces) == 1 for fetch in self.fetches)


class PlacedDelivery:
    """The delivery of the operator at ``position``, whose outputs ``tensors`` the operators ``readers`` read, on ``devices``: ``like`` that
    of an operator that is alike on devices that lie alike, but for names. All of it is made when it is asked for."""

    def __init__(
        self, like: Delivery, position: int, readers: tuple[int, ...], devices: tuple[int, ...], tensors: Mapping[str, str]
    ) -> None:
        """``tensors``: name of an output of the other operator -> name of this one's."""
        self.like, self.position, self.readers, self.devices, self._tensors = like, position, readers, devices, tensors
        self._place = dict(zip(like.devices, devices, strict=True))
        self._reader = dict(zip(like.readers, readers, strict=True))

    @property
    def gatherers(self) -> list[int]:
        """``Delivery.gatherers``."""
        return [self._reader[reader] for reader in self.like.gatherers]

    @cached_property
    def own(self) -> Delivery:
        """The delivery itself, but for tiles of its readers."""
        like, on, tensors = self.like, self._place, self._tensors
        if like.position == self.position and like.devices == self.devices:
            return like
        return Delivery(
            tuple(self.tiles()),
            tuple([replace(own, operator=self.position, devices=self._all_on(own.devices)) for own in like.reductions]),
            tuple([Holding(tensors[own.tensor], own.box, on[own.device], own.tile, own.reduction) for own in like.holdings]),
            tuple([self._fetch(own) for own in like.fetches]),
            tuple([Message(on[own.source], on[own.target], own.parts) for own in like.messages]),
            tuple([Exchange(own.pattern, tensors[own.tensor], self._all_on(own.devices), own.parts) for own in like.exchanges]),
            self.position,
            dict.fromkeys(self.readers, ()),
            self.devices,
        )

    def tiles(self) -> Iterator[Tile]:
        """Its tiles."""
        for tile, device in zip(self.like.tiles, self.tile_devices, strict=True):
            own = tile.intervals, tile.inputs, tile.parameters, tile.outputs, tile.sparse_lookup, tile.part
            yield Tile(self.position, tile.index, tile.replica, device, *own)

    @cached_property
    def tile_devices(self) -> tuple[int, ...]:
        """The device of each of its tiles."""
        return self._all_on([tile.device for tile in self.like.tiles])

    def _fetch(self, own: LocalFetch) -> LocalFetch:
        consumers = tuple([(self._reader[reader], tile, place) for reader, tile, place in own.consumers])
        return LocalFetch(self._tensors[own.tensor], own.box, self._place[own.device], own.pieces, consumers)

    def _all_on(self, devices: Iterable[int]) -> tuple[int, ...]:
        return tuple([self._place[device] for device in devices])


class Carriers:
    """Assigns every piece that must move to a collective or a message."""

    def __init__(
        self,
        graph: OperatorGraph,
        fetches: Sequence[LocalFetch],
        tiles: Sequence[Tile],
        holdings: Sequence[Holding],
        reductions: Sequence[Reduction],
    ) -> None:
        self._tensors, self._routed = graph.tensors, (graph.copies_of or graph).routed
        self._fetches, self._holdings, self._reductions = fetches, holdings, reductions
        self.exchanges: list[Exchange] = []
        self.messages: list[Message] = []
        remote: dict[tuple[str, int | None], list[Part]] = {}  # by tensor and micro-batch: others are ready at other times
        for number, fetch in enumerate(fetches):
            for place, (_, holding) in enumerate(fetch.pieces):
                if holdings[holding].device != fetch.device:
                    remote.setdefault((fetch.tensor, tiles[holdings[holding].tile].part), []).append((number, place))
        rest: list[Part] = []
        for (tensor, _), parts in remote.items():
            if len(parts) >= SMALLEST_EXCHANGE - 1:
                parts = self._gathers(tensor, parts)
                parts = self._all_to_alls(tensor, parts)
                parts = self._broadcasts(tensor, parts)
            rest += parts
        self._make_messages(sorted(rest))

    def _ends(self, part: Part) -> tuple[int, int]:
        """(source, target)."""
        fetch = self._fetches[part[0]]
        return self._holdings[fetch.pieces[part[1]][1]].device, fetch.device

    def _gathers(self, tensor: str, parts: Sequence[Part]) -> list[Part]:
        """Make an all-gather where several devices each hold a part of one region and all need the whole. Returns the parts left over."""
        by_box: dict[Box, list[Part]] = {}
        for part in parts:
            by_box.setdefault(self._fetches[part[0]].box, []).append(part)
        rest: list[Part] = []
        for own in by_box.values():
            if not (len(own) > SMALLEST_EXCHANGE and self._is_complete(own) and self._all_get_the_same(own)):
                rest += own
            else:
                self._add(Pattern.ALL_GATHER, tensor, own)
        return rest

    def _all_to_alls(self, tensor: str, parts: Sequence[Part]) -> list[Part]:
        rest: list[Part] = []
        for own in self._components(parts):
            if len(own) > SMALLEST_EXCHANGE and self._each_gives_each(own, apart=tensor in self._routed):
                self._add(Pattern.ALL_TO_ALL, tensor, sorted(own))
            else:
                rest += own
        return rest

    def _broadcasts(self, tensor: str, parts: Sequence[Part]) -> list[Part]:
        """Make a broadcast where one piece goes to many devices. A device that needs it for a second region gets that by a message."""
        by_piece: dict[LocalPiece, dict[int, Part]] = {}
        rest: list[Part] = []
        for part in sorted(parts):
            fetch = self._fetches[part[0]]
            targets = by_piece.setdefault(fetch.pieces[part[1]], {})
            if targets.setdefault(fetch.device, part) != part:
                rest.append(part)
        for targets in by_piece.values():
            rounds = len(tree_rounds(range(len(targets) + 1), 0))
            if len(targets) + 1 >= SMALLEST_EXCHANGE and rounds < len(targets):
                self._add(Pattern.BROADCAST, tensor, list(targets.values()))
            else:
                rest += targets.values()
        return rest

    def _add(self, pattern: Pattern, tensor: str, parts: Sequence[Part]) -> None:
        devices = tuple(sorted({device for part in parts for device in self._ends(part)}))
        self.exchanges.append(Exchange(pattern, tensor, devices, tuple(parts)))

    def _make_messages(self, parts: Iterable[Part]) -> None:
        batches: dict[object, list[Part]] = {}
        for part in parts:
            fetch = self._fetches[part[0]]
            holding = self._holdings[fetch.pieces[part[1]][1]]
            ready = holding.tile if holding.reduction is None else self._reductions[holding.reduction].tiles
            batches.setdefault((self._ends(part), ready, self._tensors[fetch.tensor].dtype), []).append(part)
        for batch in batches.values():
            source, target = self._ends(batch[0])
            self.messages.append(Message(source, target, tuple(batch)))

    def _is_complete(self, parts: Sequence[Part]) -> bool:
        """Whether at least three devices take part, and each sends something to every other."""
        pairs = {self._ends(part) for part in parts}
        members = len({device for pair in pairs for device in pair})
        return members >= SMALLEST_EXCHANGE and len(pairs) == members * (members - 1)

    def _each_gives_each(self, parts: Sequence[Part], *, apart: bool) -> bool:
        """Whether at least three devices send, at least three receive, and each of the former sends something to each of the latter; unless
        they may be ``apart``, the same ones do."""
        pairs = {self._ends(part) for part in parts}
        sources, targets = ({pair[end] for pair in pairs} for end in (0, 1))
        enough = min(len(sources), len(targets)) >= SMALLEST_EXCHANGE and (apart or sources == targets)
        return enough and len(pairs) == len(sources) * len(targets) - len(sources & targets)

    def _all_get_the_same(self, parts: Sequence[Part]) -> bool:
        return len({frozenset(self._fetches[number].pieces) for number, _ in parts}) == 1

    def _components(self, parts: Sequence[Part]) -> list[list[Part]]:
        """The parts in groups: parts that share a source or a target, directly or through other parts, are together."""
        groups: list[tuple[set[tuple[int, int]], list[Part]]] = []
        for part in parts:
            ends, joined = set(enumerate(self._ends(part))), [part]
            apart = []
            for group in groups:
                if group[0] & ends:
                    ends |= group[0]
                    joined = group[1] + joined
                else:
                    apart.append(group)
            groups = [*apart, (ends, joined)]
        return [joined for _, joined in groups]
