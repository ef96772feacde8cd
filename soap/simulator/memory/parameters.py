"""Memory of parameters: what devices keep of them, whole or by rows, and what synchronizing them takes. A part of ``peaks``'s bound.

Rows count as if no look-up repeated another: a batch may touch more of them than batches do on average. What servers keep counts where
their device is a CPU; beside other devices it lies in the host's memory, which is not modelled, nor are the host's buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from soap.model.regions import Box
from soap.plan.flows import box_bytes
from soap.plan.plan import Plan, Served
from soap.plan.row_counts import device_lookups, row_bytes, tile_lookups
from soap.plan.serving import INDEX_BYTES, reading_groups
from soap.plan.tiling import Tile

COUNT_BYTES = 4
"""Optimizers with more than one state count their steps, once per tensor."""
COPIES = 2
"""Rows are received apart from where they are used, and copied to be sent."""


def kept_parameters(plan: Plan) -> tuple[list[int], list[int], list[int]]:
    """By device bytes of parameters, of gradients, and of what its optimizer has states of."""
    held, gradients, updated = ([0] * plan.device_count for _ in range(3))
    for _, device, size, trainable in kept_shards(plan):
        held[device] += size
        gradients[device] += size if trainable else 0
        updated[device] += size if trainable else 0
    for served in plan.served:
        for device, size in reader_bytes(plan, served).items():
            held[device] += size
            gradients[device] += size
    return held, gradients, updated


def kept_shards(plan: Plan) -> Iterator[tuple[int, int, int, bool]]:
    """(shard, device, bytes, whether it is trained) of all that devices keep in their own memory."""
    partitions = {number for served in plan.served for number in served.shards}
    for number, shard in enumerate(plan.shards):
        size = box_bytes(plan, shard.parameter, shard.box)
        for device in shard.devices:
            if number not in partitions or device not in plan.accelerators:
                yield number, device, size, shard.trainable


def updating_bytes(plan: Plan, optimizer_states: int) -> list[int]:
    """By device, what an optimizer's step makes and frees again. One with several states, as Adam, takes two more tensors of a shard's size
    (a root, and what divides the step); on CPUs, where it goes from shard to shard, the last shard's second one is there still; elsewhere
    it takes the roots of all shards at once."""
    largest, last, together = ([0] * plan.device_count for _ in range(3))
    for _, device, size, trainable in kept_shards(plan):
        if trainable and optimizer_states > 1:
            largest[device] = max(largest[device], last[device] + 2 * size)
            last[device] = size
            together[device] += size
    return [together[device] if device in plan.accelerators else largest[device] for device in range(plan.device_count)]


def reader_bytes(plan: Plan, served: Served) -> dict[int, int]:
    """By reader of a served region, bytes of its values that it has: all, or the rows that it looks up."""
    if not served.sparse:
        return dict.fromkeys(served.readers, box_bytes(plan, served.parameter, served.box))
    return _row_bytes(plan, served.parameter, served.box, served.uses)


def exchanged_bytes(plan: Plan) -> list[int]:
    """By device, buffers of what is pulled and pushed, or of gathered rows."""
    result = [0] * plan.device_count
    for served in plan.served:
        own = reader_bytes(plan, served)
        for device, size in own.items():
            result[device] += COPIES * size + _index_bytes(plan, served, device)
        for leader, *others in reading_groups(served):
            result[leader] += COPIES * sum(own[device] + _index_bytes(plan, served, device) for device in others)
        for device, size in served_gradients(plan, served):
            result[device] += size + (0 if device in plan.accelerators else COUNT_BYTES)
    for number in plan.gathered:
        shard = plan.shards[number]
        for device in shard.devices:
            result[device] += COPIES * gathered_bytes(plan, number)
    return result


def served_gradients(plan: Plan, served: Served) -> Iterator[tuple[int, int]]:
    """By partition (device, bytes) of what its server receives, and of rows that it sends; none in a host's memory."""
    own = reader_bytes(plan, served)
    for number in served.shards:
        shard = plan.shards[number]
        most = box_bytes(plan, shard.parameter, shard.box)
        received = (COPIES if served.sparse else 1) * sum(min(most, size) for size in own.values())
        if served.sparse:
            received += 2 * INDEX_BYTES * sum(_rows(plan, shard.parameter, shard.box, served.uses).values())
        yield shard.devices[0], 0 if shard.devices[0] in plan.accelerators else received


