"""Memory of parameters over simulated time, as arrays: shards, optimizer states, gradients that stay, and what synchronization holds.

What there is to hold follows from how parameters are kept (``plan.syncs.keeping``), and is worked out once for each that is kept so; when
it is held follows from the times of an iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np

from soap.model.graph import OperatorGraph
from soap.plan.delivery import box_bytes
from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Plan, ShardSync, update_name
from soap.plan.syncs.amounts import COUNT_BYTES
from soap.plan.syncs.keeping import KeptParameter, KeptRegion
from soap.plan.syncs.seam import Hold, method_for
from soap.plan.tiling import part_of
from soap.simulator.memory.array_ledger import ArrayLedger
from soap.simulator.memory.curves import PLACES
from soap.simulator.memory.derived import Derived
from soap.simulator.memory.grouped import Bools, Longs, least, most, total
from soap.simulator.memory.plan_arrays import region_number
from soap.simulator.memory.sizes import batch_bytes
from soap.simulator.memory.spans import NEVER, Span, Spans

FORWARD, BACKWARD, BOTH, FIRST_GRADIENT = range(1, 5)
"""``Holds.used``: by these passes of tiles; or it is held from the first gradient on that one of them makes."""
USED = {"": 0, "forward": FORWARD, "backward": BACKWARD, "both": BOTH}
SENT, RECEIVED, FEW = range(1, 4)
QUEUES = {"": 0, "sent": SENT, "received": RECEIVED, "few": FEW}


class Holds(NamedTuple):
    """By thing that a device holds, as in ``seam.Hold``. ``since``, ``until``: numbers of names; NEVER if there is none, as of ``group``
    (of ``Uses``). ``gradients``: whether it is gradients of regions. ``at_once``: whether ranks post what they send and receive at once,
    even if links are busy."""

    device: Longs
    size: Longs
    kind: Longs
    since: Longs
    until: Longs
    before: Longs
    with_uses: Longs
    gradients: Longs
    copied: Longs
    used: Longs
    throughout: Longs
    queue: Longs
    sum_bytes: Longs
    at_once: Longs
    group: Longs

    def where(self, there: Bools) -> Holds:
        """Those that are ``there``."""
        return Holds(*(column[there] for column in self))


class Uses(NamedTuple):
    """By use of something that is held: which ``group`` of uses it belongs to, the tile, and the region that it reads, of so many bytes."""

    group: Longs
    operator: Longs
    tile: Longs
    region: Longs
    bytes: Longs


class Owned(NamedTuple):
    """By device, bytes that it has of a parameter all the time: ``values``; of ``updated`` ones it has the optimizer's state, in so many
    ``tensors``; ``gradients``; second ``copies`` in the memory of CPUs, by which others are updated."""

    device: Longs
    values: Longs
    updated: Longs
    tensors: Longs
    gradients: Longs
    copies: Longs


class Held(NamedTuple):
    """All that is held of a parameter, or for a synchronization: columns of ``Owned``, ``Holds``, ``Uses``; names, and how many groups."""

    owned: Longs
    holds: Longs
    uses: Longs
    names: tuple[str, ...]
    groups: int


_PARAMETERS: WeakKeyDictionary[KeptParameter, tuple[OperatorGraph, Held]] = WeakKeyDictionary()
_UsesByPart = dict[KeptRegion, dict[int, list[tuple[int, int]]]]
"""By region and micro-batch: (operator, tile) that use it."""
_SYNCS: WeakKeyDictionary[KeptRegion, tuple[OperatorGraph, Sequence[ref[KeptRegion]], dict[int | None, Held]]] = WeakKeyDictionary()
"""By a synchronization's first region: all of its regions, and by micro-batch what is held for it; of the last one that begins with it."""


