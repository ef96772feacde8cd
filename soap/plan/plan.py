"""The plan: what a strategy means, tile by tile, before any cost is known.

``planning.build_plan`` makes it. The simulator turns it into timed tasks (``lowering.lower``), and the runtime executes it with real
tensors. So both have the same tiles, transfers, reductions and shards, under the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from soap.model.graph import Operator, OperatorGraph
from soap.model.regions import Box
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.marks.seam import NOTHING, Marked, marked
from soap.plan.pass_order import Pass, PassOrder
from soap.plan.tiling import Tile
from soap.strategy.compression import Compression
from soap.strategy.config import Strategy
from soap.strategy.sync_contracts import Contract, named

if TYPE_CHECKING:
    from soap.plan.delivery import PlacedDelivery
    from soap.plan.syncs.keeping import KeptParameter


@dataclass(frozen=True, slots=True)
class Holding:
    """A region of an activation that is on a device once its tile has run, or, if ``reduction`` is set, once that reduction has ended."""

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
    """A region of an activation, assembled on one device for the tiles there that read exactly this region.

    ``pieces`` are disjoint and cover ``box``. A piece whose holding is on ``device`` is local; every other piece is part of one message or
    exchange. ``consumers``: (position in ``Plan.tiles``, input position). In the backward pass the region's gradient is summed over the
    consumers and goes back the same way.
    """

    tensor: str
    box: Box
    device: int
    pieces: tuple[Piece, ...]
    consumers: tuple[tuple[int, int], ...]


Part = tuple[int, int]
"""A piece that moves: (position in ``Plan.fetches``, position of the piece in that fetch)."""


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces that one device sends another together, because all are ready at the same time.

    ``parts`` have one dtype and come from holdings of one tile, or of reductions over the same tiles. Their gradients return together.
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
    """Pieces of one tensor that several devices send each other in one collective, once all of them are ready.

    All-gather: every device holds a part of one region, and all need the whole. All-to-all: every device sends something to every other.
    Broadcast: one piece goes from one device to the others. ``devices``: sorted, distinct, at least three. ``parts``: every piece that
    moves. The backward pass is the transpose: the parts' gradients go the other way; those of a broadcast are summed on the way.
    """

    pattern: Pattern
    tensor: str
    devices: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Partial results of one output region, summed over a group of devices.

    ``tiles``: the contributing tiles (positions in ``Plan.tiles``), in index order, in which one device adds them up. ``devices``: sorted,
    distinct; a single device needs no communication.

    Without ``cells`` every device gets the whole sum (all-reduce). In the backward pass each device has the gradient from its own
    consumers; these are summed over the group and given to every tile. ``cells``, if given, has one box per device; they are disjoint and
    cover ``box``, and some may be empty. Each device then gets its own cell of the sum (reduce-scatter). In the backward pass every device
    gets the gradients of all cells (all-gather).
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
    """A region of a parameter and its owners: every device of ``devices`` (sorted, distinct) keeps a copy of it and updates that copy.

    Shards of one parameter are disjoint, even where operators split a shared parameter differently. A shard's gradient is summed over
    ``uses``, (position in ``Plan.tiles``, parameter position), then over the devices. The part of a trainable parameter that no tile reads
    is a shard without uses, on the first device of the parameter's first shard. A tile's device has a copy of what the tile reads. If it is
    owned in parts, the shard is one part of that: ``devices`` is its server, or one of the readers.
    """

    parameter: str
    index: int
    box: Box
    devices: tuple[int, ...]
    uses: tuple[tuple[int, int], ...]
    trainable: bool


@dataclass(frozen=True, slots=True)
class ReadRegion:
    """A region ``box`` of a parameter that tiles read as one piece. ``shards``: what it consists of (positions in ``Plan.shards``), in row
    order: a single one, unless each owner has a part. ``uses``: who reads it, (position in ``Plan.tiles``, parameter position)."""

    parameter: str
    box: Box
    shards: tuple[int, ...]
    uses: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ShardSync:
    """Regions of parameters that one method synchronizes together, and who reads them.

    ``method``: its name in ``sync_contracts``. ``parameter``, ``index``: name it in reports: the first region's parameter, and the number
    of the region among its. ``regions``: those whose gradients share one buffer, in its order. Their shards' ``devices`` are the owners.
    ``readers``: the devices (sorted, distinct) whose tiles read them. ``leaders``: for each reader, the device through which it
    communicates: with local aggregation the first reader on its host, else the reader itself. ``compression``: how each region's gradient
    is compressed, with a selection that suits the layer. ``offload``: whether owners update in their host's memory. ``cluster_readers``:
    if set, the plan is folded, and parts are those of so many readers. ``part``: if set, it is for the passes of this micro-batch alone:
    values are gathered for these, and their gradients are added to those of the micro-batches before. It has the regions of the others,
    with the uses of its own.
    """

    method: str
    parameter: str
    index: int
    regions: tuple[ReadRegion, ...]
    readers: tuple[int, ...]
    leaders: tuple[int, ...]
    compression: Compression | None = None
    offload: bool = False
    cluster_readers: int | None = None
    part: int | None = None

    @property
    def contract(self) -> Contract:
        """What its method promises."""
        return named(self.method)

    @property
    def peers(self) -> tuple[int, ...]:
        """The leaders, each once, ascending: all readers, or with local aggregation one of each host."""
        return tuple(dict.fromkeys(self.leaders))

    @property
    def box(self) -> Box:
        """The first region, of methods that synchronize each by itself."""
        return self.regions[0].box

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """The shards of its regions, in their order (positions in ``Plan.shards``)."""
        return tuple([number for region in self.regions for number in region.shards])

    @cached_property
    def uses(self) -> tuple[tuple[int, int], ...]:
        """The tiles that read its regions, as (position in ``Plan.tiles``, parameter position)."""
        return tuple([use for region in self.regions for use in region.uses])

    @property
    def aggregated(self) -> bool:
        """Whether some readers communicate through a leader (local aggregation)."""
        return self.leaders != self.readers


@dataclass(frozen=True)
class Plan:
    """A whole strategy, lowered. Things refer to each other by their positions in these sequences. Those of what operators do and leave
    are made when they are first asked for (``planning.Later``); ``deliveries`` have what tables need, of operators that are alike once.

    Every trainable shard that gets a gradient is in exactly one of ``syncs``, or one for each micro-batch (``ShardSync.part``); so is each
    frozen one whose values are gathered. The method's module in ``soap.plan.syncs`` says what it moves, updates and holds in memory.

    ``first_tile[i]``: the position of operator i's first tile; its tiles follow in index order. ``accelerators``: devices that are no CPUs;
    servers beside them keep parameters in the host's memory. ``sparse_lookups``: operators whose tiles look rows up. ``strategy``: of two
    copies for a folded plan. ``training``: what it adds to compressed parameters. ``order``: of the passes of micro-batches, if any.
    ``deliveries``: by operator, the same as above with the operator's own positions. ``kept``: so by parameter, of shards and ``syncs``.
    """

    strategy: Strategy
    graph: OperatorGraph
    device_count: int
    accelerators: frozenset[int]
    tiles: Sequence[Tile]
    first_tile: tuple[int, ...]
    holdings: Sequence[Holding]
    fetches: Sequence[Fetch]
    messages: Sequence[Message]
    exchanges: Sequence[Exchange]
    reductions: Sequence[Reduction]
    shards: tuple[Shard, ...]
    syncs: tuple[ShardSync, ...]
    sparse_lookups: frozenset[int]
    training: PlannedTraining = PLAIN
    order: PassOrder | None = None
    own_samples: bool = False  # see ``Topology``
    deliveries: tuple[PlacedDelivery, ...] = field(default=(), compare=False)
    kept: tuple[KeptParameter, ...] = field(default=(), compare=False)

    @cached_property
    def marked(self) -> Mapping[int, Marked]:
        """Position of an operator that has a mark -> what that adds to its tiles."""
        own = ((i, marked(self.strategy.operators[op.name])) for i, op in enumerate(self.graph.operators))
        return {i: adds for i, adds in own if adds.rows}

    @cached_property
    def recomputed_operators(self) -> frozenset[int]:
        """Positions of the operators whose tiles run a second time."""
        return frozenset(i for i, own in self.marked.items() if own.again is not None)

    @cached_property
    def light_operators(self) -> frozenset[int]:
        """Positions of those that run again and keep their outputs."""
        return frozenset(i for i in self.recomputed_operators if self.marked[i].keeps_outputs)

    @cached_property
    def gathered_again(self) -> frozenset[int]:
        """Positions of the operators whose outputs travel a second time, for backward passes: all that comes from other devices is a part
        of a region that was put together of these and own parts, and all that read such regions gather again (``Marked.gathers``)."""
        if not any(own.gathers for own in self.marked.values()):
            return frozenset()
        found = ((own.position, own.gatherers) for own in self.deliveries)
        return frozenset(position for position, readers in found if readers and self._may_gather(position, readers))

    @cached_property
    def summed_again(self) -> frozenset[int]:
        """Positions of the operators whose outputs are summed a second time: all that they leave are sums over several devices, they run
        again as a whole, and so do all that read these, which gather again (``Marked.gathers``)."""
        again = frozenset(i for i in self.recomputed_operators if self.marked[i].gathers)
        found = (own for own in self.deliveries if again and own.position in self.recomputed_operators - self.light_operators)
        return frozenset(
            own.position
            for own in found
            if own.readers and own.like.leaves_sums and again.issuperset(own.readers) and self._may_gather(own.position, own.readers)
        )

    def _may_gather(self, position: int, readers: Iterable[int]) -> bool:
        tensors, outputs = self.graph.tensors, self.graph.operators[position].outputs
        stays = all(tensors[out.tensor].requires_grad for out in outputs) and not self.marked.get(position, NOTHING).kept_until
        return stays and all(self.marked.get(reader, NOTHING).gathers for reader in readers)

    @cached_property
    def on_servers(self) -> frozenset[int]:
        """Shards that servers own."""
        return frozenset(number for sync in self.syncs if sync.contract.has_servers for number in sync.shards)

    @cached_property
    def dealt_out(self) -> frozenset[int]:
        """Shards that one of several readers owns."""
        own = (sync for sync in self.syncs if sync.contract.owned_in_parts and not sync.contract.has_servers)
        return frozenset(number for sync in own for number in sync.shards)

    @cached_property
    def offloaded(self) -> frozenset[int]:
        """Trainable shards whose optimizer's state is in their owners' hosts' memory."""
        syncs = self.strategy.parameters
        names = {name for name, sync in syncs.items() if sync.offload}
        return frozenset(i for i, shard in enumerate(self.shards) if shard.trainable and shard.parameter in names)

    @cached_property
    def synchronized(self) -> frozenset[int]:
        """Shards that get a gradient."""
        return frozenset(number for sync in self.syncs if not self.is_frozen(sync) for number in sync.shards)

    def completes(self, sync: ShardSync) -> bool:
        """Whether gradients are complete with it: those of all other micro-batches have come before."""
        return self.order is None or sync.part is None or sync.part == self.order.cut.count - 1

    def is_frozen(self, sync: ShardSync) -> bool:
        """Whether its values are gathered for their uses and never change: nothing gets a gradient."""
        return not self.shards[sync.shards[0]].trainable

    def owners(self, sync: ShardSync) -> tuple[int, ...]:
        """The devices that own a part of what is synchronized, ascending."""
        return tuple(sorted({device for number in sync.shards for device in self.shards[number].devices}))

    def members(self, sync: ShardSync) -> tuple[int, ...]:
        """Its readers and owners, ascending."""
        return tuple(sorted({*sync.readers, *self.owners(sync)}))

    def as_run(self, tile: Tile) -> Tile:
        """The tile as cost models are asked for it: with ``sparse_lookup`` filled in."""
        return replace(tile, sparse_lookup=True) if tile.operator in self.sparse_lookups else tile

    @property
    def divided(self) -> frozenset[int]:
        """Positions of the operators whose backward pass is in two (``strategy.division``)."""
        return frozenset() if self.order is None else self.order.divided

    def rank(self, tile: Tile, own: Pass) -> int:
        """The place of the action, in ``order``, to which a tile's pass belongs; 0 without an order."""
        return 0 if self.order is None else self.order.rank(own, tile.operator, tile.part or 0)

    def operator(self, tile: Tile) -> Operator:
        """The operator that a tile belongs to."""
        return self.graph.operators[tile.operator]


