"""The plan: what a strategy means, tile by tile, before any cost is known.

``lowering.build_plan`` makes it; the simulator turns it into timed tasks (``lowering.lower``) and the runtime executes it with real
tensors. Both therefore speak of the same tiles, transfers, reductions and shards, under the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soap.graph import Operator, OperatorGraph
from soap.regions import Box
from soap.simulator.tiling import Tile


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

    ``pieces`` are disjoint and cover ``box``; those whose holding is on ``device`` are local, the others are transfers.
    ``consumers``: (position in ``Plan.tiles``, input position). In the backward pass the region's gradient, summed over the
    consumers, goes back the same ways.
    """

    tensor: str
    box: Box
    device: int
    pieces: tuple[Piece, ...]
    consumers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Partial results of one output region, summed and left on every device of the group (all-reduce).

    ``tiles``: the contributing tiles (positions in ``Plan.tiles``), in index order: the order of summation on one device.
    ``devices``: sorted, distinct; with a single device no communication is needed. In the backward pass the
    gradients that the devices' own consumers give are summed over the group and reach every tile.
    """

    operator: int
    output: int
    replica: int
    box: Box
    tiles: tuple[int, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """A region of a parameter with one owner set: every device of ``devices`` (sorted, distinct) keeps a copy of it.

    Shards of one parameter are disjoint, so that operators that split a shared parameter differently are served alike. Gradients
    are summed over ``uses``, (position in ``Plan.tiles``, parameter position), then over the devices. What no tile reads of a
    trainable parameter is a shard without uses, on the first device of the parameter's first shard.
    """

    parameter: str
    index: int
    box: Box
    devices: tuple[int, ...]
    uses: tuple[tuple[int, int], ...]
    trainable: bool


@dataclass(frozen=True)
class Plan:
    """All of a strategy, lowered. Positions in these tuples are the identities used across them.

    ``first_tile[i]`` is the position of operator i's first tile; its tiles follow in index order.
    """

    graph: OperatorGraph
    device_count: int
    tiles: tuple[Tile, ...]
    first_tile: tuple[int, ...]
    holdings: tuple[Holding, ...]
    fetches: tuple[Fetch, ...]
    reductions: tuple[Reduction, ...]
    shards: tuple[Shard, ...]

    def operator(self, tile: Tile) -> Operator:
        """The operator that a tile belongs to."""
        return self.graph.operators[tile.operator]


def forward_name(op: Operator, tile: Tile) -> str:
    """Task name of a tile's forward pass."""
    return f"forward {op.name}[{tile.index}]"


def backward_name(op: Operator, tile: Tile) -> str:
    """Task name of a tile's backward pass."""
    return f"backward {op.name}[{tile.index}]"


def transfer_name(tensor: str, box: Box, source: int, target: int, *, gradient: bool = False) -> str:
    """Task name of one piece on its way from device ``source`` to ``target``."""
    region = ",".join(f"{a}:{b}" for a, b in box)
    return f"transfer {'gradient of ' if gradient else ''}{tensor}[{region}] {source}->{target}"


def reduce_name(op: Operator, reduction: Reduction, *, gradient: bool = False) -> str:
    """Task name of summing partial results (or their gradients) over a group."""
    region = ",".join(f"{a}:{b}" for a, b in reduction.box)
    return f"reduce {'gradient of ' if gradient else ''}{op.outputs[reduction.output].tensor}[{region}]#{reduction.replica}"


def sync_name(shard: Shard) -> str:
    """Task name of summing a shard's gradient over its copies."""
    return f"sync {shard.parameter}[{shard.index}]"


def update_name(shard: Shard, device: int) -> str:
    """Task name of the optimizer's update of one copy."""
    return f"update {shard.parameter}[{shard.index}]@{device}"


def local_pieces(plan: Plan, fetch: Fetch) -> Sequence[Piece]:
    """The pieces of a fetch that already lie on its device."""
    return [piece for piece in fetch.pieces if plan.holdings[piece.holding].device == fetch.device]
