"""Memory of parameters: what devices hold of them, whole or by rows, and what synchronization takes. A part of the bound in ``peaks``.

Rows are counted as if no look-up repeated a row, because a batch may touch more rows than the average. What a server owns counts if its
device is a CPU. Beside other devices it is in the host's memory, as are the host's buffers (``hosts``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from soap.model.regions import Box
from soap.plan.delivery import box_bytes
from soap.plan.plan import Plan
from soap.plan.row_counts import row_bytes, tile_lookups
from soap.plan.syncs.gathering import most_gathered
from soap.plan.syncs.seam import method_for
from soap.plan.tiling import Tile


def kept_parameters(plan: Plan) -> tuple[list[int], list[int], list[int]]:
    """For each device the bytes of (parameters, gradients, parameters with optimizer state)."""
    held, gradients, updated = ([0] * plan.device_count for _ in range(3))
    for number, device, size, trainable in kept_shards(plan):
        held[device] += size
        gradients[device] += size if trainable else 0
        updated[device] += size if trainable and not is_away(plan, number, device) else 0
    for sync in plan.syncs:
        for device, size in method_for(sync).copies(plan, sync).items():
            held[device] += size
            gradients[device] += size
    for device, most in most_gathered(plan).items():
        held[device] += most.values
        gradients[device] += most.gradients
    return held, gradients, updated


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


def exchanged_bytes(plan: Plan) -> list[int]:
    """For each device, bytes of the buffers that methods of synchronization need (``SyncMethod.buffers``), and of ``host_copies``."""
    result = host_copies(plan)
    for sync in plan.syncs:
        for device, size in method_for(sync).buffers(plan, sync):
            result[device] += size
    for device, most in most_gathered(plan).items():
        result[device] += most.moving
    return result


def compact_parameters(plan: Plan) -> frozenset[str]:
    """Parameters that only servers hold as a whole: tiles get the rows that they look up, in a compact table."""
    return frozenset(sync.parameter for sync in plan.syncs if sync.contract.by_rows and sync.contract.has_servers)


def compact_numbers(plan: Plan) -> list[int]:
    """Places of ``compact_parameters`` among the graph's parameters."""
    names = compact_parameters(plan)
    return [number for number, own in enumerate(plan.graph.parameters) if own.name in names] if names else []


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
        sizes = method_for(sync).copies(plan, sync) if sync.contract.has_servers else {}
        for device in _several(plan, sync.uses) if sizes else ():
            collected[device] += sizes[device]
    return [2 * size + held for size, held in zip(largest, collected, strict=True)]


def _several(plan: Plan, uses: Sequence[tuple[int, int]]) -> list[int]:
    """Devices on which several tiles are among ``uses``."""
    return [device for device, count in Counter(plan.tiles[tile].device for tile, _ in uses).items() if count > 1]
