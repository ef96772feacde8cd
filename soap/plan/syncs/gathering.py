"""When values that readers have only for their uses are gathered: in which order, and which passes have to be over first. No costs.

A device gathers what it reads in the order of the first forward uses, then once more in the order of the backward passes. The gather of a
group of regions waits for the uses of the group that is ``Strategy.prefetch`` + 1 places before it in this order, on each of its readers,
and so that much is held at most. Exception: passes that may themselves need this gather (of parameters that are used early and late) are
not waited for. Those that are have an earlier operator (forward), or one that is later than where the gather is first needed (backward),
so no gather waits for itself. Recomputed operators need values when they run again, which may be long before their own backward passes.

With micro-batches values are gathered once, and stay until the last of their uses in the step, as with ``reshard_after_forward=False`` of
PyTorch's FSDP, which is what its pipelines use: all gathers begin with the step, in the order of their first uses, and wait for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soap.plan.plan import Plan, ShardSync
from soap.plan.recomputation import needed_from
from soap.plan.syncs.even_parts import bucket_bytes, is_even, part_bytes
from soap.plan.syncs.sharing import owned_bytes, sharers

UNDER_WAY = 2
"""At most so many scatters of such gradients are under way at a time; then what has come is added up, and gone."""

Item = tuple[int, bool]
"""A gather: (position in ``Plan.syncs``, whether for the backward pass)."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A gather of the values of synchronization ``sync``, for its forward or (``backward``) its backward passes.

    ``position``: the first operator, in the order of the pass, whose tiles wait for it. ``after_forward``, ``after_backward``: tiles whose
    forward or backward passes have to be over before it begins.
    """

    sync: int
    backward: bool
    position: int
    after_forward: tuple[int, ...]
    after_backward: tuple[int, ...]


def stays(plan: Plan) -> bool:
    """Whether what is gathered stays from its first use in a step to its last one."""
    return plan.order is not None


def is_read_back(plan: Plan, sync: ShardSync) -> bool:
    """Whether values are gathered once more for backward passes. All but frozen values below everything that gets a gradient are, unless
    they stay."""
    return not stays(plan) and any(plan.graph.needs_backward(plan.operator(plan.tiles[tile])) for tile, _ in sync.uses)


def gathers(plan: Plan) -> tuple[Gather, ...]:
    """All gathers before passes, in the order in which devices begin them."""
    numbers = [number for number, sync in enumerate(plan.syncs) if sync.contract.gathers_values]
    if not numbers:
        return ()
    places = _places(plan, numbers)
    back = frozenset(position for position, op in enumerate(plan.graph.operators) if plan.graph.needs_backward(op))
    uses = {number: sorted({tile for tile, _ in plan.syncs[number].uses}) for number in numbers}
    first = {number: min(plan.tiles[tile].operator for tile in own) for number, own in uses.items()}
    needed = needed_from(plan)
    last = {
        number: max(needed[op] for tile in own if (op := plan.tiles[tile].operator) in back)
        for number, own in uses.items()
        if is_read_back(plan, plan.syncs[number])
    }
    order: list[Item] = [(number, False) for number in sorted(numbers, key=lambda number: (first[number], places[number]))]
    order += [(number, True) for number in sorted(last, key=lambda number: (-last[number], places[number]))]
    before, found = _before(plan, order), list[Gather]()
    for number, backward in order:
        forward_tiles, backward_tiles = set(uses[number] if backward else ()), set[int]()
        for device, (other, other_backward) in before[number, backward]:
            for tile in uses[other]:
                operator = plan.tiles[tile].operator
                if plan.tiles[tile].device != device:
                    continue
                if not other_backward and (backward or operator < first[number]):
                    forward_tiles.add(tile)
                elif other_backward and operator in back and operator > last[number]:
                    backward_tiles.add(tile)
        position = last[number] if backward else first[number]
        found.append(Gather(number, backward, position, tuple(sorted(forward_tiles)), tuple(sorted(backward_tiles))))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Most:
    """The most bytes that a device holds at once, in whatever order tasks run, of values that are gathered (``values``), of the gradients
    of such values before they leave (``gradients``), and of gradients that are on their way (``moving``)."""

    values: int
    gradients: int
    moving: int


def most_gathered(plan: Plan) -> Mapping[int, Most]:
    """Device -> ``Most``; devices that gather nothing are left out.

    A device's gathers form ``prefetch`` + 1 rows, in which each waits until the one before is used. So of each row one group is there at a
    time. Groups of which some uses are not waited for count in addition. A group counts twice while it is put into its place. Gradients
    leave when all readers have them: where these differ, all gradients may be there together. Sums of even parts keep their padding.
    Where values stay, all are there together, and so are all gradients.
    """
    found: dict[int, Most] = {}
    sizes = {number: bucket_bytes(plan, sync) for number, sync in enumerate(plan.syncs) if sync.contract.gathers_values}
    trained = {number for number in sizes if not plan.is_frozen(plan.syncs[number])}
    waited: dict[tuple[int, Item], set[int]] = {}
    own = gathers(plan)
    before = _before(plan, [(gather.sync, gather.backward) for gather in own])
    for gather in own:
        for device, item in before[gather.sync, gather.backward]:
            waited[device, item] = {*(gather.after_backward if item[1] else gather.after_forward)}
    for device in range(plan.device_count):
        items = [(gather.sync, gather.backward) for gather in own if device in plan.syncs[gather.sync].readers]
        if not items:
            continue
        rows = [items[k :: plan.strategy.prefetch + 1] for k in range(min(len(items), plan.strategy.prefetch + 1))]
        kept = {number for number, backward in items if not _is_waited_for(plan, device, (number, backward), waited)}
        values = sum(max(sizes[number] for number, _ in row) for row in rows) + sum(sizes[number] for number in kept)
        back = [[number for number, backward in row if backward and number in trained] for row in rows]
        gradients = sum(max((sizes[number] for number in row), default=0) for row in back) + sum(sizes[number] for number in kept & trained)
        mine = {number for number, _ in items}
        total, largest, leaving = sum(sizes[number] for number in mine), max(sizes[number] for number in mine), mine & trained
        most = sum(sizes[number] for number in leaving)
        if stays(plan):
            values = total
        if stays(plan) or len({plan.syncs[number].readers for number in leaving}) > 1:
            gradients = most
        moved = [sizes[number] + _received_bytes(plan, plan.syncs[number], device) for number in leaving]
        padding = sum(_padding_bytes(plan, plan.syncs[number], device) for number in leaving)
        moving = min((UNDER_WAY + 1) * max(moved, default=0), sum(moved)) + padding
        found[device] = Most(min(values, total) + largest, min(gradients, most), moving)
    return found


def _is_waited_for(plan: Plan, device: int, item: Item, waited: Mapping[tuple[int, Item], set[int]]) -> bool:
    """Whether the gather behind this one in its row waits for all uses on the device; there need be none behind it."""
    if (device, item) not in waited:
        return True
    uses = {tile for tile, _ in plan.syncs[item[0]].uses if plan.tiles[tile].device == device}
    needs_backward = plan.graph.needs_backward
    return waited[device, item] >= {tile for tile in uses if not item[1] or needs_backward(plan.operator(plan.tiles[tile]))}


def _received_bytes(plan: Plan, sync: ShardSync, device: int) -> int:
    """Gradients that others send a device of its parts; a collective adds them up on their way."""
    return 0 if is_even(plan, sync) else (sharers(sync) - 1) * owned_bytes(plan, sync).get(device, 0)


def _padding_bytes(plan: Plan, sync: ShardSync, device: int) -> int:
    """By how much the sums that a collective leaves on a device are larger than what it owns."""
    return part_bytes(plan, sync) - owned_bytes(plan, sync).get(device, 0) if is_even(plan, sync) else 0


def _places(plan: Plan, numbers: Sequence[int]) -> Mapping[int, tuple[int, int]]:
    """What orders gathers for the same operator: the first parameter's position, and the number of its region."""
    positions = {tensor.name: position for position, tensor in enumerate(plan.graph.parameters)}
    return {number: (positions[plan.syncs[number].parameter], plan.syncs[number].index) for number in numbers}


def _before(plan: Plan, order: Sequence[Item]) -> Mapping[Item, Sequence[tuple[int, Item]]]:
    """Gather -> (device, the gather for whose uses it waits there); none where values stay."""
    found: dict[Item, list[tuple[int, Item]]] = {item: [] for item in order}
    ahead = plan.strategy.prefetch + 1
    for device in range(plan.device_count if not stays(plan) else 0):
        own = [item for item in order if device in plan.syncs[item[0]].readers]
        for earlier, item in zip(own, own[ahead:], strict=False):
            found[item].append((device, earlier))
    return found
