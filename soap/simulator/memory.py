"""Peak memory of a plan, device by device: an upper bound on what a training step holds, so that "fits" can be trusted.

Counted as held through the whole step: parameter shards, their gradients and optimizer states, and everything the forward pass makes
(it is not credited that the backward pass frees activations while it goes). On top come, as buffers, the largest set of gradients under
way between operators, the largest tile's own gradients, and the largest message with its copy. The allocator's fragmentation and the
libraries' workspaces are not counted, nor are a model's buffers (running statistics), which belong to no tensor of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from soap.graph import Operator, OperatorGraph, TensorKind
from soap.regions import Box, volume, whole
from soap.simulator.plan import Fetch, Plan
from soap.simulator.tiling import Tile, iteration_points

MESSAGE_COPIES = 2
"""A region that does not lie contiguously is packed before it is sent, and arrives in a buffer of its own."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What one device holds at its peak, in bytes.

    ``optimizer``: its states. ``activations``: inputs, fetched regions, outputs, sums and what the backward pass needs besides.
    ``buffers``: gradients under way and messages.
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
    parameters, trainable = _shard_bytes(plan)
    activations = _sum(plan, (_tile_bytes(plan), _read_bytes(plan), _fetched_bytes(plan), _summed_bytes(plan), _assembled_bytes(plan)))
    backward = _sum(plan, (_frontier_bytes(plan), _tile_gradient_bytes(plan), _message_bytes(plan)))
    return tuple(
        MemoryUse(
            parameters=parameters[d],
            gradients=trainable[d],
            optimizer=optimizer_states * trainable[d],
            activations=activations[d],
            # An optimizer that updates many tensors in one call needs as much again as it updates; by then the activations are free.
            buffers=max(backward[d], trainable[d] - activations[d]),
        )
        for d in range(plan.device_count)
    )


def peak_bytes(plan: Plan, optimizer_states: int = 2) -> tuple[int, ...]:
    """Upper bound of each device's peak memory."""
    return tuple(use.total for use in memory_use(plan, optimizer_states))


def _sum(plan: Plan, parts: Iterable[list[int]]) -> list[int]:
    return [sum(values) for values in zip(*parts, strict=True)] or [0] * plan.device_count


def _box_bytes(graph: OperatorGraph, tensor: str, box: Box) -> int:
    return volume(box) * graph.tensors[tensor].itemsize


