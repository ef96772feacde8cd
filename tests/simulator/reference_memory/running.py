"""In which order ranks run all passes of a plan, rule by rule over the plan's objects: the oracle of ``simulator.memory.rank_order``.

Each rule takes a topological order of all tiles and returns one. ``forward_order`` applies them one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from soap.plan.division import is_divided
from soap.plan.plan import Plan
from soap.plan.recomputation import keeps_outputs, second_links
from soap.plan.running.activity import Activity, PlanIndex
from soap.plan.running.epilogue import LossEpilogue, closing_tensors, epilogue_of, kept_epilogue, no_epilogue
from soap.plan.running.order import ExecutionOrder, Segment, Turns, places_of, require_topological
from soap.plan.running.order import by_action as turns_by_action


@dataclass(frozen=True)
class Recomputation:
    """``tiles``: those that run twice. ``links``: ``second_links``. ``run``: tile -> the first tile of its run: linked tiles are of one
    run, but for those that keep their outputs (``light``), each of which is one."""

    tiles: frozenset[int] = frozenset()
    links: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    run: Mapping[int, int] = field(default_factory=dict)
    light: frozenset[int] = frozenset()


def find_recomputation(plan: Plan, active: Collection[int]) -> Recomputation:
    """What runs twice. ``active``: the tiles that have a backward pass."""
    tiles = frozenset(tile for tile in active if plan.tiles[tile].operator in plan.recomputed_operators)
    links, light = second_links(plan, active), frozenset(tile for tile in tiles if keeps_outputs(plan, tile))
    return Recomputation(tiles, links, _runs(tiles, links, light), light)


def _runs(tiles: Collection[int], links: Mapping[int, tuple[int, ...]], light: Collection[int]) -> dict[int, int]:
    """Tile -> the lowest tile of its run."""
    first = {tile: tile for tile in tiles}

    def find(tile: int) -> int:
        while first[tile] != tile:
            first[tile] = first[first[tile]]
            tile = first[tile]
        return tile

    for tile, makers in links.items():
        for maker in makers if tile not in light else ():
            one, other = sorted((find(tile), find(maker)))
            first[other] = one
    return {tile: find(tile) for tile in sorted(tiles)}


@dataclass(frozen=True)
class RunOrder:
    """``order``: tiles forward, as ranks run them, and backward, as they were given. ``segment_of``: tile -> its segment. ``turns``: when
    segments run backward. ``recomputation``: what runs forward twice."""

    plan: Plan
    index: PlanIndex
    epilogue: LossEpilogue
    order: ExecutionOrder
    activity: Activity
    segments: tuple[Segment, ...]
    segment_of: Mapping[int, int]
    turns: Turns
    recomputation: Recomputation

    @cached_property
    def second_turns(self) -> Sequence[tuple[int, int]]:
        """(turn, segment that runs forward a second time right before it), in their order."""
        return sorted(self._second_turns(), key=lambda own: (own[0], self.segments[own[1]].start))

    def _second_turns(self) -> Iterator[tuple[int, int]]:
        """A segment's second run comes right before the first backward pass that needs it, its own or that of a segment that reads what it
        makes again; and after the second runs that it reads from. So as little as possible is there at a time."""
        turns, segment_of = self.turns.backward, self.segment_of
        own = sorted({segment_of[tile] for tile in self.recomputation.tiles}, key=turns.__getitem__)
        makers: dict[int, set[int]] = {segment: set() for segment in own}
        for tile, linked in self.recomputation.links.items():
            makers[segment_of[tile]].update(segment_of[maker] for maker in linked)
        for tile, linked in self._communicated_again().items():
            makers.setdefault(segment_of[tile], set()).update(segment_of[maker] for maker in linked)
        twice = {*own}
        done: set[int] = set()
        for segment in sorted(makers, key=turns.__getitem__):
            needed, todo = set[int](), [segment]
            while todo:
                number = todo.pop()
                if number not in needed | done:
                    needed.add(number)
                    todo.extend(makers[number])
            yield from ((turns[segment], number) for number in needed if number in twice)
            done |= needed

    def _communicated_again(self) -> dict[int, list[int]]:
        """Tile with a backward pass -> the tiles whose second outputs it reads once these have been gathered or summed again."""
        plan, found = self.plan, dict[int, list[int]]()
        for fetch in plan.fetches:
            held = [plan.holdings[piece.holding] for piece in fetch.pieces]
            makers: list[int] = []
            for own in held:
                operator = plan.tiles[own.tile].operator
                if own.reduction is not None and operator in plan.summed_again:
                    makers += plan.reductions[own.reduction].tiles
                elif operator in plan.gathered_again and any(other.device != fetch.device for other in held):
                    again = own.tile in self.recomputation.tiles and own.tile not in self.recomputation.light
                    makers += [own.tile] if again else []
            for tile, _ in fetch.consumers if makers else ():
                if tile in self.activity.tiles:
                    found.setdefault(tile, []).extend(makers)
        return found


def run_order(plan: Plan, order: ExecutionOrder, *, single_tiles: bool = False) -> RunOrder:
    """The order in which ranks run a plan's passes. RuntimeFailure if ``order.forward`` is no topological order of all tiles.

    ``order``: as it was simulated; if it says nothing of the backward pass, that runs in reverse. ``single_tiles``: make every tile a
    segment of its own, so that each task can be timed: the tasks of a simulation, where without micro-batches the loss's epilogue has both
    passes.
    """
    apart = not single_tiles or plan.order is not None
    index, epilogue = PlanIndex(plan), usable_epilogue(plan, epilogue_of(plan.graph) if apart else no_epilogue(plan.graph))
    order = forward_order(plan, index, order, epilogue)
    activity = find_activity(plan, index, epilogue.seeds)
    answered = answered_from_afar(plan, activity.fetches, activity.reductions)
    again = find_recomputation(plan, activity.tiles)
    segments = cut_segments(
        plan, index, order.forward, single_tiles=single_tiles, epilogue=epilogue.operators, answered=answered, run=again.run
    )
    segment_of = {tile: i for i, segment in enumerate(segments) for tile in segment.tiles}
    possible = backward_turns(plan, index, activity, segment_of, [segment.start for segment in segments], order.backward)
    turns = turns_by_action(plan, segments, possible)
    return RunOrder(plan, index, epilogue, order, activity, segments, segment_of, turns, again)


def usable_epilogue(plan: Plan, epilogue: LossEpilogue) -> LossEpilogue:
    """The epilogue, or an empty one if it stays where it is: on a single device, which waits for nobody, or if a message mixes its tensors
    with others. With micro-batches the backward pass begins at the loss's terms even so."""
    closing = closing_tensors(plan, epilogue)
    mixes = any(len({plan.fetches[fetch].tensor in closing for fetch, _ in message.parts}) > 1 for message in plan.messages)
    return kept_epilogue(plan, epilogue, mixes=mixes)


