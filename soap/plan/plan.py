"""The plan: what a strategy means, tile by tile, before any cost is known.

``lowering.build_plan`` makes it; the simulator turns it into timed tasks (``lowering.lower``) and the runtime executes it with real
tensors. Both therefore speak of the same tiles, transfers, reductions and shards, under the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from soap.model.graph import Operator, OperatorGraph
from soap.model.regions import Box
from soap.plan.tiling import Tile
from soap.strategy.config import Strategy
from soap.strategy.methods import Contract, named


@dataclass(frozen=True, slots=True)
class Holding:
    """A region of an activation that lies on a device once its tile has run (or, if ``reduction`` is set, once that ended)."""

    tensor: str
    box: Box
    device: int
    tile: int
    reduction: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a fetch, taken from one holding (position in ``Plan.holdings``)."""

    box: Box
    holding: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """A region of an activation brought together on one device for the tiles there that read exactly it.

    ``pieces`` are disjoint and cover ``box``; those whose holding is on ``device`` are local, each of the others is part of one message or
    exchange.
    ``consumers``: (position in ``Plan.tiles``, input position). In the backward pass the region's gradient, summed over the
    consumers, goes back the same ways.
    """

    tensor: str
    box: Box
    device: int
    pieces: tuple[Piece, ...]
    consumers: tuple[tuple[int, int], ...]


Part = tuple[int, int]
"""A piece on its way: (position in ``Plan.fetches``, position of the piece in it)."""


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces that one device sends another in one go, because they exist from the same moment on.

    ``parts`` are taken from holdings of one tile, or of sums over the same tiles, and have one dtype. In the backward pass their gradients
    come back together.
    """

    source: int
    target: int
    parts: tuple[Part, ...]


class Pattern(StrEnum):
    """Which collective an exchange is."""

    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Pieces of one tensor that several devices give each other in one collective, once the last of them is there.

    All-gather: all fetch one region, of which each holds a part. All-to-all: each gives something to each. Broadcast: one piece
    goes from one device to the others. ``devices``: sorted, distinct, at least three. ``parts``: every piece that moves. The
    backward pass is the transpose: gradients of the parts go the other way, for a broadcast summed on the way.
    """

    pattern: Pattern
    tensor: str
    devices: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Partial results of one output region, summed over a group of devices.

    ``tiles``: the contributing tiles (positions in ``Plan.tiles``), in index order: the order of summation on one device.
    ``devices``: sorted, distinct; with a single device no communication is needed. Without ``cells`` the whole sum is left on every
    device (all-reduce), and in the backward pass the gradients that the devices' own consumers give are summed over the group and reach
    every tile. With ``cells``, one per device, disjoint, covering ``box`` and perhaps empty, each device gets its own cell of the sum
    (reduce-scatter), and in the backward pass the cells' gradients are brought together on all (all-gather).
    """

    operator: int
    output: int
    replica: int
    box: Box
    tiles: tuple[int, ...]
    devices: tuple[int, ...]
    cells: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """A region of a parameter with one owner set: every device of ``devices`` (sorted, distinct) keeps a copy of it, and updates that.

    Shards of one parameter are disjoint, so that operators that split a shared parameter differently are served alike. Gradients
    are summed over ``uses``, (position in ``Plan.tiles``, parameter position), then over the devices. What no tile reads of a
    trainable parameter is a shard without uses, on the first device of the parameter's first shard. Tiles run on devices that have a copy
    of what they read, unless servers keep it: then the shard is one partition, and ``devices`` its server.
    """

    parameter: str
    index: int
    box: Box
    devices: tuple[int, ...]
    uses: tuple[tuple[int, int], ...]
    trainable: bool


@dataclass(frozen=True, slots=True)
class ShardSync:
    """Shards that one method keeps in step together, and who reads them.

    ``method``: its name in ``strategy.methods``. ``parameter``, ``index``: what it is called after: a parameter, and the number of its
    first shard, or of a region that servers keep. ``box``: the region that readers read. ``shards``: what it updates (positions in
    ``Plan.shards``): those whose gradients lie in one buffer, in this order, or a region's partitions in order of their rows; their
    ``devices`` are the owners. ``readers``: devices (sorted, distinct) whose tiles read it, in ``uses``. ``leaders``: for each reader the
    device through which it deals with the others: the first reader of its host if hosts join theirs, else itself.
    """

    method: str
    parameter: str
    index: int
    box: Box
    shards: tuple[int, ...]
    readers: tuple[int, ...]
    leaders: tuple[int, ...]
    uses: tuple[tuple[int, int], ...]

    @property
    def contract(self) -> Contract:
        """What its method promises."""
        return named(self.method)

    @property
    def aggregated(self) -> bool:
        """Whether some readers deal with the others through a leader."""
        return self.leaders != self.readers


@dataclass(frozen=True)
class Plan:
    """All of a strategy, lowered. Positions in these tuples are the identities used across them.

    Every trainable shard that gets a gradient is in one of ``syncs``. Its part in ``plan.syncs`` says what that moves, updates and holds.

    ``first_tile[i]`` is the position of operator i's first tile; its tiles follow in index order. ``accelerators``: devices that are no
    CPUs: what servers keep beside them lies in the memory of their host. ``on_rows``: operators whose tiles run on the rows that they look
    up (``row_counts.operators_on_rows``). ``strategy``: what it was built from; of a folded plan the one on two copies.
    """

    strategy: Strategy
    graph: OperatorGraph
    device_count: int
    accelerators: frozenset[int]
    tiles: tuple[Tile, ...]
    first_tile: tuple[int, ...]
    holdings: tuple[Holding, ...]
    fetches: tuple[Fetch, ...]
    messages: tuple[Message, ...]
    exchanges: tuple[Exchange, ...]
    reductions: tuple[Reduction, ...]
    shards: tuple[Shard, ...]
    syncs: tuple[ShardSync, ...]
    on_rows: frozenset[int]

    @cached_property
    def on_servers(self) -> frozenset[int]:
        """Shards that servers keep."""
        return frozenset(number for sync in self.syncs if sync.contract.has_servers for number in sync.shards)

    @cached_property
    def synchronized(self) -> frozenset[int]:
        """Shards that get a gradient."""
        return frozenset(number for sync in self.syncs for number in sync.shards)

    def owners(self, sync: ShardSync) -> tuple[int, ...]:
        """The devices that keep a part of what is synchronized, ascending."""
        return tuple(sorted({device for number in sync.shards for device in self.shards[number].devices}))

    def members(self, sync: ShardSync) -> tuple[int, ...]:
        """Its readers and owners, ascending."""
        return tuple(sorted({*sync.readers, *self.owners(sync)}))

    def as_run(self, tile: Tile) -> Tile:
        """A tile as cost models are asked for it."""
        return replace(tile, on_rows=True) if tile.operator in self.on_rows else tile

    def operator(self, tile: Tile) -> Operator:
        """The operator that a tile belongs to."""
        return self.graph.operators[tile.operator]


def forward_name(op: Operator, tile: Tile) -> str:
    """Task name of a tile's forward pass."""
    return f"forward {op.name}[{tile.index}]"