def gathered_bytes(plan: Plan, number: int) -> int:
    """Rows of a gathered shard that all its devices give together, with their indices."""
    shard = plan.shards[number]
    rows = _rows(plan, shard.parameter, shard.box, shard.uses)
    return sum(rows.values()) * (row_bytes(plan.graph, shard.parameter, shard.box) + INDEX_BYTES)


def compact_parameters(plan: Plan) -> frozenset[str]:
    """Parameters of which tiles have only the rows that they look up."""
    return frozenset(served.parameter for served in plan.served if served.sparse)


def operand_bytes(plan: Plan, compact: frozenset[str], tile: Tile, parameter: str, box: Box) -> int:
    """What a tile has of a parameter. ``compact``: ``compact_parameters``."""
    if parameter not in compact or tile.operator not in plan.graph.backward_operators:
        return box_bytes(plan, parameter, box)
    start, stop = box[0]
    return min(stop - start, tile_lookups(plan.graph, parameter, tile)) * row_bytes(plan.graph, parameter, box)


def assembled_regions(plan: Plan) -> Iterator[tuple[int, str, Box, int]]:
    """(tile, parameter, region, bytes) of what tiles read that is not one shard: it is put together for each segment, and kept for its
    backward pass. Of rows, each tile has its own."""
    compact = compact_parameters(plan)
    shards = {(shard.parameter, shard.box) for shard in plan.shards} | {(served.parameter, served.box) for served in plan.served}
    for number, tile in enumerate(plan.tiles):
        for operand, box in zip(plan.operator(tile).parameters, tile.parameters, strict=True):
            if (operand.tensor, box) not in shards:
                yield number, operand.tensor, box, operand_bytes(plan, compact, tile, operand.tensor, box)


def assembled_bytes(plan: Plan) -> list[int]:
    """All of these together, by device: each tile may be a segment."""
    result = [0] * plan.device_count
    for number, _, _, size in assembled_regions(plan):
        result[plan.tiles[number].device] += size
    return result


def gradient_bytes(plan: Plan) -> list[int]:
    """Parameter gradients as autograd makes them, before they are added up where they stay.

    The largest tile's exist twice: where tiles put together more than there are shards, the gradient of such a region and its parts lie
    beside each other. Where several tiles of a device use a shard, autograd collects their gradients first.
    """
    graph = plan.graph
    largest, collected = [0] * plan.device_count, [0] * plan.device_count
    compact = compact_parameters(plan)
    for tile in plan.tiles:
        operands = zip(plan.operator(tile).parameters, tile.parameters, strict=True)
        trained = ((o.tensor, box) for o, box in operands if graph.tensors[o.tensor].requires_grad)
        size = sum(operand_bytes(plan, compact, tile, name, box) for name, box in trained)
        largest[tile.device] = max(largest[tile.device], size)
    partitions = {number for served in plan.served for number in served.shards}
    for number, shard in enumerate(plan.shards):
        if shard.trainable and number not in partitions:
            for device in _several(plan, shard.uses):
                collected[device] += box_bytes(plan, shard.parameter, shard.box)
    for served in plan.served:
        sizes = reader_bytes(plan, served)
        for device in _several(plan, served.uses):
            collected[device] += sizes[device]
    return [2 * size + held for size, held in zip(largest, collected, strict=True)]


def _several(plan: Plan, uses: Sequence[tuple[int, int]]) -> list[int]:
    """Devices of which several tiles use something."""
    return [device for device, count in Counter(plan.tiles[tile].device for tile, _ in uses).items() if count > 1]


def _rows(plan: Plan, parameter: str, box: Box, uses: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Device -> how many different rows of a region it may look up at most."""
    start, stop = box[0]
    return {device: min(stop - start, count) for device, count in device_lookups(plan.graph, parameter, plan.tiles, uses).items()}


def _row_bytes(plan: Plan, parameter: str, box: Box, uses: Sequence[tuple[int, int]]) -> dict[int, int]:
    size = row_bytes(plan.graph, parameter, box)
    return {device: rows * size for device, rows in _rows(plan, parameter, box, uses).items()}


def _index_bytes(plan: Plan, served: Served, device: int) -> int:
    """Indices of the rows that a reader looks up: as they come, and as positions in what is pulled."""
    if not served.sparse:
        return 0
    return 2 * INDEX_BYTES * device_lookups(plan.graph, served.parameter, plan.tiles, served.uses)[device]