def forward_name(op: Operator, tile: Tile) -> str:
    """Task name of a tile's forward pass."""
    return tile_task_name("forward", op, tile)


def backward_name(op: Operator, tile: Tile) -> str:
    """Task name of a tile's backward pass; if that is in two, of its input gradients."""
    return tile_task_name("backward", op, tile)


def recompute_name(op: Operator, tile: Tile) -> str:
    """Task name of a tile's second run, before its backward pass."""
    return tile_task_name("recompute", op, tile)


def tile_task_name(verb: str, op: Operator, tile: Tile) -> str:
    """Task name of what is done for a tile."""
    return f"{verb} {op.name}[{tile.index}]{_of(tile)}"


def _of(own: Tile | ShardSync) -> str:
    return "" if own.part is None else f" of micro-batch {own.part}"


AGAIN = " again"
"""Behind the name of a carrier's task: it is that of the second time (``Plan.gathered_again``)."""


def message_name(plan: Plan, message: Message, *, gradient: bool = False) -> str:
    """Task name of a message, or of its gradients on their way back."""
    ends = f"{message.target}->{message.source}" if gradient else f"{message.source}->{message.target}"
    return f"transfer {_parts_name(plan, message.parts, gradient)} {ends}{_part_of(plan, message.parts)}"


def exchange_name(plan: Plan, exchange: Exchange, *, gradient: bool = False) -> str:
    """Task name of an exchange, or of its transpose."""
    members = ",".join(map(str, exchange.devices))
    if exchange.pattern is Pattern.BROADCAST:
        return f"{exchange.pattern} {_parts_name(plan, exchange.parts[:1], gradient)} {members}{_part_of(plan, exchange.parts)}"
    region = _region(plan.fetches[exchange.parts[0][0]].box)
    moved = f"{'gradient of ' if gradient else ''}{exchange.tensor}{region}"
    return f"{exchange.pattern} {moved} {members}{_part_of(plan, exchange.parts)}"