class HeldParameters:
    """Writes into a ledger what devices hold of parameters and for synchronizations."""

    def __init__(self, plan: Plan, spans: Spans, times: Derived, ledger: ArrayLedger) -> None:
        """``plan``: made by a ``PlanBuilder``, which says how parameters are kept."""
        self._plan, self._spans, self._times, self._ledger = plan, spans, times, ledger
        held = [held_of_parameter(plan, own) for own in plan.kept] + list(held_for_syncs(plan))
        names, groups = [len(own.names) for own in held], [own.groups for own in held]
        self._owned = Owned(*_joined([own.owned for own in held], len(Owned._fields)))
        holds = _joined([own.holds for own in held], len(Holds._fields))
        counts = [own.holds.shape[1] for own in held]
        for column, own in (("since", names), ("until", names), ("group", groups)):
            row = holds[Holds._fields.index(column)]
            row += np.where(row < 0, 0, np.repeat(_begins(own), counts))
        self._holds, self._uses = Holds(*holds), Uses(*_joined([own.uses for own in held], len(Uses._fields)))
        self._group = self._uses.group + np.repeat(_begins(groups), [own.uses.shape[1] for own in held])
        self._tile = self._uses.tile + np.array(plan.first_tile, np.int64)[self._uses.operator]
        self._groups, self._goes_back = sum(groups), times.goes_back
        self._read_names([name for own in held for name in own.names])

    def _read_names(self, names: Sequence[str]) -> None:
        """When the named tasks take place, and whether; the last row stands for no name."""
        spans, never = self._spans, (NEVER, NEVER)
        found = np.array([*(spans.named.get(name, never) for name in names), (0, 0)], np.int64)
        self._named = found[:, 0] != NEVER
        self._start, self._end = np.maximum(0, found).T
        self._ready = np.array([*(spans.ready.get(name, NEVER) for name in names), NEVER], np.int64)

    def always(self, optimizer_states: int) -> None:
        """Parameters, optimizer states, gradients that stay, and what of the batch the device is given."""
        own, end, devices = self._owned, self._spans.end, np.arange(self._plan.device_count)
        self._ledger.hold(devices, 0, end, batch_bytes(self._plan), MemoryKind.BATCH)
        states = optimizer_states * own.updated + (own.tensors * COUNT_BYTES if optimizer_states > 1 else 0)
        held = {MemoryKind.BUFFERS: own.copies, MemoryKind.VALUES: own.values, MemoryKind.STATES: states}
        for kind, sizes in (held | {MemoryKind.GRADIENTS: own.gradients}).items():
            self._ledger.hold(devices, 0, end, total(own.device, sizes, len(devices)), kind)
        alone = self._holds.where(self._holds.used == FIRST_GRADIENT)
        back = self._goes_back[self._tile]
        begun = least(self._group[back], self._times.weighed[self._tile[back]], self._groups, end)
        self._ledger.hold(alone.device, begun[alone.group], end, alone.size, MemoryKind.GRADIENTS)

    def updated(self, optimizer_states: int) -> None:
        """Hold what the optimizer takes for its step, which begins when all gradients are there, those of partitions included. On CPUs the
        optimizers of ``soap-run`` take nothing."""
        sizes = total(self._owned.device, self._owned.updated, self._plan.device_count)
        for device in sorted(self._plan.accelerators) if optimizer_states > 1 else ():
            if sizes[device]:
                span = self._spans.named.get(update_name(device)) or self._updated_apart(device)
                self._ledger.hold(device, *span, sizes[device], MemoryKind.WORKSPACE)

    def _updated_apart(self, device: int) -> Span:
        """When something of a device that has no update of its own is updated last."""
        parts = (part for sync in self._plan.syncs for part in method_for(sync).updates(self._plan, sync))
        own = (part.name for part in parts if part.name and device in self._plan.shards[part.shard].devices)
        return max((self._spans.named.get(name, (0, 0)) for name in own), default=(0, 0))

    def synchronized(self) -> tuple[Longs, Longs, Longs]:
        """Hold what methods of synchronization do (``SyncMethod.holds``): copies of what others own, and buffers. Returns (first tile of a
        segment, region, bytes): what counts at the end of a sum of gradients, but is made only when what was added up has gone."""
        own = self._holds.where((self._holds.used != FIRST_GRADIENT) & (self._named[self._holds.since] | (self._holds.with_uses == 1)))
        begun, done = self._start[own.since], np.where(own.before == 1, self._start[own.until], self._end[own.until])
        done = np.where(own.until < 0, self._spans.end, done)
        at_once = own.at_once == 1  # ranks post what they send and receive at once, even if links are busy
        begun = np.where(at_once & (self._ready[own.since] != NEVER), self._ready[own.since], begun)
        done = np.where(at_once & (own.before == 1) & (self._ready[own.until] != NEVER), self._ready[own.until], done)
        used, gradients = own.used > 0, own.gradients == 1
        moving = ~used & ~gradients & (own.queue > 0)
        rest = ~used & ~gradients & ~moving
        self._move(own.where(moving), begun[moving], done[moving])
        self._use(own.where(used), begun[used])
        self._rest(own.where(rest), begun[rest], done[rest])
        return self._gather_gradients(own.where(gradients), done[gradients])

    def _move(self, own: Holds, begun: Longs, done: Longs) -> None:
        """Send and receive what devices do."""
        sent, updates = own.queue == SENT, [self._spans.named.get(update_name(k), (0, 0))[0] for k in range(self._plan.device_count)]
        device, start, over = own.device[sent], begun[sent], self._ledger.arrived(own.device[sent], done[sent])
        update = np.array(updates, np.int64)[device]  # what was sent before has left by then
        over = np.where(start < update, np.maximum(done[sent], np.minimum(over, update)), over)
        self._ledger.send(device, start, over, own.size[sent])
        for queue in (RECEIVED, FEW):
            at = own.queue == queue
            received = own.device[at], begun[at], done[at], own.size[at]
            self._ledger.receive(*received, few=queue == FEW, sum_bytes=own.sum_bytes[at])

    def _rest(self, own: Holds, begun: Longs, done: Longs) -> None:
        """Hold what is there from one task to another, and as long as tiles use it."""
        if (own.with_uses == 1).any():
            last = most(self._group, self._times.last[self._tile], self._groups, 0)
            done = np.where(own.with_uses == 1, np.maximum(done, last[own.group]), done)
        self._ledger.hold(own.device, begun, done, own.size, own.kind)

    def _use(self, own: Holds, begun: Longs) -> None:
        """Hold what is there for passes that use it, or until the first of them has begun, or from then on to the last one."""
        first, last = self._passes(own)
        leaving = own.used != FORWARD  # gradients may leave before what they are of is freed
        throughout, before = own.throughout == 1, (own.throughout == 0) & (own.since >= 0)
        between = ~throughout & ~before & (last >= first)
        columns = own.device, first, last, own.size, own.kind, leaving, begun
        device, _, end, size, kind, freed, start = (one[throughout] for one in columns)
        self._ledger.hold(device, start, np.maximum(start, end), size, kind, early=True, freed=freed)
        device, end, _, size, kind, _, start = (one[before] for one in columns)
        self._ledger.hold(device, start, np.maximum(start, end), size, kind, late=True)
        device, start, end, size, kind, freed, _ = (one[between] for one in columns)
        self._ledger.hold(device, start, end, size, kind, early=True, freed=freed)

    def _passes(self, own: Holds) -> tuple[Longs, Longs]:
        """(start of the first, end of the last) of the passes that use each of these; (end of the step, 0) if there are none. A backward
        pass is that of its whole segment, which runs at once, and the second run before it."""
        spans, back, end, tiles = self._spans, self._goes_back, self._spans.end, len(self._goes_back)
        starts = least(spans.segment[back], spans.backward_start[back], tiles, end)
        ends = most(spans.segment[back], spans.backward_end[back], tiles, 0)
        again = spans.again_start != NEVER
        start = np.minimum(np.where(back, starts[spans.segment], end), np.where(again, spans.again_start, end))
        over = np.maximum(np.where(back, ends[spans.segment], 0), spans.again_end)
        forward, backward = own.used != BACKWARD, own.used != FORWARD
        found = []
        for used, begins, lasts in ((forward, spans.forward_start, spans.forward_end), (backward, start, over)):
            first = least(self._group, begins[self._tile], self._groups, end)[own.group]
            last = most(self._group, lasts[self._tile], self._groups, 0)[own.group]
            found.append((np.where(used, first, end), np.where(used, last, 0)))
        return np.minimum(found[0][0], found[1][0]), np.maximum(found[0][1], found[1][1])

    def _gather_gradients(self, own: Holds, done: Longs) -> tuple[Longs, Longs, Longs]:
        """Gradients of regions, from when a segment has made the first one: autograd adds up what its tiles give to one region."""
        hold, segment, region, size, ended = self._first_gradients(own.group)
        begun = least(hold, ended, len(own.group), NEVER)
        counted = np.where((done > begun) | (own.at_once == 0), own.size, 0)  # else it leaves at once, as part of what is under way
        made = begun != NEVER
        rows = own.device, begun, np.maximum(begun, done), counted, own.kind
        self._ledger.hold(*(one[made] for one in rows), early=True)
        first = ended == begun[hold]
        copied = made & (own.copied == 1)
        single = np.where(copied, most(hold[first], size[first], len(own.group), 0), 0)
        self._ledger.hold(own.device[copied], begun[copied], begun[copied], single[copied], MemoryKind.GRADIENTS, early=True)
        only = first & (total(hold[first], 1, len(own.group))[hold] == 1)
        # a buffer may be there for another region before this one's gradients are added up
        return segment[only], region[only], (counted + single)[hold[only]]

    def _first_gradients(self, groups: Longs) -> tuple[Longs, Longs, Longs, Longs, Longs]:
        """(place in ``groups``, first tile of a segment, region, its bytes, when all of the segment's gradients of the region are made)."""
        place = np.full(self._groups, -1)
        place[groups] = np.arange(len(groups))
        own = np.flatnonzero((place[self._group] >= 0) & self._goes_back[self._tile])
        hold, segment, region = place[self._group[own]], self._spans.segment[self._tile[own]], self._uses.region[own]
        order = np.lexsort((region, segment, hold))
        keys = np.stack([hold, segment, region])[:, order]
        begins = np.flatnonzero(np.append(True, (np.diff(keys) != 0).any(axis=0))[: len(order)])
        ended = self._times.last[self._tile[own]][order]
        ended = np.maximum.reduceat(ended, begins) if len(order) else ended
        return *keys[:, begins], self._uses.bytes[own][order][begins], ended


