"""Memory of what a plan moves: regions received, copies to be sent, and buffers of sums. A part of the bound in ``peaks``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from soap.model.regions import Box, in_one_piece, lengths, volume
from soap.plan.delivery import Delivery, box_bytes, partial_bytes, reduced_tensor
from soap.plan.plan import Exchange, Fetch, Message, Part, Pattern, Piece, Plan, local_pieces, remote_parts
from soap.plan.syncs.bucketing import gradient_bytes
from soap.plan.syncs.seam import method_for


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


def received_apart(own: Delivery) -> set[Part]:
    """Parts of a delivery that are received into a buffer of their own and then copied into their region."""
    alone = {part for message in own.messages if len(message.parts) == 1 for part in message.parts}
    alone |= {part for exchange in own.exchanges if exchange.pattern is Pattern.BROADCAST for part in exchange.parts}
    found: set[Part] = set()
    for number, fetch in enumerate(own.fetches):
        pieces = enumerate(fetch.pieces)
        remote = {(number, k) for k, (_, holding) in pieces if own.holdings[holding].device != fetch.device}
        if len(fetch.pieces) > 1 or not alone.issuperset(remote):
            found |= remote
    return found


def is_remote(plan: Plan, fetch: Fetch, piece: Piece) -> bool:
    """Whether a piece comes from another device."""
    return plan.holdings[piece.holding].device != fetch.device


SENT_BYTES = 64 * 2**20
SENT_TENSORS = 64
"""At most this many bytes, in this many tensors, may be on their way out; then the runtime waits for the oldest send."""


NO_STAY = -(2**62)
"""In place of the least number of what is sent from where it lies (``ArrayLedger.stay``), if nothing is: of equal sends it is first."""


def lies_in_one_piece(part: Box, box: Box) -> bool:
    """Whether a part of a region is contiguous in the memory of the region, which lies there row by row."""
    return in_one_piece(tuple((a - o, b - o) for (a, b), (o, _) in zip(part, box, strict=True)), lengths(box))


def cells_land_in_place(box: Box, cells: Sequence[Box]) -> bool:
    """Whether the cells of a sum of ``box``, in the order of its devices, lie one behind the other in the memory of all of it."""
    starts = [start for start, _ in box]
    inside = [tuple((a - o, b - o) for (a, b), o in zip(cell, starts, strict=True)) for cell in cells if volume(cell)]
    return all(one < other for one, other in pairwise(inside)) and all(in_one_piece(cell, lengths(box)) for cell in inside)


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


def told_parts(carrier: Message | Exchange) -> tuple[Part, ...]:
    """The parts that a source sends one by one; for a broadcast only the first, because all devices receive that one."""
    return carrier.parts[:1] if isinstance(carrier, Exchange) and carrier.pattern is Pattern.BROADCAST else carrier.parts


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
            size = gradient_bytes(plan, sync)
            yield from ((device, size) for device in sync.readers)
        elif sync.contract.owned_in_parts and not sync.contract.has_servers:
            steps = method_for(sync).steps(plan, sync)
            yield from ((device, step.summed_bytes) for step in steps for device in step.among)
