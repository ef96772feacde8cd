"""The program: what every rank does, in one global order that is the same everywhere. Pure data, no torch.

``compile_program`` turns a plan and an order of its tiles into two lists of actions, forward and backward. Each rank executes its own
part of both lists; an action waits only for actions before it in the list, so that no two ranks can wait for each other in a
cycle, whatever the backend.

*Segments.* Consecutive tiles of a rank form one autograd graph as long as nothing has to be received or summed for them, nor a gradient
received. A segment begins at the first consumer of what arrives: whatever it depends on was therefore computed by segments that start
earlier, and segments can run backward by decreasing start. It ends with what is sent: what follows need not wait for that one's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from soap.errors import RuntimeFailure
from soap.plan.flows import reduced_tensor
from soap.plan.plan import Part, Plan
from soap.plan.syncs.buckets import idle_shards
from soap.runtime.program.actions import Action, ActionKind
from soap.runtime.program.activity import Activity, Carrier, PlanIndex, Tail, ValueKey, count_readers, find_activity, no_tail
from soap.runtime.program.backward_order import backward_turns
from soap.runtime.program.sync_actions import after_backward, after_update, before_forward, groups
from soap.simulator.memory.transit import answered_from_afar
from soap.simulator.tasks import ExecutionOrder


@dataclass(frozen=True, slots=True)
class Segment:
    """Tiles of one device that form one autograd graph; ``start`` is the place of the first one in the global order."""

    device: int
    start: int
    tiles: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A plan together with the order of everything. Positions in the tuples are the subjects of actions."""

    plan: Plan
    index: PlanIndex
    activity: Activity
    order: ExecutionOrder
    segments: tuple[Segment, ...]
    segment_of: dict[int, int]
    """Tile -> its segment."""
    kept: frozenset[int]
    """Holdings that a tile of another segment or device reads, and the loss: their values outlive their segment."""
    answered: frozenset[int]
    """Holdings to which a gradient comes from another segment or device."""
    idle_shards: tuple[int, ...]
    """Shards whose gradient is zero."""
    losses: dict[int, int]
    """Device -> the holding in which it has the loss, if it has it: that of replica 0."""
    seeds: Mapping[str, float]
    """Tensor -> the loss's gradient by it, where the backward pass begins."""
    number_sums: tuple[tuple[int, ...], ...]
    """Reductions that are summed together, as the forward pass ends."""
    known: bool
    """Whether every rank knows the loss from the first of ``number_sums``, by ``seeds``. Then the tail is not run."""
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    after_update: tuple[Action, ...]
    """Behind the optimizer's update, and whenever values were loaded."""

    @cached_property
    def looking_up(self) -> frozenset[int]:
        """Tiles that read rows of sparse parameters."""
        return frozenset(tile for sync in self.plan.syncs if sync.contract.by_rows for tile, _ in sync.uses)

    def readers(self, rank: int) -> dict[ValueKey, int]:
        """How often the forward pass of a rank reads each value that it keeps, in the sense of ``count_readers``; the loss once more."""
        counts = count_readers(self.plan, self.index, rank)
        if rank in self.losses:
            counts["holding", self.losses[rank]] = counts.get(("holding", self.losses[rank]), 0) + 1
        return counts

    def device_groups(self) -> list[tuple[int, ...]]:
        """Distinct sets of devices that sum or exchange something together, in one order for all ranks."""
        sets = {r.devices for r in self.plan.reductions} | {s.devices for s in self.plan.shards} | {e.devices for e in self.plan.exchanges}
        return sorted(devices for devices in sets | groups(self.plan) if len(devices) > 1)