def _begins(counts: Sequence[int]) -> Longs:
    found = np.array(counts, np.int64)
    return np.cumsum(found) - found


def _joined(tables: Sequence[Longs], columns: int) -> Longs:
    return np.concatenate([np.zeros((columns, 0), np.int64), *tables], axis=1)


def _columns(table: type[Any], rows: Iterable[Sequence[int]]) -> Longs:
    return np.array(list(rows), np.int64).reshape(-1, len(table._fields)).T


def held_of_parameter(plan: Plan, kept: KeptParameter) -> Held:
    """All that is held of a parameter all the time, or from its first gradient on."""
    known = _PARAMETERS.get(kept)
    if known is None or known[0] is not plan.graph:
        known = _PARAMETERS[kept] = plan.graph, _owned(plan, kept)
    return known[1]


def _owned(plan: Plan, kept: KeptParameter) -> Held:
    synchronized = kept.trainable and any(region.sync is not None for region in kept.regions)
    rows: list[tuple[int, ...]] = []
    maker = _Maker(plan)
    for region in kept.regions:
        contract = None if region.sync is None else region.sync.contract
        on_servers = contract is not None and contract.has_servers
        dealt_out = contract is not None and contract.owned_in_parts and not on_servers
        alone = region.sync is not None and region.sync.contract.sums_in_place and len(region.sync.readers) == 1
        for part, devices in region.parts:
            size = box_bytes(plan, kept.parameter, part)
            for device in devices:
                accelerator, offloaded = device in plan.accelerators, kept.trainable and kept.offload
                if on_servers and accelerator:  # in its host's memory
                    continue
                updated = kept.trainable and not (offloaded and accelerator)
                gradient = size if synchronized and not dealt_out and not alone else 0
                copies = 2 * size if offloaded and not accelerator else 0
                rows.append((device, size, size if updated else 0, int(updated), gradient, copies))
                if alone and synchronized:
                    group = maker.group(kept.parameter, [region])
                    maker.add(Hold(device, size, kind=MemoryKind.GRADIENTS), FIRST_GRADIENT, group)
    return maker.made(rows)


