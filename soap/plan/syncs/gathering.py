"""When values that readers have only for their uses are gathered: in which order, and which passes have to be over first. No costs.

A device gathers what it reads in the order of the first forward uses, then once more in the order of the backward passes. The gather of a
group of regions waits for the uses of the group that is ``Strategy.prefetch`` + 1 places before it in this order, on each of its readers,
and so that much is held at most. Exception: passes that may themselves need this gather (of parameters that are used early and late) are
not waited for. Those that are have an earlier operator (forward), or a later one (backward), so no gather waits for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soap.plan.plan import Plan

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


def gathers(plan: Plan) -> tuple[Gather, ...]:
    """All gathers before passes, in the order in which devices begin them."""
    numbers = [number for number, sync in enumerate(plan.syncs) if sync.contract.gathers_values]
    if not numbers:
        return ()
    places = _places(plan, numbers)
    back = frozenset(position for position, op in enumerate(plan.graph.operators) if plan.graph.needs_backward(op))
    uses = {number: sorted({tile for tile, _ in plan.syncs[number].uses}) for number in numbers}
    first = {number: min(plan.tiles[tile].operator for tile in own) for number, own in uses.items()}
    last = {number: max(op for tile in own if (op := plan.tiles[tile].operator) in back) for number, own in uses.items()}
    order: list[Item] = [(number, False) for number in sorted(numbers, key=lambda number: (first[number], places[number]))]
    order += [(number, True) for number in sorted(numbers, key=lambda number: (-last[number], places[number]))]
    before, found = _before(plan, order), []
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


def _places(plan: Plan, numbers: Sequence[int]) -> Mapping[int, tuple[int, int]]:
    """What orders gathers for the same operator: the first parameter's position, and the number of its region."""
    positions = {tensor.name: position for position, tensor in enumerate(plan.graph.parameters)}
    return {number: (positions[plan.syncs[number].parameter], plan.syncs[number].index) for number in numbers}


def _before(plan: Plan, order: Sequence[Item]) -> Mapping[Item, Sequence[tuple[int, Item]]]:
    """Gather -> (device, the gather for whose uses it waits there)."""
    found: dict[Item, list[tuple[int, Item]]] = {item: [] for item in order}
    ahead = plan.strategy.prefetch + 1
    for device in range(plan.device_count):
        own = [item for item in order if device in plan.syncs[item[0]].readers]
        for earlier, item in zip(own, own[ahead:], strict=False):
            found[item].append((device, earlier))
    return found
