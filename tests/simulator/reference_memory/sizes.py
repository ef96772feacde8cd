"""Sizes of what a plan holds, tile by tile and shard by shard: for the curve (``residency``) and for the bound (``any_order``)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from soap.model.regions import Box
from soap.plan.delivery import box_bytes
from soap.plan.plan import Exchange, Fetch, Message, Part, Pattern, Piece, Plan
from soap.plan.row_counts import row_bytes, tile_lookups
from soap.plan.tiling import Tile, made_bytes, windows
from soap.simulator.memory.footprint import Shares, shares_of
from soap.simulator.memory.sizes import PACKING_KINDS, padded_bytes


class TileSizes(NamedTuple):
    """Memory of a tile, in bytes. ``made``: its outputs, one by one. ``kept``: these, and what else it keeps for its backward pass.
    ``padded``: the padded copies of its inputs. ``shares``: besides its operands."""

    made: tuple[int, ...]
    kept: int
    padded: int
    shares: Shares

    @property
    def backward(self) -> int:
        """Held while its backward task runs, besides what it keeps and its operands' gradients."""
        return self.shares.backward + self.padded


def tile_sizes(plan: Plan) -> list[TileSizes]:
    """The memory of each tile of a plan."""
    graph, found = plan.graph, list[TileSizes]()
    for position, tiles in groupby(plan.tiles, attrgetter("operator")):
        op = graph.operators[position]
        padding, outputs, packs = windows(op), range(len(op.outputs)), op.kind in PACKING_KINDS
        for tile in tiles:
            own, padded = shares_of(graph, op, tile.intervals), 0
            for k in padding:
                padded += padded_bytes(graph, op, k, tile.inputs[k], tile.intervals)
            made = tuple([made_bytes(graph, op, tile, k) for k in outputs])
            kept = sum(made) + own.kept + padded
            if packs and tile.device in plan.accelerators:
                kept += sum(box_bytes(plan, o.tensor, box) for o, box in zip(op.parameters, tile.parameters, strict=True))
            found.append(TileSizes(made, kept, padded, own))
    return found


def kept_shards(plan: Plan) -> Iterator[tuple[int, int, int, bool]]:
    """(shard, device, bytes, trainable) for every copy of a shard that a device holds in its own memory as an owner."""
    for number, shard in enumerate(plan.shards):
        size = box_bytes(plan, shard.parameter, shard.box)
        for device in shard.devices:
            if number not in plan.on_servers or device not in plan.accelerators:
                yield number, device, size, shard.trainable


def is_away(plan: Plan, shard: int, device: int) -> bool:
    """Whether an owner's optimizer state of a shard is in the memory of its host alone: it is offloaded, and the device is no CPU."""
    return shard in plan.offloaded and device in plan.accelerators


def host_copies(plan: Plan) -> list[int]:
    """For each device that is a CPU, bytes of the second copies of values and gradients by which offloaded shards are updated."""
    result = [0] * plan.device_count
    for number, device, size, _ in kept_shards(plan):
        result[device] += 2 * size if number in plan.offloaded and device not in plan.accelerators else 0
    return result


def updating_bytes(plan: Plan, optimizer_states: int) -> list[int]:
    """For each device, the bytes that an optimizer's step takes and frees again.

    An optimizer with several states, such as Adam, makes two more tensors of a shard's size (a square root, and the step's divisor). On
    CPUs it goes from shard to shard, and the last shard's second tensor still exists. Elsewhere it makes the square roots of all shards at
    once. Other optimizers take nothing.
    """
    largest, last, together = ([0] * plan.device_count for _ in range(3))
    for number, device, size, trainable in kept_shards(plan):
        if trainable and optimizer_states > 1 and not is_away(plan, number, device):
            largest[device] = max(largest[device], last[device] + 2 * size)
            last[device] = size
            together[device] += size
    return [together[device] if device in plan.accelerators else largest[device] for device in range(plan.device_count)]


def compact_parameters(plan: Plan) -> frozenset[str]:
    """Parameters that only servers hold as a whole: tiles get the rows that they look up, in a compact table."""
    return frozenset(sync.parameter for sync in plan.syncs if sync.contract.by_rows and sync.contract.has_servers)


def operand_bytes(plan: Plan, compact: frozenset[str], tile: Tile, parameter: str, box: Box) -> int:
    """Bytes that a tile has of a parameter's region. ``compact``: ``compact_parameters(plan)``."""
    if parameter not in compact or tile.operator not in plan.graph.backward_operators:
        return box_bytes(plan, parameter, box)
    start, stop = box[0]
    return min(stop - start, tile_lookups(plan.graph, parameter, tile)) * row_bytes(plan.graph, parameter, box)


def assembled_regions(plan: Plan) -> Iterator[tuple[int, str, Box, int]]:
    """(tile, parameter, region, bytes) for each region that a tile reads and that is not a single shard: every segment assembles it, and
    keeps it for the backward pass. Rows are assembled for each tile."""
    compact = compact_parameters(plan)
    shards = {(shard.parameter, shard.box) for shard in plan.shards}
    shards |= {(region.parameter, region.box) for sync in plan.syncs if sync.contract.owned_in_parts for region in sync.regions}
    for number, tile in enumerate(plan.tiles):
        for operand, box in zip(plan.operator(tile).parameters, tile.parameters, strict=True):
            if (operand.tensor, box) not in shards:
                yield number, operand.tensor, box, operand_bytes(plan, compact, tile, operand.tensor, box)


def is_remote(plan: Plan, fetch: Fetch, piece: Piece) -> bool:
    """Whether a piece comes from another device."""
    return plan.holdings[piece.holding].device != fetch.device


def told_parts(carrier: Message | Exchange) -> tuple[Part, ...]:
    """The parts that a source sends one by one; for a broadcast only the first, because all devices receive that one."""
    return carrier.parts[:1] if isinstance(carrier, Exchange) and carrier.pattern is Pattern.BROADCAST else carrier.parts
