"""A device's part of a plan: what a rank needs to run its own tiles, and nothing of the others'. Pure data.

A part is a plan by itself. It has the device's tiles, fetches and messages, the exchanges and sums in which it takes part, and of other
devices' things what these name: of a fetch the pieces that this device gives, of an exchange the parts that it gives or takes (and the
first one, which names it), the holdings from which these come and their tiles. All is numbered anew, in the same order. Shards and
synchronizations keep their numbers, as all ranks and checkpoints name them: but for their uses they are the same in all parts. So a part is
cut without them, and they (``PlanParts.shards``, ``syncs``) and the device's own uses (``OwnUses``) are put in behind.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from soap.plan.plan import Fetch, Part, Piece, Plan, Shard, ShardSync, remote_parts

Uses = dict[int, list[tuple[int, int]]]
"""Group of shards, or region of a synchronization -> its uses."""


@dataclass(frozen=True)
class Places:
    """Positions in a plan -> positions in a device's part of it, both ascending. What is not in the part is missing."""

    tiles: Mapping[int, int]
    holdings: Mapping[int, int]
    fetches: Mapping[int, int]
    messages: Mapping[int, int]
    exchanges: Mapping[int, int]
    reductions: Mapping[int, int]


@dataclass(frozen=True)
class OwnUses:
    """How a device's tiles use shards, and regions of synchronizations, in the numbers of its part. ``shards``: by group of shards with
    equal uses (``PlanParts.used_alike``). ``regions``: by position of the synchronization, then of the region in it."""

    shards: Uses
    regions: Mapping[int, Uses]

    def put_into(self, part: Plan, used_alike: Sequence[Sequence[int]]) -> Plan:
        """The part, whose shards and synchronizations have no uses, with these. In time in proportion to the shards and regions that the
        device uses, but for two copies."""
        shards, syncs = [*part.shards], [*part.syncs]
        for place, found in self.shards.items():
            uses = tuple(found)
            for number in used_alike[place]:
                shards[number] = replace(shards[number], uses=uses)
        for position, own in self.regions.items():
            regions = [*syncs[position].regions]
            for place, found in own.items():
                regions[place] = replace(regions[place], uses=tuple(found))
            syncs[position] = replace(syncs[position], regions=tuple(regions))
        return replace(part, shards=tuple(shards), syncs=tuple(syncs))


