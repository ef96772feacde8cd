"""When values that readers have only for their uses are gathered: in which order, and which passes have to be over first. No costs.

A device gathers what it reads in the order of the first forward uses, then once more in the order of the backward passes. The gather of a
group of regions waits for the uses of the group that is ``Strategy.prefetch`` + 1 places before it in this order, on each of its readers,
and so that much is held at most. Exception: passes that may themselves need this gather (of parameters that are used early and late) are
not waited for. Those that are have an earlier operator (forward), or one that is later than where the gather is first needed (backward),
so no gather waits for itself. Recomputed operators need values when they run again, which may be long before their own backward passes: all
that run again together need theirs at once. So where operators of either group run again, and not all uses of the earlier group are waited
for, those of the groups before it are, up to the first of which all are: the values of a run that is recomputed come when the run before it
goes back, and not all with the first.

With micro-batches and no stages (``PassOrder.anew``) each has synchronizations of its own (``ShardSync.part``), and all this holds for the
gathers of all of them, one action (a micro-batch's forward or backward pass) after the other. A group's values also wait for its uses in
the action that had them before. Exception: second runs that second runs behind a barrier read come before any micro-batch goes back in
front of it. Their values are gathered for the action that first needs them, wait for uses in actions before that one alone, and stay until
their own backward passes, those of all micro-batches side by side.

With stages, and of parameters that are read once for all micro-batches, or behind a barrier, values are gathered once, and stay until the
last of their uses in the step, as with ``reshard_after_forward=False`` of PyTorch's FSDP, which is what its pipelines use: these gathers
begin with the step, in the order of their first uses, and wait for nothing. Where another trainer keeps values (``Wrapped.kept``), gathers
wait for earlier uses all the same, as they do there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from soap.plan.pass_order import PassOrder
from soap.plan.plan import Plan, ShardSync
from soap.plan.recomputation import needed_from

UNDER_WAY = 2
"""At most so many scatters of gradients of gathered values are under way at a time; then what has come is added up, and gone."""

Item = tuple[int, bool]
"""A gather: (position in ``Plan.syncs``, whether for the backward pass)."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A gather of the values of synchronization ``sync``, for its forward or (``backward``) its backward passes.

    ``position``: the first operator, in the order of the pass, whose tiles wait for it. ``after_forward``, ``after_backward``: tiles whose
    forward or backward passes, if they have one, have to be over before it begins.
    """

    sync: int
    backward: bool
    position: int
    after_forward: tuple[int, ...]
    after_backward: tuple[int, ...]


def repeats(order: PassOrder | None, operator: int) -> bool:
    """Whether values that an operator reads are gathered for each micro-batch, if all that read them do so: if it is cut, before any
    barrier."""
    if order is None or not order.anew or order.chunks[operator] > 0:
        return False
    return order.cut.parts(operator) > 1 and operator not in order.cut.graph.epilogue


class Turn(NamedTuple):
    """An action for which values are gathered: of which ``chunk`` and micro-batch (``part``) it is, and whether it is ``backward``."""

    chunk: int
    part: int
    backward: bool


def turns(order: PassOrder | None) -> list[Turn]:
    """The actions in whose order what is gathered anew is gathered."""
    if order is None:
        return [Turn(0, 0, False), Turn(0, 0, True)]
    own = [Turn(action.chunk, action.microbatch, action.kind != "F") for action in order.actions]
    return own if order.anew else [Turn(0, 0, False)]


def in_parts(sync: ShardSync, count: int, part_of: Callable[[int], int]) -> list[ShardSync]:
    """A synchronization for each of so many micro-batches. ``part_of``: that of a tile."""
    found = []
    for part in range(count):
        uses = [tuple([use for use in region.uses if part_of(use[0]) == part]) for region in sync.regions]
        regions = tuple([replace(region, uses=own) for region, own in zip(sync.regions, uses, strict=True)])
        found.append(replace(sync, regions=regions, part=part))
    return found


def all_step(plan: Plan, sync: ShardSync) -> bool:
    """Whether what is gathered is for all micro-batches of a step."""
    return plan.order is not None and sync.part is None


def stays(plan: Plan, sync: ShardSync) -> bool:
    """Whether what is gathered stays from its first use to its last one, forward or backward."""
    return all_step(plan, sync) or sync.parameter in plan.training.wrapped.kept


def is_read_back(plan: Plan, sync: ShardSync) -> bool:
    """Whether values are gathered once more for backward passes. All but frozen values below everything that gets a gradient are, unless
    they stay."""
    return not stays(plan, sync) and any(plan.graph.needs_backward(plan.operator(plan.tiles[tile])) for tile, _ in sync.uses)


def gathers(plan: Plan) -> tuple[Gather, ...]:
    """All gathers before passes, in the order in which devices begin them."""
    numbers = [number for number, sync in enumerate(plan.syncs) if sync.contract.gathers_values]
    if not numbers:
        return ()
    places = _places(plan, numbers)
    back = frozenset(position for position, op in enumerate(plan.graph.operators) if plan.graph.needs_backward(op))
    uses = {number: sorted({tile for tile, _ in plan.syncs[number].uses}) for number in numbers}
    on = {number: _by_device(plan, tiles) for number, tiles in uses.items()}
    at = {number: sorted({plan.tiles[tile].operator for tile in own}) for number, own in uses.items()}
    needed, first = needed_from(plan), {number: own[0] for number, own in at.items()}
    wanted = {number: max(needed[op] for op in own if op in back) for number, own in at.items() if is_read_back(plan, plan.syncs[number])}
    last = {number: own.position for number, own in wanted.items()}
    items: list[Item] = [(number, False) for number in numbers] + [(number, True) for number in last]
    turn_of = {action: turn for turn, action in enumerate(turns(plan.order))}
    part = {number: plan.syncs[number].part or 0 for number in numbers}
    turn = {item: turn_of[Turn(wanted[item[0]].chunk if item[1] else 0, part[item[0]], item[1])] for item in items}
    used = {item: turn_of[Turn(0, part[item[0]], item[1])] for item in items}
    order = sorted(items, key=lambda item: (turn[item], -last[item[0]] if item[1] else first[item[0]], places[item[0]]))
    final = {number: next((op for op in own if op in back), 0) for number, own in at.items()}

    def is_over(earlier: Item, item: Item) -> bool:
        """Whether all uses of an earlier gather's values come before an item's are needed, or those of neither are computed again."""
        if used[earlier] != turn[item]:
            return used[earlier] < turn[item]
        both = item[0], earlier[0]
        if not item[1] or (turn[earlier] == turn[item] and all(last[number] <= at[number][-1] for number in both)):
            return True
        return final[earlier[0]] > last[item[0]]

    awaited, before, found = _awaited(plan, order, is_over), dict[int, Item](), list[Gather]()
    for number, backward in order:
        forward_tiles, backward_tiles = set(uses[number] if backward else ()), set[int]()
        group, begins = number - part[number], turn[number, backward]
        if group in before and used[before[group]] < begins:
            (backward_tiles if before[group][1] else forward_tiles).update(uses[before[group][0]])
        before[group] = number, backward
        for device, (other, other_backward) in awaited[number, backward]:
            passes = used[other, other_backward]
            for tile in on[other].get(device, ()) if passes <= begins else ():
                operator, over = plan.tiles[tile].operator, passes < begins
                if not other_backward and (over or operator < first[number]):
                    forward_tiles.add(tile)
                elif other_backward and operator in back and (over or operator > last[number]):
                    backward_tiles.add(tile)
        position = max(last[number], at[number][-1]) if backward else first[number]
        found.append(Gather(number, backward, position, tuple(sorted(forward_tiles)), tuple(sorted(backward_tiles))))
    return tuple(found)


def _places(plan: Plan, numbers: Sequence[int]) -> Mapping[int, tuple[int, int]]:
    """What orders gathers for the same operator: the first parameter's position, and the number of its region."""
    positions = {tensor.name: position for position, tensor in enumerate(plan.graph.parameters)}
    return {number: (positions[plan.syncs[number].parameter], plan.syncs[number].index) for number in numbers}


