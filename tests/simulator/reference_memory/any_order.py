"""The oracle of memory that no order of tasks exceeds: predicted curves stay below it. It is up to several times as much as they are.

As held through the whole step count parameter shards, their gradients and optimizer states; all that synchronization ever holds; the batch,
or the samples of it that the device reads (``Plan.own_samples``), and the constants; everything that the forward pass makes; and what is
sent. What a recomputed operator makes counts twice, and so does what an offloading operator keeps; on a CPU, which is its own host, three
times. Where backward passes are in two, so do gradients of outputs. Added to these are the largest set of gradients that wait between
operators, the gradients that one tile makes, those of shared parameters, and the largest sum over devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from soap.model.graph import TensorKind
from soap.model.regions import Box, in_one_piece
from soap.plan.delivery import box_bytes, partial_bytes, reduced_tensor
from soap.plan.marks.seam import NOTHING
from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Exchange, Message, Part, Plan, local_pieces, remote_parts
from soap.plan.syncs import bucketing
from soap.plan.syncs.seam import method_for
from soap.simulator.memory.sizes import amount_bytes, batch_bytes
from soap.simulator.memory.transit import received_apart
from tests.simulator.reference_memory.sizes import (
    TileSizes,
    assembled_regions,
    compact_parameters,
    host_copies,
    is_away,
    is_remote,
    kept_shards,
    operand_bytes,
    tile_sizes,
    told_parts,
    updating_bytes,
)

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
    tiles, held = tile_sizes(plan), held_for_syncs(plan)
    others = [own for kind, own in held.items() if kind not in (MemoryKind.VALUES, MemoryKind.GRADIENTS)]
    activations = _sum((_tile_bytes(plan, tiles), _read_bytes(plan), fetched_bytes(plan), _summed_bytes(plan), assembled_bytes(plan)))
    gradients = _sum((_frontier_bytes(plan), _tile_gradient_bytes(plan, tiles), gradient_bytes(plan)))
    backward = _sum((gradients, sent_bytes(plan), largest_sum_bytes(plan), host_copies(plan), *others))
    updating = [max(most) for most in zip(trainable, updating_bytes(plan, optimizer_states), strict=True)]
    return tuple(
        MemoryUse(
            parameters=parameters[d] + held[MemoryKind.VALUES][d],
            gradients=trainable[d] + held[MemoryKind.GRADIENTS][d],
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


def _sum(parts: Iterable[list[int]]) -> list[int]:
    return [sum(values) for values in zip(*parts, strict=True)]


def held_for_syncs(plan: Plan) -> dict[MemoryKind, list[int]]:
    """By kind and device, bytes of all that synchronizations ever hold, as if all of it was there at once."""
    found = {kind: [0] * plan.device_count for kind in MemoryKind}
    for sync in plan.syncs:
        for hold in method_for(sync).holds(plan, sync):
            found[hold.kind][hold.device] += hold.size_bytes * (1 + hold.copied)
            found[MemoryKind.GRADIENTS][hold.device] += hold.sum_bytes
    return found


def kept_parameters(plan: Plan) -> tuple[list[int], list[int], list[int]]:
    """For each device the bytes of (parameters, gradients, parameters with optimizer state) that it owns."""
    held, gradients, updated = ([0] * plan.device_count for _ in range(3))
    for number, device, size, trainable in kept_shards(plan):
        held[device] += size
        gradients[device] += size if trainable else 0
        updated[device] += size if trainable and not is_away(plan, number, device) else 0
    return held, gradients, updated


def assembled_bytes(plan: Plan) -> list[int]:
    """For each device, the bytes of all ``assembled_regions``, as if each tile were a segment of its own."""
    result = [0] * plan.device_count
    for number, _, _, size in assembled_regions(plan):
        result[plan.tiles[number].device] += size
    return result


def gradient_bytes(plan: Plan) -> list[int]:
    """For each device, bytes of parameter gradients as autograd makes them, before they are added to those that stay.

    The largest tile's gradients count twice: if a tile's region is assembled from several shards, its gradient and the parts cut from it
    exist side by side. If several tiles of a device use a shard, autograd also holds the sum of their gradients.
    """
    graph = plan.graph
    largest, collected = [0] * plan.device_count, [0] * plan.device_count
    compact = compact_parameters(plan)
    for tile in plan.tiles:
        operands = zip(plan.operator(tile).parameters, tile.parameters, strict=True)
        trained = ((o.tensor, box) for o, box in operands if graph.tensors[o.tensor].requires_grad)
        size = sum(operand_bytes(plan, compact, tile, name, box) for name, box in trained)
        largest[tile.device] = max(largest[tile.device], size)
    several: dict[int, list[int]] = {}  # of equal uses, which are one object where readers own parts of a region
    for number, shard in enumerate(plan.shards):
        if shard.trainable and number not in plan.on_servers:
            if id(shard.uses) not in several:
                several[id(shard.uses)] = _several(plan, shard.uses)
            for device in several[id(shard.uses)]:
                collected[device] += box_bytes(plan, shard.parameter, shard.box)
    for sync in plan.syncs:
        several = _several(plan, sync.uses) if sync.contract.has_servers else ()
        for hold in method_for(sync).holds(plan, sync) if several else ():
            collected[hold.device] += hold.size_bytes if hold.kind is MemoryKind.GRADIENTS and hold.device in several else 0
    return [2 * size + held for size, held in zip(largest, collected, strict=True)]


def _several(plan: Plan, uses: Sequence[tuple[int, int]]) -> list[int]:
    """Devices on which several tiles are among ``uses``."""
    return [device for device, count in Counter(plan.tiles[tile].device for tile, _ in uses).items() if count > 1]


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
        result[device] += box_bytes(plan, tensor, box)
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
                size = box_bytes(plan, fetch.tensor, piece.box)
                _add_life(steps[plan.holdings[piece.holding].device], producer, latest, size)
                first = producer
        _add_life(steps[fetch.device], first, latest, box_bytes(plan, fetch.tensor, fetch.box))
    for holding, reader in zip(plan.holdings, last, strict=True):
        if reader >= 0:
            copies = 1 if holding.reduction is None else 2
            size = copies * box_bytes(plan, holding.tensor, holding.box)
            _add_life(steps[holding.device], graph.producers[holding.tensor][0], reader, size)
            if holding.reduction is not None and plan.reductions[holding.reduction].cells:
                gathered[holding.reduction] = max(gathered.get(holding.reduction, 0), reader)
    for number, reader in gathered.items():  # once as received, once put together
        reduction = plan.reductions[number]
        size = 2 * box_bytes(plan, reduced_tensor(plan, reduction), reduction.box)
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
            wanted = [box_bytes(plan, o.tensor, box) for o, box in operands if graph.tensors[o.tensor].requires_grad]
            wanted += [made for made, o in zip(size.made, op.outputs, strict=True) if graph.tensors[o.tensor].requires_grad]
            result[tile.device] = max(result[tile.device], sum(wanted) + size.shares.work + size.padded)
        else:
            result[tile.device] = max(result[tile.device], size.shares.forward)
    for holding in plan.holdings:
        if graph.tensors[holding.tensor].requires_grad:
            added[holding.device] = max(added[holding.device], ADDING_COPIES * box_bytes(plan, holding.tensor, holding.box))
    return _sum((result, added))


def fetched_bytes(plan: Plan) -> list[int]:
    """For each device, bytes of the regions that it fetches, and of the pieces that are not received straight into their place.

    A region with only local pieces counts once per consumer, because each consumer may be in a segment of its own, which assembles it.
    """
    result = [0] * plan.device_count
    first = 0
    for own in plan.deliveries:
        for number, k in received_apart(own.like):
            fetch = plan.fetches[first + number]
            result[fetch.device] += box_bytes(plan, fetch.tensor, fetch.pieces[k].box)
        first += len(own.like.fetches)
    for fetch in plan.fetches:
        remote = any(is_remote(plan, fetch, piece) for piece in fetch.pieces)
        region = box_bytes(plan, fetch.tensor, fetch.box)
        if len(fetch.pieces) > 1:
            result[fetch.device] += region * (1 if remote else len(fetch.consumers))
        elif remote:
            result[fetch.device] += region
    return result


def sent_bytes(plan: Plan) -> list[int]:
    """For each device, bytes that it copies to send values (a whole holding sent alone needs no copy), and gradients that it sends: of a
    region with parts from elsewhere all, as a part that leaves from where it lies keeps the others."""
    result = [0] * plan.device_count
    carriers: list[Message | Exchange] = [*plan.messages, *plan.exchanges]
    for carrier in carriers:
        told = told_parts(carrier)
        for source, size in copied_to_send(plan, told):
            result[source] += size
        for (number, _), (source, target, box, _) in zip(carrier.parts, remote_parts(plan, carrier.parts), strict=True):
            tensor = plan.fetches[number].tensor
            if plan.graph.tensors[tensor].requires_grad:
                result[target] += box_bytes(plan, tensor, box)
                result[source] += box_bytes(plan, tensor, box) if len(told) > 1 else 0  # where several come back together
    for fetch in plan.fetches:
        if plan.graph.tensors[fetch.tensor].requires_grad and any(is_remote(plan, fetch, piece) for piece in fetch.pieces):
            result[fetch.device] += sum(box_bytes(plan, fetch.tensor, piece.box) for piece in local_pieces(plan, fetch))
    for exchange in plan.exchanges:  # to receive a region contiguously, a device may send itself its own pieces
        for number in {number for number, _ in exchange.parts}:
            fetch = plan.fetches[number]
            result[fetch.device] += sum(box_bytes(plan, fetch.tensor, piece.box) for piece in local_pieces(plan, fetch))
    for reduction in plan.reductions:
        tensor = reduced_tensor(plan, reduction)
        for device, cell in zip(reduction.devices, reduction.cells, strict=False):
            back = len(reduction.devices) * box_bytes(plan, tensor, cell) if plan.graph.tensors[tensor].requires_grad else 0
            result[device] += partial_bytes(plan, reduction, reduction.box) + back
    return result


def copied_to_send(plan: Plan, parts: Sequence[Part]) -> Iterable[tuple[int, int]]:
    """(device, bytes) of the copies that are made to send these parts together; a whole holding sent alone needs no copy."""
    for (number, _), (source, _, box, holding) in zip(parts, remote_parts(plan, parts), strict=True):
        if len(parts) > 1 or box != plan.holdings[holding].box:
            yield source, box_bytes(plan, plan.fetches[number].tensor, box)


def largest_sum_bytes(plan: Plan) -> list[int]:
    """For each device, bytes of the largest buffer that is summed over devices: the library may work on a copy of it."""
    largest = [0] * plan.device_count
    for device, size in _summed_buffers(plan):
        largest[device] = max(largest[device], size)
    return largest


def _summed_buffers(plan: Plan) -> Iterable[tuple[int, int]]:
    for reduction in plan.reductions:
        if len(reduction.devices) > 1:
            yield from ((device, partial_bytes(plan, reduction, reduction.box)) for device in reduction.devices)
    for sync in plan.syncs:
        if sync.contract.sums_in_place and len(sync.readers) > 1:
            size = bucketing.gradient_bytes(plan, sync)
            yield from ((device, size) for device in sync.readers)
        elif sync.contract.owned_in_parts and not sync.contract.has_servers:
            steps = method_for(sync).steps(plan, sync)
            yield from ((device, step.summed_bytes) for step in steps for device in step.among)