def _part_of(plan: Plan, parts: Sequence[Part]) -> str:
    fetch, piece = parts[0]
    holding = plan.holdings[plan.fetches[fetch].pieces[piece].holding]
    return _of(plan.tiles[holding.tile]) if holding.reduction is None else ""


def _parts_name(plan: Plan, parts: Sequence[Part], gradient: bool) -> str:
    fetch, piece = parts[0]
    first = f"{plan.fetches[fetch].tensor}{_region(plan.fetches[fetch].pieces[piece].box)}"
    return f"{'gradient of ' if gradient else ''}{first}{_more(parts)}"


def _more(things: Sequence[object]) -> str:
    return f"+{len(things) - 1}" if len(things) > 1 else ""


def _region(box: Box) -> str:
    return f"[{','.join(f'{a}:{b}' for a, b in box)}]"


def reduce_name(op: Operator, reduction: Reduction, *, gradient: bool = False) -> str:
    """Task name of summing partial results over a group, or of the communication of the sum's gradients."""
    if reduction.cells:
        verb = "all-gather gradient of" if gradient else "reduce-scatter"
    else:
        verb = "reduce gradient of" if gradient else "reduce"
    return f"{verb} {op.outputs[reduction.output].tensor}{_region(reduction.box)}#{reduction.replica}"