def forward_order(plan: Plan, index: PlanIndex, order: ExecutionOrder, epilogue: LossEpilogue) -> ExecutionOrder:
    """The order in which a program runs tiles. Raises RuntimeFailure if ``order.forward`` is no topological order of all tiles."""
    require_topological(plan, index, order.forward)
    order = model_order_if_nothing_travels(plan, order, epilogue)
    forward = by_action(plan, sources_late(plan, index, order.forward))
    return ExecutionOrder(epilogue_last(plan, forward, epilogue), order.backward)


def model_order_if_nothing_travels(plan: Plan, order: ExecutionOrder, epilogue: LossEpilogue) -> ExecutionOrder:
    """*Invariant*: if only the loss and gradients travel between devices, no order of the tiles makes any device wait. Then tiles run in
    the model's own order, which completes gradients, and starts their sums, the earliest."""
    ends = closing_tensors(plan, epilogue) | {plan.graph.loss}
    sums = {plan.graph.operators[r.operator].outputs[r.output].tensor for r in plan.reductions if len(r.devices) > 1}
    parts = [part for message in plan.messages for part in message.parts] + [part for exchange in plan.exchanges for part in exchange.parts]
    moved = {plan.fetches[fetch].tensor for fetch, _ in parts}
    return ExecutionOrder(tuple(range(len(plan.tiles))), ()) if (sums | moved) <= ends else order


