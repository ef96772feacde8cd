"""Peak memory of a plan, device by device: an upper bound on what a training step holds, so that "fits" can be trusted.

It follows the runtime. These count as held through the whole step: parameter shards, their gradients and optimizer states; the batch, or
the samples of it that the device reads (``Plan.own_samples``), and the constants (every rank gets them); everything that the forward pass
makes (although the backward pass frees activations as it goes); and what is sent (kept until the step ends). What a recomputed operator
makes counts twice, since both may be there for a while, and so does what an offloading operator keeps; on a CPU, which is its own host,
three times. Where backward passes are in two, so do gradients of outputs, which wait for the second half. Added to these are the largest
set of gradients that wait between operators, the gradients that one tile makes, those of shared parameters, and the largest sum over
devices. Not counted:
fragmentation of the allocator, workspaces of libraries, and a model's buffers (running statistics), which are no tensors of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import NamedTuple

from soap.cluster.topology import Topology
from soap.model.graph import RECURRENT_KINDS, Operator, OperatorGraph, TensorKind
from soap.model.regions import Box, Interval, in_one_piece, volume
from soap.plan.delivery import partial_bytes, reduced_tensor
from soap.plan.marks.seam import NOTHING, Amount
from soap.plan.plan import Plan
from soap.plan.samples import given_bytes
from soap.plan.tiling import Tile, is_partial, is_window, made_bytes, windows
from soap.simulator.memory.footprint import Shares, copies_are_known, kept_places, kept_share, shares_of
from soap.simulator.memory.parameters import assembled_bytes, exchanged_bytes, gradient_bytes, kept_parameters, updating_bytes
from soap.simulator.memory.transit import fetched_bytes, is_remote, largest_sum_bytes, sent_bytes

PACKING_KINDS = RECURRENT_KINDS
"""Operators for which cuDNN packs the parameters into one piece of memory, which is kept for the backward pass."""

ADDING_COPIES = 2
"""Tensors that exist besides a value's gradient while another one is added to it: that other one, and their sum."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The bytes that one device holds at its peak.

    ``optimizer``: its states. ``activations``: inputs, fetched regions, outputs, sums, and what else is kept for the backward pass.
    ``buffers``: gradients between operators, and what is sent or summed.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def memory_use(plan: Plan, optimizer_states: int = 2) -> tuple[MemoryUse, ...]:
    """Upper bound of each device's use. ``optimizer_states``: tensors of a parameter's size that the optimizer keeps for it."""
    parameters, trainable, updated = kept_parameters(plan)
    tiles = tile_sizes(plan)
    activations = _sum((_tile_bytes(plan, tiles), _read_bytes(plan), fetched_bytes(plan), _summed_bytes(plan), assembled_bytes(plan)))
    gradients = _sum((_frontier_bytes(plan), _tile_gradient_bytes(plan, tiles), gradient_bytes(plan)))
    backward = _sum((gradients, sent_bytes(plan), largest_sum_bytes(plan), exchanged_bytes(plan)))
    updating = [max(most) for most in zip(trainable, updating_bytes(plan, optimizer_states), strict=True)]
    return tuple(
        MemoryUse(
            parameters=parameters[d],
            gradients=trainable[d],
            optimizer=optimizer_states * updated[d],
            activations=activations[d],
            # An optimizer that updates many tensors in one call may need as much again as it updates; by then the activations are free.
            buffers=max(backward[d], updating[d] - activations[d]),
        )
        for d in range(plan.device_count)
    )


def peak_bytes(plan: Plan, optimizer_states: int = 2) -> tuple[int, ...]:
    """Upper bound of each device's peak memory."""
    return tuple(use.total for use in memory_use(plan, optimizer_states))


def overflow_bytes(totals: Sequence[int], topology: Topology) -> int:
    """Bytes by which these totals (one per device) exceed what plans may use of the devices' memory, added up."""
    return sum(max(0, total - limit) for total, limit in zip(totals, topology.memory_limits, strict=True))


def _sum(parts: Iterable[list[int]]) -> list[int]:
    return [sum(values) for values in zip(*parts, strict=True)]


def _box_bytes(graph: OperatorGraph, tensor: str, box: Box) -> int:
    return volume(box) * graph.tensors[tensor].itemsize


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
                kept += sum(_box_bytes(graph, o.tensor, box) for o, box in zip(op.parameters, tile.parameters, strict=True))
            found.append(TileSizes(made, kept, padded, own))
    return found


def _tile_bytes(plan: Plan, sizes: Sequence[TileSizes]) -> list[int]:
    """For each device, bytes that all its tiles keep, of second outputs of recomputed ones, of what marks add, and of outputs' gradients
    that wait for weight gradients."""
    result = [0] * plan.device_count
    for tile, size in zip(plan.tiles, sizes, strict=True):
        marked = plan.marked.get(tile.operator, NOTHING)
        result[tile.device] += size.kept + ((marked.again is not None) + (tile.operator in plan.divided)) * sum(size.made)
        held = (own.amount for own in marked.holds if not own.on_host or tile.device not in plan.accelerators)
        result[tile.device] += sum(amount_bytes(plan.graph, tile, amount) for amount in held)
    return result


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
    return sum(_box_bytes(graph, *own) for own in read) + sum(made) + kept_share(graph, op, tile.intervals) + padded


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


