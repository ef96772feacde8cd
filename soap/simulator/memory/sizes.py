"""Bytes that tiles copy, pad or pack, and of the batch; and by how many bytes totals exceed the memory of devices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from soap.cluster.topology import Topology
from soap.model.graph import RECURRENT_KINDS, Operator, OperatorGraph, TensorKind
from soap.model.regions import Box, Interval, volume
from soap.plan.marks.seam import Amount
from soap.plan.plan import Plan
from soap.plan.samples import given_bytes
from soap.plan.tiling import Tile, is_partial, is_window, made_bytes, windows
from soap.simulator.memory.footprint import copies_are_known, kept_places, kept_share, shares_of

PACKING_KINDS = RECURRENT_KINDS
"""Operators for which cuDNN packs the parameters into one piece of memory, which is kept for the backward pass."""


def overflow_bytes(totals: Sequence[int], topology: Topology) -> int:
    """Bytes by which these totals (one per device) exceed what plans may use of the devices' memory, added up."""
    return sum(max(0, total - limit) for total, limit in zip(totals, topology.memory_limits, strict=True))


def amount_bytes(graph: OperatorGraph, tile: Tile, amount: Amount) -> int:
    """What a tile has of an amount."""
    op = graph.operators[tile.operator]
    match amount:
        case Amount.MADE:
            return sum(made_bytes(graph, op, tile, k) for k in range(len(op.outputs)))
        case Amount.PRODUCT:
            return shares_of(graph, op, tile.intervals).product
        case Amount.AWAY:
            return away_bytes(graph, tile)


def away_bytes(graph: OperatorGraph, tile: Tile) -> int:
    """Bytes that a tile copies to its host, and back, if its operator offloads what it keeps: what autograd keeps of its activations, and
    what it keeps inside. Parameters and parts of the batch stay on the device."""
    op = graph.operators[tile.operator]
    places = kept_places(graph, op, tile.intervals)
    read: set[tuple[str, Box]] = set()
    for k, (operand, box) in enumerate(zip(op.inputs, tile.inputs, strict=True)):
        if graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION and (places is None or k in places):
            read.add((operand.tensor, box))
    first = len(op.inputs) + len(op.parameters)
    made = (made_bytes(graph, op, tile, k) for k in range(len(op.outputs)) if places is None or first + k in places)
    padded = sum(padded_bytes(graph, op, k, tile.inputs[k], tile.intervals) for k in windows(op))
    taken = sum(volume(box) * graph.tensors[tensor].itemsize for tensor, box in read)
    return taken + sum(made) + kept_share(graph, op, tile.intervals) + padded


def padded_bytes(graph: OperatorGraph, op: Operator, place: int, box: Box, intervals: Sequence[Interval]) -> int:
    """Bytes of an input's padded copy, if they are not among what the tile keeps. A tile makes one only if space is cut and it needs
    different padding on the two sides; otherwise the ATen call pads by itself, without a copy."""
    if copies_are_known(graph, op, intervals):
        return 0
    tensor = graph.tensors[op.inputs[place].tensor]
    spans, uneven, cut = [], False, False
    for dim, (start, stop), size in zip(op.inputs[place].dims, box, tensor.shape, strict=True):
        if not is_window(dim):
            spans.append(stop - start)
            continue
        first, last = intervals[dim.factor or 0]
        low, high = first * dim.scale + dim.lo, (last - 1) * dim.scale + dim.hi
        spans.append(max(0, high - low))
        uneven |= max(0, -low) != max(0, high - size)
        cut |= (start, stop) != (0, size) or (first, last) != (0, op.factors[dim.factor or 0].size)
    itemsize = tensor.partial_itemsize if is_partial(op, intervals) else tensor.itemsize
    return prod(spans) * itemsize if uneven and cut else 0


def batch_bytes(plan: Plan) -> list[int]:
    """For each device, bytes of what is there when the step begins, and of buffers' next values: ``given_bytes`` and all constants."""
    always = sum(t.bytes for t in plan.graph.tensors.values() if t.kind is TensorKind.CONSTANT) + plan.graph.next_state_bytes
    return [always + own for own in given_bytes(plan)]