def sync_name(sync: ShardSync, verb: str = "sync") -> str:
    """Task name of a communication of a synchronization."""
    return f"{verb} {sync.parameter}[{sync.index}]{_more(sync.regions)}{_of(sync)}"


ASK_NAME = "ask for rows"
"""Task name of the request, at the beginning of a step, for the rows of sparse parameters that it looks up."""


def serve_name(sync: ShardSync, partition: int) -> str:
    """Task name of adding up the gradients of a partition and updating it on its server."""
    return f"serve {sync.parameter}[{sync.index}]/{partition}"


def update_name(device: int) -> str:
    """Task name of the optimizer's update of everything that a device owns."""
    return f"update @{device}"


def remote_parts(plan: Plan, parts: Sequence[Part]) -> list[tuple[int, int, Box, int]]:
    """For each part: (source device, target device, region, holding)."""
    found = []
    for fetch, place in parts:
        piece = plan.fetches[fetch].pieces[place]
        found.append((plan.holdings[piece.holding].device, plan.fetches[fetch].device, piece.box, piece.holding))
    return found


def local_pieces(plan: Plan, fetch: Fetch) -> Sequence[Piece]:
    """The pieces of a fetch that already lie on its device."""
    return [piece for piece in fetch.pieces if plan.holdings[piece.holding].device == fetch.device]