def compile_program(
    plan: Plan,
    order: ExecutionOrder | Sequence[int] | None = None,
    *,
    single_tiles: bool = False,
    tail: Tail | None = None,
) -> Program:
    """The program of a plan. ``order``: all tiles, topologically; the plan's own order if None. Backward they go the other way round if it
    does not say how.

    ``single_tiles`` makes every tile a segment of its own, so that each task can be timed.
    ``tail``: what may run when the backward pass is over; left where it is if nothing has to be summed or sent for it.
    """
    if not isinstance(order, ExecutionOrder):
        order = ExecutionOrder(tuple(range(len(plan.tiles)) if order is None else order))
    forth, back = order.forward, order.backward
    index = PlanIndex(plan)
    _check_order(plan, index, forth)
    if tail is None or plan.device_count == 1 or _mixes(plan, tail):
        tail = no_tail(plan.graph)
    if _stays_at_home(plan, tail):  # then the model's own order: it completes gradients, and lets their sums begin, the soonest
        forth, back = tuple(range(len(plan.tiles))), ()
    forth = _sources_late(plan, index, forth)
    forth = tuple(sorted(forth, key=lambda tile: plan.tiles[tile].operator in tail.operators))
    places = _places(forth)
    activity = find_activity(plan, index, tail.seeds)
    segments = _cut(plan, index, forth, single_tiles, tail.operators, answered_from_afar(plan, activity.fetches, activity.reductions))
    segment_of = {tile: i for i, segment in enumerate(segments) for tile in segment.tiles}
    turns = backward_turns(plan, index, activity, segment_of, [segment.start for segment in segments], back)
    made = [(i, h) for i, h in enumerate(plan.holdings) if h.tensor == plan.graph.loss and plan.tiles[h.tile].replica == 0]
    losses = {held.device: i for i, held in reversed(made)}
    forward, number_sums, closing = _set_apart(plan, tail, _forward(plan, places))
    backward = _backward(plan, index, activity, segments, segment_of, turns, places)
    known = _is_known(plan, tail, number_sums)
    told = Action(ActionKind.LOSS, min(losses.values()), None)  # last of all: no rank needs it before
    return Program(
        plan,
        index,
        activity,
        ExecutionOrder(forth, back),
        segments,
        segment_of,
        frozenset(_read_elsewhere(plan, segment_of, None)) | {i for i, held in enumerate(plan.holdings) if held.tensor == plan.graph.loss},
        frozenset(_read_elsewhere(plan, segment_of, activity)),
        idle_shards(plan),
        losses,
        tail.seeds,
        number_sums,
        known,
        (*before_forward(plan), *forward),
        (*backward, *(() if known else closing), told),
        after_update(plan),
    )


def _places(order: Sequence[int]) -> list[int]:
    """Tile -> place in the order."""
    places = [0] * len(order)
    for place, tile in enumerate(order):
        places[tile] = place
    return places


def _sources_late(plan: Plan, index: PlanIndex, order: Sequence[int]) -> tuple[int, ...]:
    """The order, but tiles that wait for no other, such as look-ups, come right before the first that reads them, if all that do are on
    their device. The backward pass goes the other way round: their gradients, which may have a long way to go, are there soon."""
    places = _places(order)
    readers: dict[int, list[int]] = {}
    tied = {tile for tile, _ in index.fetch_of}
    for fetch in plan.fetches:
        for held in (plan.holdings[piece.holding] for piece in fetch.pieces):
            readers.setdefault(held.tile, []).extend(places[tile] for tile, _ in fetch.consumers)
            if held.device != fetch.device or held.reduction is not None:
                tied.update((held.tile,) if held.reduction is None else plan.reductions[held.reduction].tiles)
    first = {tile: min(own) for tile, own in readers.items() if tile not in tied}
    return tuple(sorted(order, key=lambda tile: (first.get(tile, places[tile]), tile not in first, places[tile])))


def _check_order(plan: Plan, index: PlanIndex, order: Sequence[int]) -> None:
    """Raise RuntimeFailure if it is no topological order of all tiles."""
    if sorted(order) != list(range(len(plan.tiles))):
        raise RuntimeFailure(f"order of {len(order)} tiles: expected each of the plan's {len(plan.tiles)} tiles once; compute it anew")
    places = _places(order)
    ready = [max(_ready(plan, piece.holding, places) for piece in fetch.pieces) for fetch in plan.fetches]
    for exchange in plan.exchanges:  # all of it is there at once
        latest = max(_part_ready(plan, part, places) for part in exchange.parts)
        for fetch, _ in exchange.parts:
            ready[fetch] = max(ready[fetch], latest)
    for (tile, _), fetch in index.fetch_of.items():
        if ready[fetch] >= places[tile]:
            name = plan.operator(plan.tiles[tile]).name
            raise RuntimeFailure(f"order runs tile {plan.tiles[tile].index} of {name!r} before its input; expected a topological order")


def _ready(plan: Plan, holding: int, places: Sequence[int]) -> int:
    """Place of the tile after which a holding can exist."""
    held = plan.holdings[holding]
    tiles = (held.tile,) if held.reduction is None else plan.reductions[held.reduction].tiles
    return max(places[tile] for tile in tiles)


def _part_ready(plan: Plan, part: Part, places: Sequence[int]) -> int:
    return _ready(plan, plan.fetches[part[0]].pieces[part[1]].holding, places)