def sources_late(plan: Plan, index: PlanIndex, order: Sequence[int]) -> tuple[int, ...]:
    """*Invariant*: a tile that waits for no other, such as a sparse lookup, comes right before its first reader if all readers are on its
    device. The backward pass runs in reverse: so its gradient, which may have far to travel, is complete early."""
    places = places_of(order)
    readers: dict[int, list[int]] = {}
    tied = {tile for tile, _ in index.fetch_of}
    for fetch in plan.fetches:
        for held in (plan.holdings[piece.holding] for piece in fetch.pieces):
            readers.setdefault(held.tile, []).extend(places[tile] for tile, _ in fetch.consumers)
            if held.device != fetch.device or held.reduction is not None:
                tied.update((held.tile,) if held.reduction is None else plan.reductions[held.reduction].tiles)
    first = {tile: min(own) for tile, own in readers.items() if tile not in tied}
    return tuple(sorted(order, key=lambda tile: (first.get(tile, places[tile]), tile not in first, places[tile])))


def by_action(plan: Plan, order: Sequence[int]) -> tuple[int, ...]:
    """*Invariant*: forward passes follow the actions of ``Plan.order``; those of one action keep their order."""
    return tuple(sorted(order, key=lambda tile: plan.rank(plan.tiles[tile], "F")))


def epilogue_last(plan: Plan, order: Sequence[int], epilogue: LossEpilogue) -> tuple[int, ...]:
    """*Invariant*: tiles of the loss epilogue come after all others. Each of the two groups keeps its order."""
    return tuple(sorted(order, key=lambda tile: plan.tiles[tile].operator in epilogue.operators))


def find_activity(plan: Plan, index: PlanIndex, seeds: Iterable[str]) -> Activity:
    """Follow gradients backward from replica 0 of the tensors ``seeds``: the loss, or the numbers that enter the loss epilogue."""
    graph, found = plan.graph, Activity()
    first = {graph.producers[name][0] for name in seeds if name in graph.producers and graph.tensors[name].requires_grad}
    found.seeds = {i for i, tile in enumerate(plan.tiles) if tile.operator in first and tile.replica == 0}
    consumed: list[set[int]] = [set() for _ in plan.tiles]
    for number, fetch in enumerate(plan.fetches):
        for tile, _ in fetch.consumers:
            consumed[tile].add(number)
    for tile in range(len(plan.tiles) - 1, -1, -1):  # operators are in topological order, and so are their tiles
        if not _reached(tile, plan, index, found):
            continue
        found.tiles.add(tile)
        for number in consumed[tile]:
            if graph.tensors[plan.fetches[number].tensor].requires_grad:
                found.fetches.add(number)
                found.holdings.update(piece.holding for piece in plan.fetches[number].pieces)
    for (reduction, _), holding in index.reduced.items():
        if holding in found.holdings:
            found.reductions.add(reduction)
    return found


def _reached(tile: int, plan: Plan, index: PlanIndex, found: Activity) -> bool:
    if tile in found.seeds or any(holding in found.holdings for _, holding in index.direct.get(tile, ())):
        return True
    for output in range(len(plan.operator(plan.tiles[tile]).outputs)):
        reduction = index.partial.get((tile, output))
        if reduction is not None and any(
            index.reduced.get((reduction, device)) in found.holdings for device in plan.reductions[reduction].devices
        ):
            return True
    return False


def answered_from_afar(plan: Plan, fetches: Iterable[int], reductions: Iterable[int]) -> set[int]:
    """Tiles whose outputs, or partial results, get gradients from other devices. ``fetches``, ``reductions``: those with a gradient."""
    found: set[int] = set()
    for number in fetches:
        fetch = plan.fetches[number]
        holdings = [plan.holdings[piece.holding] for piece in fetch.pieces]
        found.update(held.tile for held in holdings if held.device != fetch.device and held.reduction is None)
    for number in reductions:
        if len(plan.reductions[number].devices) > 1:
            found.update(plan.reductions[number].tiles)
    return found


def cut_segments(
    plan: Plan,
    index: PlanIndex,
    order: Sequence[int],
    *,
    single_tiles: bool,
    epilogue: Set[int],
    answered: Set[int],
    run: Mapping[int, int],
) -> tuple[Segment, ...]:
    """Cut each device's tiles into segments. ``epilogue``: positions of its operators. ``answered``: tiles whose gradient comes from
    elsewhere. ``run``: ``Recomputation.run``. ``single_tiles``: each tile is a segment."""
    started: set[int] = set()
    gathered: dict[int, set[int]] = {}
    for number, sync in enumerate(plan.syncs):
        for tile, _ in sync.uses if sync.contract.gathers_values else ():
            gathered.setdefault(tile, set()).add(number)
    there: list[set[int]] = [set() for _ in range(plan.device_count)]
    segments: list[tuple[int, int, list[int]]] = []
    current: dict[int, list[int]] = {}
    for place, tile in enumerate(order):
        device = plan.tiles[tile].device
        comes = not gathered.get(tile, there[device]) <= there[device]
        there[device] |= gathered.get(tile, set())
        enters = plan.tiles[tile].operator in epilogue and device in current and plan.tiles[current[device][-1]].operator not in epilogue
        enters |= device in current and run.get(current[device][-1]) != run.get(tile)
        enters |= device in current and apart(plan, current[device][-1], tile)
        if _begins(plan, index, tile, started) or comes or single_tiles or enters or device not in current:
            current[device] = []
            segments.append((device, place, current[device]))
        current[device].append(tile)
        if tile in answered:
            del current[device]
    return tuple(Segment(device, place, tuple(tiles)) for device, place, tiles in segments)