def held_for_syncs(plan: Plan) -> Iterator[Held]:
    """All that is held for each synchronization."""
    first: dict[int, KeptRegion] = {}
    uses: _UsesByPart = {}
    number = 0
    for kept in plan.kept:
        for region in kept.regions:
            first[number] = region
            number += len(region.parts)
    for sync in plan.syncs:
        regions = [first[region.shards[0]] for region in sync.regions]
        refs = [ref(region) for region in regions]
        known = _SYNCS.get(regions[0])
        if known is None or known[0] is not plan.graph or known[1] != refs:
            known = _SYNCS[regions[0]] = plan.graph, refs, {}
        if sync.part not in known[2]:
            known[2][sync.part] = _held_for(plan, sync, regions, uses)
        yield known[2][sync.part]


def _held_for(plan: Plan, sync: ShardSync, regions: Sequence[KeptRegion], uses: _UsesByPart) -> Held:
    maker, names, groups = _Maker(plan, sync.part, uses), [own.parameter for own in sync.regions], dict[int | None, int]()
    for own in method_for(sync).holds(plan, sync):
        group = NEVER
        if own.gradients_of:
            for place in own.gradients_of:
                group = maker.group(names[place], [regions[place]], own.device, group)
        elif own.used or own.with_uses:
            device = own.device if own.used else None
            if device not in groups:
                groups[device] = maker.group("", regions, device)
            group = groups[device]
        maker.add(own, USED[own.used], group, at_once=sync.contract.gathers_values)
    return maker.made()