def _cut(
    plan: Plan, index: PlanIndex, order: Sequence[int], single_tiles: bool, tail: Set[int], answered: Set[int]
) -> tuple[Segment, ...]:
    """Cut each device's tiles into segments; those of the ``tail`` come last, in segments of their own. Tiles that are ``answered`` from
    elsewhere are the last of theirs."""
    started: set[int] = set()
    segments: list[tuple[int, int, list[int]]] = []
    current: dict[int, list[int]] = {}
    for place, tile in enumerate(order):
        device = plan.tiles[tile].device
        enters = plan.tiles[tile].operator in tail and device in current and plan.tiles[current[device][-1]].operator not in tail
        if _begins(plan, index, tile, started) or single_tiles or enters or device not in current:
            current[device] = []
            segments.append((device, place, current[device]))
        current[device].append(tile)
        if tile in answered:
            del current[device]
    return tuple(Segment(device, place, tuple(tiles)) for device, place, tiles in segments)


def _read_elsewhere(plan: Plan, segment_of: Mapping[int, int], activity: Activity | None) -> Iterator[int]:
    """Holdings with a consumer outside their tile's segment; with an activity, only where a gradient comes back from one."""
    for number, fetch in enumerate(plan.fetches):
        if activity is not None and number not in activity.fetches:
            continue
        segments = {segment_of[tile] for tile, _ in fetch.consumers if activity is None or tile in activity.tiles}
        for piece in fetch.pieces:
            if segments - {segment_of[plan.holdings[piece.holding].tile]}:
                yield piece.holding


def _begins(plan: Plan, index: PlanIndex, tile: int, started: set[int]) -> bool:
    """Whether the tile is the first to need something that is received or summed; notes all its fetches as started."""
    begins = False
    for k in range(len(plan.tiles[tile].inputs)):
        number = index.fetch_of.get((tile, k))
        if number is None or number in started:
            continue
        started.add(number)
        holdings = [plan.holdings[piece.holding] for piece in plan.fetches[number].pieces]
        begins |= any(h.device != plan.tiles[tile].device or h.reduction is not None for h in holdings)
    return begins


def _forward(plan: Plan, places: Sequence[int]) -> Iterator[Action]:
    """Each tile, then what it sends, then the sums that it completes and what is sent of them."""
    entries: list[tuple[tuple[int, int, int], Action]] = []
    for tile, place in enumerate(places):
        entries.append(((place, 0, 0), Action(ActionKind.TILE, tile, (plan.tiles[tile].device,))))
    for number, message in enumerate(plan.messages):
        action = Action(ActionKind.TRANSFER, number, (message.source, message.target))
        entries.append(((_part_ready(plan, message.parts[0], places), 1 + _is_sum(plan, message.parts), number), action))
    for number, exchange in enumerate(plan.exchanges):
        place = max(_part_ready(plan, part, places) for part in exchange.parts)
        action = Action(ActionKind.EXCHANGE, number, exchange.devices)
        entries.append(((place, 2 + _is_sum(plan, exchange.parts), number), action))
    for number, reduction in enumerate(plan.reductions):
        place = max(places[tile] for tile in reduction.tiles)
        entries.append(((place, 3, number), Action(ActionKind.REDUCE, number, reduction.devices)))
    yield from (action for _, action in sorted(entries, key=lambda entry: entry[0]))


def _closing(plan: Plan, tail: Tail) -> set[str]:
    """Tensors that are summed and sent when the backward pass is over."""
    made = {out.tensor for position in tail.operators for out in plan.graph.operators[position].outputs}
    return made | (set(tail.seeds) if tail.operators else set())


def _mixes(plan: Plan, tail: Tail) -> bool:
    """Whether a message has something of the tail and something else."""
    closing = _closing(plan, tail)
    return any(len({plan.fetches[fetch].tensor in closing for fetch, _ in message.parts}) > 1 for message in plan.messages)


def _stays_at_home(plan: Plan, tail: Tail) -> bool:
    """Whether nothing but the loss and gradients goes from device to device, so that no order of the tiles makes anybody wait."""
    ends = _closing(plan, tail) | {plan.graph.loss}
    sums = {plan.graph.operators[r.operator].outputs[r.output].tensor for r in plan.reductions if len(r.devices) > 1}
    parts = [part for message in plan.messages for part in message.parts] + [part for exchange in plan.exchanges for part in exchange.parts]
    moved = {plan.fetches[fetch].tensor for fetch, _ in parts}
    return (sums | moved) <= ends