def _saved(op: Operator, tile: Tile) -> int:
    """The tile's share of ``saved_bytes``, rounded up."""
    return -(-op.saved_bytes * tile.size // iteration_points(op))


def _shard_bytes(plan: Plan) -> tuple[list[int], list[int]]:
    """(all, trainable) parameter bytes of each device."""
    held, trainable = [0] * plan.device_count, [0] * plan.device_count
    for shard in plan.shards:
        size = _box_bytes(plan.graph, shard.parameter, shard.box)
        for device in shard.devices:
            held[device] += size
            trainable[device] += size if shard.trainable else 0
    return held, trainable


def _tile_bytes(plan: Plan) -> list[int]:
    """Outputs of the tiles, and what they keep besides."""
    result = [0] * plan.device_count
    for tile in plan.tiles:
        op = plan.operator(tile)
        outputs = (_box_bytes(plan.graph, o.tensor, box) for o, box in zip(op.outputs, tile.outputs, strict=True))
        result[tile.device] += sum(outputs) + _saved(op, tile)
    return result


def _read_bytes(plan: Plan) -> list[int]:
    """Model inputs and constants: the whole tensor where a tile reads any of it, and a copy of every distinct part."""
    read: set[tuple[int, str, Box]] = set()
    for tile in plan.tiles:
        for operand, box in zip(plan.operator(tile).inputs, tile.inputs, strict=True):
            tensor = plan.graph.tensors[operand.tensor]
            if tensor.kind is not TensorKind.ACTIVATION:
                read.add((tile.device, tensor.name, box))
                read.add((tile.device, tensor.name, whole(tensor.shape)))
    return _total(plan, read)


def _fetched_bytes(plan: Plan) -> list[int]:
    """Regions that are put together; one that is a holding of the device itself needs no copy."""
    copies = [(f.device, f.tensor, f.box) for f in plan.fetches if not _is_local_holding(plan, f)]
    return _total(plan, copies)


def _is_local_holding(plan: Plan, fetch: Fetch) -> bool:
    if len(fetch.pieces) != 1:
        return False
    holding = plan.holdings[fetch.pieces[0].holding]
    return holding.device == fetch.device and holding.box == fetch.box


def _summed_bytes(plan: Plan) -> list[int]:
    """Sums of partial results, on every device of the group."""
    sums = ((device, plan.graph.operators[r.operator].outputs[r.output].tensor, r.box) for r in plan.reductions for device in r.devices)
    return _total(plan, sums)


def _assembled_bytes(plan: Plan) -> list[int]:
    """Parameter regions that tiles read and that are not one shard: they are put together from several, and kept for the backward pass."""
    shards = {(shard.parameter, shard.box) for shard in plan.shards}
    assembled = {
        (tile.device, operand.tensor, box)
        for tile in plan.tiles
        for operand, box in zip(plan.operator(tile).parameters, tile.parameters, strict=True)
        if (operand.tensor, box) not in shards
    }
    return _total(plan, assembled)


def _total(plan: Plan, regions: Iterable[tuple[int, str, Box]]) -> list[int]:
    result = [0] * plan.device_count
    for device, tensor, box in regions:
        result[device] += _box_bytes(plan.graph, tensor, box)
    return result


def _frontier_bytes(plan: Plan) -> list[int]:
    """Largest sum of gradients that wait between operators, when these go backward in reverse order.

    A holding's gradient lives from its last consumer to its producer; a fetched region's from its last consumer to its first.
    """
    graph = plan.graph
    last = [-1] * len(plan.holdings)
    steps = [[0] * (len(graph.operators) + 1) for _ in range(plan.device_count)]
    for fetch in plan.fetches:
        if not graph.tensors[fetch.tensor].requires_grad:
            continue
        readers = [plan.tiles[tile].operator for tile, _ in fetch.consumers]
        for piece in fetch.pieces:
            last[piece.holding] = max(last[piece.holding], *readers)
        _add_life(steps[fetch.device], min(readers), max(readers), _box_bytes(graph, fetch.tensor, fetch.box))
    for holding, reader in zip(plan.holdings, last, strict=True):
        if reader >= 0:
            producer = graph.producers[holding.tensor][0]
            _add_life(steps[holding.device], producer, reader, _box_bytes(graph, holding.tensor, holding.box))
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


def _tile_gradient_bytes(plan: Plan) -> list[int]:
    """The largest tile's gradients: of its outputs, inputs and parameters, and of what lies between its fused calls."""
    result = [0] * plan.device_count
    for tile in plan.tiles:
        op = plan.operator(tile)
        if plan.graph.needs_backward(op):
            operands = zip((*op.inputs, *op.parameters, *op.outputs), (*tile.inputs, *tile.parameters, *tile.outputs), strict=True)
            wanted = ((o.tensor, box) for o, box in operands if plan.graph.tensors[o.tensor].requires_grad)
            size = sum(_box_bytes(plan.graph, tensor, box) for tensor, box in wanted) + _saved(op, tile)
            result[tile.device] = max(result[tile.device], size)
    return result


def _message_bytes(plan: Plan) -> list[int]:
    """The largest message of each device, with its copy."""
    largest = [0] * plan.device_count
    for device, size in _messages(plan):
        largest[device] = max(largest[device], size)
    return [MESSAGE_COPIES * size for size in largest]


def _messages(plan: Plan) -> Iterable[tuple[int, int]]:
    """(device, bytes) of everything that a device sends or receives at once."""
    graph = plan.graph
    for fetch in plan.fetches:
        for piece in fetch.pieces:
            source = plan.holdings[piece.holding].device
            if source != fetch.device:
                size = _box_bytes(graph, fetch.tensor, piece.box)
                yield from ((source, size), (fetch.device, size))
    for reduction in plan.reductions:
        if len(reduction.devices) > 1:
            tensor = graph.operators[reduction.operator].outputs[reduction.output].tensor
            yield from ((device, _box_bytes(graph, tensor, reduction.box)) for device in reduction.devices)
    for shard in plan.shards:
        if len(shard.devices) > 1 and shard.trainable:
            yield from ((device, _box_bytes(graph, shard.parameter, shard.box)) for device in shard.devices)