class PlanParts:
    """Cuts devices' parts out of a plan. To make it takes time in proportion to the plan, then each part in proportion to the part.

    ``shards``, ``syncs``: the plan's without uses, for all parts. ``used_alike``: groups of shards that the same tiles use, such as the
    parts of a region of which each reader owns one."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tiles = by_device((tile.device,) for tile in plan.tiles)
        self._holdings = by_device((held.device,) for held in plan.holdings)
        self._fetches = by_device((fetch.device,) for fetch in plan.fetches)
        self._messages = by_device((message.source, message.target) for message in plan.messages)
        self._exchanges = by_device(exchange.devices for exchange in plan.exchanges)
        self._reductions = by_device(reduction.devices for reduction in plan.reductions)
        self._moved = [_parts_by_device(plan, exchange.parts) for exchange in plan.exchanges]
        self._summed = [by_device((plan.tiles[tile].device,) for tile in reduction.tiles) for reduction in plan.reductions]
        self._first_region = [0]
        for sync in plan.syncs:
            self._first_region.append(self._first_region[-1] + len(sync.regions))
        alike: dict[int, list[int]] = {}
        for number, shard in enumerate(plan.shards):
            alike.setdefault(id(shard.uses), []).append(number)
        self.used_alike = tuple(map(tuple, alike.values()))
        self._shard_uses = self._uses_by_device(plan.shards[numbers[0]].uses for numbers in self.used_alike)
        self._region_uses = self._uses_by_device(region.uses for sync in plan.syncs for region in sync.regions)
        self.shards, self.syncs = _without_uses(plan.shards, plan.syncs)

    def of(self, device: int, further: Collection[int] = ()) -> tuple[Plan, Places, OwnUses]:
        """The part of a device, without shards, synchronizations and order; where everything is in it; and the uses to put in. Of a number
        that is no device, an empty part. ``further``: holdings that it names, too."""
        plan = self._plan
        exchanges = {number: self._exchange_parts(number, device) for number in self._exchanges.get(device, ())}
        messages, own = self._messages.get(device, []), self._fetches.get(device, [])
        given: dict[int, set[int]] = {}  # fetches of other devices -> their pieces that are in the part
        for parts in (*(plan.messages[number].parts for number in messages), *exchanges.values()):
            for fetch, place in parts:
                if plan.fetches[fetch].device != device:
                    given.setdefault(fetch, set()).add(place)
        pieces = {fetch: sorted(places) for fetch, places in given.items()} | {i: [*range(len(plan.fetches[i].pieces))] for i in own}
        read = {plan.fetches[fetch].pieces[place].holding for fetch, places in pieces.items() for place in places}
        holdings = {*self._holdings.get(device, ()), *read, *further}
        sums = {number for i in holdings if (number := plan.holdings[i].reduction) is not None}
        places = Places(
            _numbered({*self._tiles.get(device, ()), *(plan.holdings[i].tile for i in holdings)}),
            _numbered(holdings),
            _numbered(pieces),
            _numbered(messages),
            _numbered(exchanges),
            _numbered({*self._reductions.get(device, ()), *sums}),
        )
        return self._cut(device, places, pieces, exchanges), places, self._own_uses(device, places)

    def _cut(self, device: int, places: Places, pieces: Mapping[int, Sequence[int]], exchanges: Mapping[int, Sequence[Part]]) -> Plan:
        plan, tiles = self._plan, [*places.tiles]

        def moved(parts: Sequence[Part]) -> tuple[Part, ...]:
            return tuple([(places.fetches[fetch], bisect_left(pieces[fetch], place)) for fetch, place in parts])

        def fetched(number: int) -> Fetch:
            fetch = plan.fetches[number]
            own = [fetch.pieces[place] for place in pieces[number]]
            readers = fetch.consumers if fetch.device == device else ()
            return replace(
                fetch,
                pieces=tuple([Piece(piece.box, places.holdings[piece.holding]) for piece in own]),
                consumers=tuple([(places.tiles[tile], place) for tile, place in readers]),
            )

        held = [plan.holdings[i] for i in places.holdings]
        sums = [None if own.reduction is None else places.reductions[own.reduction] for own in held]
        messages = [plan.messages[i] for i in places.messages]
        return replace(
            plan,
            tiles=tuple([plan.tiles[i] for i in tiles]),
            first_tile=tuple([bisect_left(tiles, first) for first in plan.first_tile]),
            holdings=tuple([replace(h, tile=places.tiles[h.tile], reduction=s) for h, s in zip(held, sums, strict=True)]),
            fetches=tuple([fetched(i) for i in places.fetches]),
            messages=tuple([replace(own, parts=moved(own.parts)) for own in messages]),
            exchanges=tuple([replace(plan.exchanges[i], parts=moved(exchanges[i])) for i in places.exchanges]),
            reductions=tuple([replace(plan.reductions[i], tiles=self._summed_tiles(i, device, places)) for i in places.reductions]),
            shards=(),
            syncs=(),
            kept=(),
            order=None,
        )

    def _exchange_parts(self, number: int, device: int) -> list[Part]:
        parts = self._plan.exchanges[number].parts
        return [parts[place] for place in sorted({0, *self._moved[number].get(device, ())})]

    def _summed_tiles(self, number: int, device: int, places: Places) -> tuple[int, ...]:
        tiles = self._plan.reductions[number].tiles
        return tuple([places.tiles[tiles[place]] for place in self._summed[number].get(device, ())])

    def _own_uses(self, device: int, places: Places) -> OwnUses:
        shards = {number: _placed(uses, places) for number, uses in self._shard_uses.get(device, {}).items()}
        regions: dict[int, Uses] = {}
        for number, uses in self._region_uses.get(device, {}).items():
            position = bisect_right(self._first_region, number) - 1
            regions.setdefault(position, {})[number - self._first_region[position]] = _placed(uses, places)
        return OwnUses(shards, regions)

    def _uses_by_device(self, uses: Iterable[Sequence[tuple[int, int]]]) -> dict[int, Uses]:
        found: dict[int, Uses] = {}
        for number, own in enumerate(uses):
            for use in own:
                found.setdefault(self._plan.tiles[use[0]].device, {}).setdefault(number, []).append(use)
        return found


def by_device(devices: Iterable[Iterable[int]]) -> dict[int, list[int]]:
    """Device -> positions at which it is named."""
    found: dict[int, list[int]] = {}
    for position, named in enumerate(devices):
        for device in named:
            found.setdefault(device, []).append(position)
    return found


def _parts_by_device(plan: Plan, parts: Sequence[Part]) -> dict[int, list[int]]:
    """Device -> the parts that it gives or takes."""
    return by_device({source, target} for source, target, *_ in remote_parts(plan, parts))


def _without_uses(shards: Sequence[Shard], syncs: Sequence[ShardSync]) -> tuple[tuple[Shard, ...], tuple[ShardSync, ...]]:
    """Both without uses. Equal tuples of devices are one object, so that parts are written in few bytes."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def one(devices: tuple[int, ...]) -> tuple[int, ...]:
        return known.setdefault(devices, devices)

    return (
        tuple([replace(shard, uses=(), devices=one(shard.devices)) for shard in shards]),
        tuple(
            [
                replace(
                    sync,
                    regions=tuple([replace(region, uses=()) for region in sync.regions]),
                    readers=one(sync.readers),
                    leaders=one(sync.leaders),
                )
                for sync in syncs
            ]
        ),
    )


def _numbered(positions: Iterable[int]) -> dict[int, int]:
    return {position: place for place, position in enumerate(sorted(positions))}


def _placed(uses: Sequence[tuple[int, int]], places: Places) -> list[tuple[int, int]]:
    return [(places.tiles[tile], operand) for tile, operand in uses]