def _set_apart(plan: Plan, tail: Tail, actions: Iterable[Action]) -> tuple[list[Action], tuple[tuple[int, ...], ...], list[Action]]:
    """The actions without those of the tail, but with the sums that it reads at their end: nobody waits for these yet. Reductions that are
    summed together. The tail's actions."""
    closing = _closing(plan, tail)
    before: list[Action] = []
    behind: list[Action] = []
    sums: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for action in actions:
        if action.kind is ActionKind.REDUCE:
            reduction = plan.reductions[action.subject]
            tensor = reduced_tensor(plan, reduction)
            if tensor in closing:
                sums.setdefault((reduction.devices, plan.graph.tensors[tensor].dtype), []).append(action.subject)
                continue
            before.append(action)
            continue
        if action.kind is ActionKind.TILE:
            apart = plan.tiles[action.subject].operator in tail.operators
        else:
            carrier = plan.messages[action.subject] if action.kind is ActionKind.TRANSFER else plan.exchanges[action.subject]
            apart = plan.fetches[carrier.parts[0][0]].tensor in closing
        (behind if apart else before).append(action)
    together = [Action(ActionKind.REDUCE_NUMBERS, number, devices) for number, (devices, _) in enumerate(sums)]
    return [*before, *together], tuple(map(tuple, sums.values())), behind


def _is_known(plan: Plan, tail: Tail, number_sums: Sequence[Sequence[int]]) -> bool:
    """Whether one sum over all devices has each number that enters the tail, once."""
    if not tail.operators or len(number_sums) != 1:
        return False
    found = [reduced_tensor(plan, plan.reductions[number]) for number in number_sums[0]]
    everywhere = len(plan.reductions[number_sums[0][0]].devices) == plan.device_count
    return everywhere and len(found) == len(tail.seeds) and set(found) == set(tail.seeds)


def _is_sum(plan: Plan, parts: Sequence[Part]) -> int:
    """How many stages later parts of sums are there than those of tiles."""
    fetch, piece = parts[0]
    return 0 if plan.holdings[plan.fetches[fetch].pieces[piece].holding].reduction is None else 3


def _backward(
    plan: Plan,
    index: PlanIndex,
    activity: Activity,
    segments: Sequence[Segment],
    segment_of: Mapping[int, int],
    turns: Sequence[int],
    places: Sequence[int],
) -> Iterator[Action]:
    """Segments in their turns; behind each the gradients that it completes: sent back, summed over a group, synchronized, the soonest
    complete ones first."""
    entries: list[tuple[tuple[int, ...], Action]] = []
    complete = {
        number: max(turns[segment_of[tile]] for tile, _ in plan.fetches[number].consumers if tile in activity.tiles)
        for number in activity.fetches
    }
    for number, segment in enumerate(segments):
        if any(tile in activity.tiles for tile in segment.tiles):
            entries.append(((turns[number], 0, 0), Action(ActionKind.SEGMENT, number, (segment.device,))))
    returned = _returned(index, complete)
    for (kind, number), turn in returned.items():
        if kind == "message":
            message = plan.messages[number]
            entries.append(((turn, 1, number), Action(ActionKind.RETURN, number, (message.source, message.target))))
        else:
            entries.append(((turn, 2, number), Action(ActionKind.RETURN_EXCHANGE, number, plan.exchanges[number].devices)))
    for number in activity.reductions:
        devices = plan.reductions[number].devices
        holdings = [index.reduced[number, device] for device in devices if (number, device) in index.reduced]
        fetches = [fetch for holding in holdings for fetch in index.fetches_from[holding] if fetch in complete]
        complete_by = [complete[fetch] for fetch in fetches]
        complete_by += [returned[key] for holding in holdings for key in index.carriers_from.get(holding, ()) if key in returned]
        entries.append(((max(complete_by), 3, number), Action(ActionKind.REDUCE_GRADIENT, number, devices)))
    entries += after_backward(plan, activity.tiles, segment_of, turns, places)
    yield from (action for _, action in sorted(entries, key=lambda entry: entry[0]))


def _returned(index: PlanIndex, complete: Mapping[int, int]) -> dict[Carrier, int]:
    """Turn of the segment with which the last gradient of a message or exchange is complete; those without gradients are left out."""
    found: dict[Carrier, int] = {}
    for key, carrier in index.moves.items():
        turns = [complete[fetch] for fetch, _ in carrier.parts if fetch in complete]
        if turns:
            found[key] = max(turns)
    return found