def _begins(plan: Plan, index: PlanIndex, tile: int, started: set[int]) -> bool:
    """Whether the tile is the first to need something that is received or summed. Adds all its fetches to ``started``."""
    begins = False
    for k in range(len(plan.tiles[tile].inputs)):
        number = index.fetch_of.get((tile, k))
        if number is None or number in started:
            continue
        started.add(number)
        holdings = [plan.holdings[piece.holding] for piece in plan.fetches[number].pieces]
        begins |= any(h.device != plan.tiles[tile].device or h.reduction is not None for h in holdings)
    return begins


def backward_turns(
    plan: Plan, index: PlanIndex, activity: Activity, segment_of: Mapping[int, int], starts: Sequence[int], order: Sequence[int]
) -> list[int]:
    """Segment -> its turn, from 0 on. ``starts``: segment -> place of its first tile in the forward order. ``order``: tiles by the start of
    their backward passes; empty if unknown."""
    unknown = len(order)
    places = {tile: place for place, tile in enumerate(order)}
    first = [unknown] * len(starts)
    for tile, segment in segment_of.items():
        first[segment] = min(first[segment], places.get(tile, unknown))
    behind: dict[int, set[int]] = {}
    waiting = [0] * (len(starts) + len(index.moves) + len(plan.reductions))
    for before, after in _needs(plan, index, activity, segment_of, len(starts)):
        if before != after and after not in behind.setdefault(before, set()):
            behind[before].add(after)
            waiting[after] += 1

    def entry(node: int) -> tuple[int, int, int]:
        return (first[node], -starts[node], node) if node < len(starts) else (-1, 0, node)

    ready = [entry(node) for node, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    turns, turn = [0] * len(starts), 0
    while ready:
        *_, node = heapq.heappop(ready)
        if node < len(starts):
            turns[node], turn = turn, turn + 1
        for after in behind.get(node, ()):
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, entry(after))
    assert turn == len(starts), "segments wait for each other"  # decreasing start is always a possible order
    return turns


def _needs(
    plan: Plan, index: PlanIndex, activity: Activity, segment_of: Mapping[int, int], segments: int
) -> Iterator[tuple[int, int]]:
    """(node, node that needs its gradient). Nodes are numbered: segments, then messages and exchanges, then reductions."""
    carried = {part: segments + i for i, carrier in enumerate(index.moves.values()) for part in carrier.parts}
    sums = segments + len(index.moves)

    def source(holding: int) -> int:
        held = plan.holdings[holding]
        return segment_of[held.tile] if held.reduction is None else sums + held.reduction

    for number in activity.fetches:
        fetch = plan.fetches[number]
        readers = {segment_of[tile] for tile, _ in fetch.consumers if tile in activity.tiles}
        for place, piece in enumerate(fetch.pieces):
            carrier = carried.get((number, place))
            if carrier is not None:
                yield carrier, source(piece.holding)
            yield from ((reader, source(piece.holding) if carrier is None else carrier) for reader in readers)
    for number in activity.reductions:
        yield from ((sums + number, segment_of[tile]) for tile in plan.reductions[number].tiles)


def apart(plan: Plan, one: int, other: int) -> bool:
    """Whether two tiles share no backward pass: their passes belong to different actions of ``Plan.order``, or one of them is divided, and
    its weight gradients would otherwise have to go through what the other one has computed."""
    if is_divided(plan, one) or is_divided(plan, other):
        return True
    own, others = plan.tiles[one], plan.tiles[other]
    return plan.rank(own, "F") != plan.rank(others, "F") or plan.rank(own, "B") != plan.rank(others, "B")