def backward_name(op: Operator, tile: Tile) -> str:
    """Task name of a tile's backward pass."""
    return f"backward {op.name}[{tile.index}]"


def message_name(plan: Plan, message: Message, *, gradient: bool = False) -> str:
    """Task name of a message, or of its gradients on their way back."""
    ends = f"{message.target}->{message.source}" if gradient else f"{message.source}->{message.target}"
    return f"transfer {_parts_name(plan, message.parts, gradient)} {ends}"


def exchange_name(plan: Plan, exchange: Exchange, *, gradient: bool = False) -> str:
    """Task name of an exchange, or of its transpose."""
    members = ",".join(map(str, exchange.devices))
    if exchange.pattern is Pattern.BROADCAST:
        return f"{exchange.pattern} {_parts_name(plan, exchange.parts[:1], gradient)} {members}"
    region = _region(plan.fetches[exchange.parts[0][0]].box)
    return f"{exchange.pattern} {'gradient of ' if gradient else ''}{exchange.tensor}{region} {members}"


def _parts_name(plan: Plan, parts: Sequence[Part], gradient: bool) -> str:
    fetch, piece = parts[0]
    first = f"{plan.fetches[fetch].tensor}{_region(plan.fetches[fetch].pieces[piece].box)}"
    return f"{'gradient of ' if gradient else ''}{first}{_more(parts)}"


def _more(things: Sequence[object]) -> str:
    return f"+{len(things) - 1}" if len(things) > 1 else ""


def _region(box: Box) -> str:
    return f"[{','.join(f'{a}:{b}' for a, b in box)}]"


def reduce_name(op: Operator, reduction: Reduction, *, gradient: bool = False) -> str:
    """Task name of summing partial results over a group, or of what becomes of the sum's gradients."""
    if reduction.cells:
        verb = "all-gather gradient of" if gradient else "reduce-scatter"
    else:
        verb = "reduce gradient of" if gradient else "reduce"
    return f"{verb} {op.outputs[reduction.output].tensor}{_region(reduction.box)}#{reduction.replica}"


def sync_name(sync: ShardSync, verb: str = "sync") -> str:
    """Task name of a communication of a synchronization."""
    return f"{verb} {sync.parameter}[{sync.index}]{_more(sync.shards) if not sync.contract.has_servers else ''}"


ASK_NAME = "ask for rows"
"""Task name of telling each other, at the beginning of a step, which rows of sparse parameters are wanted."""


def serve_name(sync: ShardSync, partition: int) -> str:
    """Task name of adding up the gradients of a partition and updating it on its server."""
    return f"serve {sync.parameter}[{sync.index}]/{partition}"


def update_name(device: int) -> str:
    """Task name of the optimizer's update of all that a device keeps."""
    return f"update @{device}"


def remote_parts(plan: Plan, parts: Sequence[Part]) -> list[tuple[int, int, Box, int]]:
    """Of each part: source device, target device, region, holding."""
    found = []
    for fetch, place in parts:
        piece = plan.fetches[fetch].pieces[place]
        found.append((plan.holdings[piece.holding].device, plan.fetches[fetch].device, piece.box, piece.holding))
    return found


def local_pieces(plan: Plan, fetch: Fetch) -> Sequence[Piece]:
    """The pieces of a fetch that already lie on its device."""
    return [piece for piece in fetch.pieces if plan.holdings[piece.holding].device == fetch.device]
