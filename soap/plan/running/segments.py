"""Cutting a rank's tiles into segments; each is one autograd graph. Pure data, no torch.

*Invariants*: everything that a segment receives, or that is summed or gathered for it, is complete before its first tile, because it comes
from segments that start earlier. A tile whose gradient comes from elsewhere (*answered*) is the last of its segment, so that no other tile
waits for that gradient. Tiles of the loss epilogue share no segment with others, nor do the recomputed tiles of a run
(``plan.recomputation``), nor passes of different actions of ``Plan.order`` (micro-batches). A tile whose backward pass is in two is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from soap.plan.division import apart
from soap.plan.plan import Fetch, Plan
from soap.plan.running.activity import Activity, PlanIndex


@dataclass(frozen=True, slots=True)
class Segment:
    """Tiles of one device that form one autograd graph; ``start`` is the place of the first one in the global order."""

    device: int
    start: int
    tiles: tuple[int, ...]


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