class _Maker:
    """Makes the tables of what is held of a parameter, or for a synchronization. ``part``: with the uses of this micro-batch alone.
    ``uses``: those that are known."""

    def __init__(self, plan: Plan, part: int | None = None, uses: _UsesByPart | None = None) -> None:
        self._plan, self._part, self._by_part = plan, part, {} if uses is None else uses
        self._holds: list[tuple[int, ...]] = []
        self._uses: list[tuple[int, ...]] = []
        self._names: dict[str, int] = {}
        self._groups = 0

    def group(self, parameter: str, regions: Iterable[KeptRegion], device: int | None = None, into: int = NEVER) -> int:
        """Add the uses of regions on a device, or on all, to the group ``into`` or to a new one; returns its number."""
        if into == NEVER:
            into, self._groups = self._groups, self._groups + 1
        plan, number, size = self._plan, NEVER, 0
        for region in regions:
            if parameter:
                number, size = region_number(plan.graph, parameter, region.box), box_bytes(plan, parameter, region.box)
            for operator, tile in self._uses_of(region):
                if device is None or plan.deliveries[operator].tile_devices[tile] == device:
                    self._uses.append((into, operator, tile, number, size))
        return into

    def _uses_of(self, region: KeptRegion) -> Sequence[tuple[int, int]]:
        """(operator, tile) that use a region, in this micro-batch if there is one."""
        plan = self._plan
        if self._part is None:
            return [(operator, tile) for operator, tile, _ in region.uses]
        if region not in self._by_part:
            found = self._by_part[region] = dict[int, list[tuple[int, int]]]()
            for operator, tile, _ in region.uses:
                config = plan.strategy.operators[plan.graph.operators[operator].name]
                found.setdefault(part_of(config, tile, plan.strategy.microbatches), []).append((operator, tile))
        return self._by_part[region].get(self._part, ())

    def add(self, own: Hold, used: int, group: int, *, at_once: bool = False) -> None:
        """Add something that is held. ``used``, ``group``, ``at_once``: see ``Holds``."""
        if not own.size_bytes:
            return
        since, until = (self._names.setdefault(name, len(self._names)) if name else NEVER for name in (own.since, own.until))
        when = since, until, own.before, own.with_uses, bool(own.gradients_of), own.copied, used, own.throughout
        moves = QUEUES[own.queue], own.sum_bytes, at_once, group
        self._holds.append((own.device, own.size_bytes, PLACES[own.kind], *when, *moves))

    def made(self, owned: Iterable[Sequence[int]] = ()) -> Held:
        """The tables."""
        tables = _columns(Owned, owned), _columns(Holds, self._holds), _columns(Uses, self._uses)
        return Held(*tables, tuple(self._names), self._groups)