def _awaited(plan: Plan, order: Sequence[Item], is_over: Callable[[Item, Item], bool]) -> Mapping[Item, Sequence[tuple[int, Item]]]:
    """Gather -> (device, gather) of those for whose uses it waits there: the one ``prefetch`` + 1 places before, and those before that, up
    to the first one that ``is_over`` in time. Those that are for all micro-batches neither wait nor are waited for."""
    found: dict[Item, list[tuple[int, Item]]] = {item: [] for item in order}
    ahead = plan.strategy.prefetch + 1
    for device, own in sorted(_by_reader(plan, [item for item in order if not all_step(plan, plan.syncs[item[0]])]).items()):
        for place in range(ahead, len(own)):
            for earlier in reversed(own[: place - ahead + 1]):
                found[own[place]].append((device, earlier))
                if is_over(earlier, own[place]):
                    break
    return found


def _by_reader(plan: Plan, order: Sequence[Item]) -> dict[int, list[Item]]:
    """Device -> the gathers that it takes part in as a reader, in their order."""
    found: dict[int, list[Item]] = {}
    for item in order:
        for device in plan.syncs[item[0]].readers:
            found.setdefault(device, []).append(item)
    return found


def _by_device(plan: Plan, tiles: Iterable[int]) -> dict[int, list[int]]:
    """Device -> those of the tiles that are on it."""
    found: dict[int, list[int]] = {}
    for tile in tiles:
        found.setdefault(plan.tiles[tile].device, []).append(tile)
    return found
