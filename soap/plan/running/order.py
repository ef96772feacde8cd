"""In which order ranks run passes, as data: tiles forward, segments of them, and their turns backward. Which one: ``memory.rank_order``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from soap.errors import RuntimeFailure
from soap.plan.division import is_divided
from soap.plan.plan import Fetch, Part, Plan
from soap.plan.running.activity import Activity, PlanIndex


@dataclass(frozen=True, slots=True)
class Segment:
    """Tiles of one device that form one autograd graph; ``start`` is the place of the first one in the global order."""

    device: int
    start: int
    tiles: tuple[int, ...]


def read_elsewhere(plan: Plan, segment_of: Mapping[int, int]) -> Iterator[int]:
    """Holdings that a tile outside of their own segment reads."""
    for fetch in plan.fetches:
        yield from _from_outside(plan, segment_of, fetch, {segment_of[tile] for tile, _ in fetch.consumers})


def answered_elsewhere(plan: Plan, segment_of: Mapping[int, int], activity: Activity) -> Iterator[int]:
    """Holdings that get a gradient from outside of their own segment."""
    for number in activity.fetches:
        fetch = plan.fetches[number]
        yield from _from_outside(plan, segment_of, fetch, {segment_of[tile] for tile, _ in fetch.consumers if tile in activity.tiles})


def _from_outside(plan: Plan, segment_of: Mapping[int, int], fetch: Fetch, readers: Set[int]) -> Iterator[int]:
    """Holdings of a fetch that any of these segments reads but did not make."""
    for piece in fetch.pieces:
        if readers - {segment_of[plan.holdings[piece.holding].tile]}:
            yield piece.holding


@dataclass(frozen=True)
class ExecutionOrder:
    """Tiles (positions in ``Plan.tiles``) in the order in which their passes begin. ``forward``: all tiles. ``backward``: the tiles that
    have a backward pass; if empty, the forward order is reversed."""

    forward: tuple[int, ...]
    backward: tuple[int, ...] = ()


def places_of(order: Sequence[int]) -> list[int]:
    """Tile -> place in the order."""
    places = [0] * len(order)
    for place, tile in enumerate(order):
        places[tile] = place
    return places


def part_ready(plan: Plan, part: Part, places: Sequence[int]) -> int:
    """Place of the last tile that must run before a part can be sent."""
    return _ready(plan, plan.fetches[part[0]].pieces[part[1]].holding, places)


def _ready(plan: Plan, holding: int, places: Sequence[int]) -> int:
    """Place of the last tile that must run before a holding exists."""
    held = plan.holdings[holding]
    tiles = (held.tile,) if held.reduction is None else plan.reductions[held.reduction].tiles
    return max(places[tile] for tile in tiles)


def require_topological(plan: Plan, index: PlanIndex, order: Sequence[int]) -> None:
    """Raise RuntimeFailure if it is no topological order of all tiles."""
    if sorted(order) != list(range(len(plan.tiles))):
        raise RuntimeFailure(f"order of {len(order)} tiles: expected each of the plan's {len(plan.tiles)} tiles once; compute it anew")
    places = places_of(order)
    ready = [max(_ready(plan, piece.holding, places) for piece in fetch.pieces) for fetch in plan.fetches]
    for exchange in plan.exchanges:  # all its parts arrive at once
        latest = max(part_ready(plan, part, places) for part in exchange.parts)
        for fetch, _ in exchange.parts:
            ready[fetch] = max(ready[fetch], latest)
    for (tile, _), fetch in index.fetch_of.items():
        if ready[fetch] >= places[tile]:
            name = plan.operator(plan.tiles[tile]).name
            raise RuntimeFailure(f"order runs tile {plan.tiles[tile].index} of {name!r} before its input; expected a topological order")


@dataclass(frozen=True)
class Turns:
    """When segments run backward. ``backward``: segment -> its turn, from 0 on. ``weights``: segment whose backward pass is in two -> the
    turn of its weight gradients. ``actions``: turn -> the place in ``Plan.order`` of the action to which it belongs."""

    backward: Sequence[int]
    weights: Mapping[int, int] = field(default_factory=dict)
    actions: Sequence[int] = ()

    def last(self, segment: int) -> int:
        """The turn after which the gradients of a segment's parameters are there."""
        return self.weights.get(segment, self.backward[segment])


def by_action(plan: Plan, segments: Sequence[Segment], turns: Sequence[int]) -> Turns:
    """The turns, if segments follow the actions of ``Plan.order``, and those of one action the turns that are given."""
    first = [plan.tiles[segment.tiles[0]] for segment in segments]
    passes = [(plan.rank(tile, "B"), turns[number], False, number) for number, tile in enumerate(first)]
    divided = (number for number, segment in enumerate(segments) if is_divided(plan, segment.tiles[0]))
    passes += [(plan.rank(first[number], "W"), turns[number], True, number) for number in divided]
    backward, weights = [0] * len(segments), dict[int, int]()
    for turn, (_, _, second, number) in enumerate(sorted(passes)):
        if second:
            weights[number] = turn
        else:
            backward[number] = turn
    return Turns(backward, weights, [action for action, *_ in sorted(passes)])