def _read_bytes(plan: Plan) -> list[int]:
    """For each device, bytes of the inputs that it is given and of all constants, and of a copy of every distinct part of these that its
    tiles read.

    Parts that are contiguous in memory, such as samples, are read in place and need no copy. Other parts may be copied, and kept for the
    backward pass.
    """
    names = {t.name for t in plan.graph.tensors.values() if t.kind in (TensorKind.INPUT, TensorKind.CONSTANT)}
    read: set[tuple[int, str, Box]] = set()
    for tile in plan.tiles:
        for operand, box in zip(plan.operator(tile).inputs, tile.inputs, strict=True):
            if operand.tensor in names and not in_one_piece(box, plan.graph.tensors[operand.tensor].shape):
                read.add((tile.device, operand.tensor, box))
    return _sum((_total(plan, read), batch_bytes(plan)))


def batch_bytes(plan: Plan) -> list[int]:
    """For each device, bytes of what is there when the step begins, and of buffers' next values: ``given_bytes`` and all constants."""
    always = sum(t.bytes for t in plan.graph.tensors.values() if t.kind is TensorKind.CONSTANT) + plan.graph.next_state_bytes
    return [always + own for own in given_bytes(plan)]


def _summed_bytes(plan: Plan) -> list[int]:
    """For each device, bytes of sums of partial results; for a reduce-scatter, its cell and what the others send for the cell."""
    result = [0] * plan.device_count
    for reduction in plan.reductions:
        for device, left in zip(reduction.devices, reduction.cells or [reduction.box] * len(reduction.devices), strict=True):
            result[device] += partial_bytes(plan, reduction, left) * (len(reduction.devices) if reduction.cells else 1)
    return result


def _total(plan: Plan, regions: Iterable[tuple[int, str, Box]]) -> list[int]:
    result = [0] * plan.device_count
    for device, tensor, box in regions:
        result[device] += _box_bytes(plan.graph, tensor, box)
    return result


def _frontier_bytes(plan: Plan) -> list[int]:
    """For each device, the most bytes of gradients that wait between operators, if the backward pass takes operators in reverse order.

    A holding's gradient is held from its last consumer to its producer, and so are the parts of it that other devices return. The gradient
    of a sum counts twice: it is copied to be summed over devices, or gathered from cells. A fetched region's gradient is held from its
    last consumer to its first one, or, if other devices take parts of it, to its producer.
    """
    graph = plan.graph
    last = [-1] * len(plan.holdings)
    gathered: dict[int, int] = {}
    steps = [[0] * (len(graph.operators) + 1) for _ in range(plan.device_count)]
    for fetch in plan.fetches:
        if not graph.tensors[fetch.tensor].requires_grad:
            continue
        producer = graph.producers[fetch.tensor][0]
        readers = [plan.tiles[tile].operator for tile, _ in fetch.consumers]
        first, latest = min(readers), max(readers)
        for piece in fetch.pieces:
            last[piece.holding] = max(last[piece.holding], latest)
            if is_remote(plan, fetch, piece):
                size = _box_bytes(graph, fetch.tensor, piece.box)
                _add_life(steps[plan.holdings[piece.holding].device], producer, latest, size)
                first = producer
        _add_life(steps[fetch.device], first, latest, _box_bytes(graph, fetch.tensor, fetch.box))
    for holding, reader in zip(plan.holdings, last, strict=True):
        if reader >= 0:
            copies = 1 if holding.reduction is None else 2
            size = copies * _box_bytes(graph, holding.tensor, holding.box)
            _add_life(steps[holding.device], graph.producers[holding.tensor][0], reader, size)
            if holding.reduction is not None and plan.reductions[holding.reduction].cells:
                gathered[holding.reduction] = max(gathered.get(holding.reduction, 0), reader)
    for number, reader in gathered.items():  # once as received, once put together
        reduction = plan.reductions[number]
        size = 2 * _box_bytes(graph, reduced_tensor(plan, reduction), reduction.box)
        for device in reduction.devices:
            _add_life(steps[device], reduction.operator, reader, size)
    return [_peak(changes) for changes in steps]


def _add_life(steps: list[int], first: int, last: int, size: int) -> None:
    steps[first] += size
    steps[last + 1] -= size


def _peak(steps: list[int]) -> int:
    level = peak = 0
    for step in steps:
        level += step
        peak = max(peak, level)
    return peak


def _tile_gradient_bytes(plan: Plan, sizes: Sequence[TileSizes]) -> list[int]:
    """For each device, bytes of the largest tile's gradients (of outputs, inputs, and between its calls), and of the largest addition of
    two gradients."""
    graph = plan.graph
    result, added = [0] * plan.device_count, [0] * plan.device_count
    for tile, size in zip(plan.tiles, sizes, strict=True):
        op = plan.operator(tile)
        if graph.needs_backward(op):
            operands = zip(op.inputs, tile.inputs, strict=True)
            wanted = [_box_bytes(graph, o.tensor, box) for o, box in operands if graph.tensors[o.tensor].requires_grad]
            wanted += [made for made, o in zip(size.made, op.outputs, strict=True) if graph.tensors[o.tensor].requires_grad]
            result[tile.device] = max(result[tile.device], sum(wanted) + size.shares.work + size.padded)
        else:
            result[tile.device] = max(result[tile.device], size.shares.forward)
    for holding in plan.holdings:
        if graph.tensors[holding.tensor].requires_grad:
            added[holding.device] = max(added[holding.device], ADDING_COPIES * _box_bytes(graph, holding.tensor, holding.box))
    return _sum((result, added))
