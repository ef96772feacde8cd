"""How long tiles' outputs, what they keep, their workspace, fetched regions and sums are held, all at once over arrays.

- a tile's outputs, what it saves, and copies of its inputs: from its forward task to its backward task and the last task (or transfer)
  that reads them; of an offloading one, to the copy to its host, and again from the copy back on;
- of a recomputed tile, for its readers in the forward pass alone, and again from its second run on; if it keeps its outputs, these and
  what its products have made stay;
- a fetched region: from its first arrival to the last backward task of its consumers;
- what a tile's calls pass to each other: while its task runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from soap.model.graph import OperatorGraph
from soap.plan.marks.seam import Amount
from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Plan
from soap.plan.syncs.keeping import KeptParameter
from soap.simulator.memory.array_ledger import ArrayLedger
from soap.simulator.memory.derived import Derived
from soap.simulator.memory.grouped import Longs, any_of, least, most, owners
from soap.simulator.memory.left_sums import left_until
from soap.simulator.memory.plan_arrays import Given, PlanArrays, SumDevices, compact_numbers, region_number
from soap.simulator.memory.played import Played
from soap.simulator.memory.reading import ReadUntil, read_until
from soap.simulator.memory.spans import NEVER, Spans


class Gone(NamedTuple):
    """When readers on the maker's device have let go of outputs (by row of ``Outputs``; of recomputed tiles as their first run makes them)
    and of sums (by row of ``SumDevices``)."""

    outputs: Longs
    sums: Longs


class _Views(NamedTuple):
    """Rows of ``Readers`` and of ``Outputs``: outputs that may have the memory of what their tiles read."""

    reader: Longs
    output: Longs


def hold_values(plan: Plan, arrays: PlanArrays, spans: Spans, times: Derived, ledger: ArrayLedger, played: Played) -> Gone:
    """Write into a ledger how long all this is held. ``played``: when ranks run the tasks, which wait for each other as in the plan,
    without the waits that ranks add."""
    return _Values(plan, arrays, spans, times, ledger).held(played)


class _Values:
    """Writes into a ledger how long everything is held except gradients, and what methods of synchronization hold."""

    def __init__(self, plan: Plan, arrays: PlanArrays, spans: Spans, times: Derived, ledger: ArrayLedger) -> None:
        self._plan, self._arrays, self._spans, self._times, self._ledger = plan, arrays, spans, times, ledger
        self._hold = ledger.hold

    def held(self, played: Played) -> Gone:
        """Write down all of it."""
        views = self._views()
        read = self._read(views)
        outputs = self._outputs(read, views)
        self._kept()
        self._marked()
        self._workspace()
        self._batch()
        self._assembled()
        self._fetched()
        return Gone(outputs, self._sums(read, played))

    def _lives(self, tile: Longs, until: Longs) -> Iterator[tuple[Longs, Longs, Longs]]:
        """(places among these tiles, start, end) of when something is there that tiles have from their forward task to ``until``; of
        recomputed ones during their first run, and again from their second one on."""
        spans, again = self._spans, self._times.again[tile]
        yield np.arange(len(tile)), spans.forward_start[tile], np.where(again, spans.forward_end[tile], until)
        if again.any():
            place = np.flatnonzero(again)
            yield place, spans.again_start[tile[place]], until[place]

    def _views(self) -> _Views:
        readers, outputs = self._arrays.readers, self._arrays.outputs
        bits = [(readers.views >> bit) & 1 == 1 for bit in range(int(readers.views.max(initial=0)).bit_length())]
        row = np.concatenate([np.zeros(0, np.int64), *map(np.flatnonzero, bits)])
        place = np.repeat(np.arange(len(bits)), [int(own.sum()) for own in bits])
        return _Views(row, np.searchsorted(outputs.tile, readers.tile[row]) + place)

    def _read(self, views: _Views) -> ReadUntil:
        """Until when values are read, and what has their memory; that may be in such memory itself."""
        readers, own, before = self._arrays.readers, self._times, None
        again = own.again[readers.tile[views.reader]]
        read = read_until(self._plan, self._arrays, self._spans, own)
        while len(views.reader) and (before is None or not all(map(np.array_equal, before, own))):
            before = own
            (_, _, first), *others = self._made(read)
            second = np.zeros_like(first)
            for place, _, over in others:
                second[place] = over
            needed, used, passed = own.needed.copy(), own.used.copy(), own.passed.copy()
            np.maximum.at(needed, views.reader, np.maximum(first, second)[views.output])
            np.maximum.at(used, views.reader, np.where(again, second[views.output], 0))
            np.maximum.at(passed, views.reader, first[views.output])
            self._times = own = own._replace(needed=needed, used=used, passed=passed)
            read = read_until(self._plan, self._arrays, self._spans, own)
        return read

    def _made(self, read: ReadUntil) -> Iterator[tuple[Longs, Longs, Longs]]:
        """(rows of ``Outputs``, when they are made, when they have gone) of first runs, and of second ones. They are there until they are
        no longer used and waited for. Of a tile that keeps its outputs, those of the first run are there as long as of any other."""
        own = self._arrays.outputs
        used = np.where(own.keeps, self._times.left[own.tile], self._times.work_end[own.tile])
        stays = self._spans.light[own.tile]
        stays[self._summands()[0]] = False  # nobody reads them but their sum
        for waits, (place, start, end) in zip(self._waits(read), self._lives(own.tile, used), strict=False):
            yield place, start, np.maximum(np.where(stays[place], used[place], end), waits[place])

    def _outputs(self, read: ReadUntil, views: _Views) -> Longs:
        """Outputs of tiles. What has the memory of an input takes none, unless that comes again: then it is a copy
        (``ForwardPass.run_tile``). Returns when those of first runs have gone."""
        own, pieces = self._arrays.outputs, self._arrays.pieces
        again = np.append(self._spans.gathered_start, NEVER)[pieces.carrier] != NEVER
        again = any_of(pieces.fetch[again], len(self._arrays.fetches.device))[self._arrays.readers.fetch[views.reader]]
        lies = own.lies & any_of(views.output, len(own.tile)) & ~any_of(views.output[again], len(own.tile))
        size, gone = np.where(lies, 0, own.bytes), np.zeros(0, np.int64)
        for place, start, over in self._made(read):
            self._hold(self._arrays.tiles.device[own.tile[place]], start, over, size[place], MemoryKind.KEPT, late=True)
            gone = gone if len(gone) else over
        return gone

    def _waits(self, read: ReadUntil) -> tuple[Longs, Longs]:
        """Until when outputs wait for others, as first and as second runs make them. Partial results wait for their sum alone."""
        held, outputs = self._arrays.holdings, self._arrays.outputs
        size, own = len(outputs.tile), held.output >= 0
        first, second = (most(held.output[own], np.maximum(until[own], 0), size, 0) for until in read)
        output, summed = self._summands()
        first[output], second[output] = self._spans.summed_start[summed], np.maximum(0, self._spans.again_summed_start[summed])
        return first, second

    def _summands(self) -> tuple[Longs, Longs]:
        """(rows of ``Outputs`` with partial results, the sums of these)."""
        sums, outputs = self._arrays.sums, self._arrays.outputs
        summed = owners(sums.members)
        return np.searchsorted(outputs.tile, sums.member) + sums.output[summed], summed

    def _kept(self) -> None:
        """Hold all that tiles keep but their outputs."""
        tiles, let_go = self._arrays.tiles, self._spans.let_go != NEVER
        for place, start, end in self._lives(np.arange(len(tiles.device)), self._times.left):
            self._hold(tiles.device[place], start, end, tiles.kept[place], MemoryKind.KEPT, late=let_go[place])

    def _marked(self) -> None:
        """Hold what marks add (``plan.marks``)."""
        tiles, spans, times = self._arrays.tiles, self._spans, self._times
        for marked in dict.fromkeys(self._plan.marked.values()):
            positions = [position for position, own in self._plan.marked.items() if own is marked]
            for hold in marked.holds:
                start = spans.rows_start[hold.since] if hold.since else np.where(times.goes_back, spans.forward_start, NEVER)
                own = np.flatnonzero(np.isin(tiles.operator, positions) & (start != NEVER))
                end = spans.rows_end[hold.until] if hold.until else times.last
                size, device = self._amount(hold.amount)[own], tiles.device[own]
                size = np.where(self._ledger.is_accelerator[device], 0, size) if hold.on_host else size
                self._hold(device, start[own], end[own], size, MemoryKind.KEPT, early=bool(hold.since), late=bool(hold.until))

    def _amount(self, amount: Amount) -> Longs:
        """These bytes, by tile."""
        tiles, outputs = self._arrays.tiles, self._arrays.outputs
        if amount is Amount.MADE:
            return np.bincount(outputs.tile, outputs.bytes, len(tiles.device)).astype(np.int64)
        return tiles.product if amount is Amount.PRODUCT else tiles.away

    def _workspace(self) -> None:
        """Hold the workspace of tiles while they run, but for those that make something that nobody reads."""
        tiles, spans = self._arrays.tiles, self._spans
        runs, again = np.flatnonzero(~spans.unread), np.flatnonzero(self._times.again)
        for own, start, end in ((runs, spans.forward_start, spans.forward_end), (again, spans.again_start, spans.again_work_end)):
            self._hold(tiles.device[own], start[own], end[own], tiles.forward[own], MemoryKind.WORKSPACE)

    def _batch(self) -> None:
        """Copies of parts of the batch that lie in several pieces, one for all that read a part on a device."""
        own = Given._make(column[self._arrays.given.copied] for column in self._arrays.given)
        if not len(own.tile):
            return
        device = self._arrays.tiles.device[own.tile]
        _, first, group = np.unique(own.region * (int(device.max()) + 1) + device, return_index=True, return_inverse=True)
        used = np.where(own.keeps, self._times.last[own.tile], self._times.work_end[own.tile])
        self._hold_groups(group, first, own.tile, used, own.bytes, MemoryKind.BATCH)

    def _hold_groups(self, group: Longs, first: Longs, tile: Longs, used: Longs, size: Longs, kind: MemoryKind) -> None:
        """Hold one region for each group of tiles, in first and in second runs. ``first``: a place of each group."""
        for place, start, end in self._lives(tile, used):
            begun = least(group[place], start, len(first), NEVER)
            over = most(group[place], end, len(first), NEVER)
            there = np.flatnonzero(begun != NEVER)
            self._hold(self._arrays.tiles.device[tile[first[there]]], begun[there], over[there], size[first[there]], kind)

    def _assembled(self) -> None:
        """Regions of parameters that are assembled from several shards, or from rows: one for a segment, of rows one for each tile."""
        parameters = self._arrays.parameters
        own = np.flatnonzero(~np.isin(parameters.region, _whole_regions(self._plan)))
        if not len(own):
            return
        tile, region = parameters.tile[own], parameters.region[own]
        compact = np.isin(parameters.parameter[own], compact_numbers(self._plan))
        of = np.where(compact, tile, self._spans.segment[tile])
        _, first, group = np.unique(np.stack([of, region, compact]), axis=1, return_index=True, return_inverse=True)
        used = np.where(parameters.keeps[own], self._times.last[tile], self._times.work_end[tile])
        size = np.where(compact, parameters.rows_bytes[own], parameters.bytes[own])
        self._hold_groups(group.ravel(), first, tile, used, size, MemoryKind.VALUES)

    def _fetched(self) -> None:
        """Fetched regions that are assembled or received, and pieces that are received in buffers of their own first."""
        fetches, pieces, readers, spans = self._arrays.fetches, self._arrays.pieces, self._arrays.readers, self._spans
        size = len(fetches.device)
        there = pieces.carrier >= 0
        begun = least(pieces.fetch[there], spans.brought_start[pieces.carrier[there]], size, NEVER)
        until = most(readers.fetch, self._times.needed, size, 0)
        own = np.flatnonzero(fetches.remote)
        again = least(pieces.fetch[there], spans.gathered_start[pieces.carrier[there]], size, NEVER)
        twice = own[again[own] != NEVER]
        first = np.where(again != NEVER, most(readers.fetch, spans.forward_end[readers.tile], size, 0), until)
        self._hold(fetches.device[own], begun[own], first[own], fetches.bytes[own], MemoryKind.KEPT, late=True)
        come = most(pieces.fetch[there], spans.gathered_end[pieces.carrier[there]], size, NEVER)
        self._hold(fetches.device[twice], again[twice], np.maximum(until, come)[twice], fetches.bytes[twice], MemoryKind.KEPT, late=True)
        joined, apart = least(readers.fetch, spans.forward_start[readers.tile], size, 0), np.flatnonzero(pieces.apart)
        fetch, start = pieces.fetch[apart], spans.brought_start[pieces.carrier[apart]]
        self._hold(fetches.device[fetch], start, joined[fetch], pieces.bytes[apart], MemoryKind.BUFFERS, late=True)
        back = np.flatnonzero(self._times.goes_back[readers.tile])
        tile = readers.tile[back]
        begun = np.where(self._times.again[tile], spans.again_start[tile], spans.begun[tile])
        joined, apart = least(readers.fetch[back], begun, size, 0), apart[again[pieces.fetch[apart]] != NEVER]
        fetch, start = pieces.fetch[apart], spans.gathered_start[pieces.carrier[apart]]
        self._hold(fetches.device[fetch], start, joined[fetch], pieces.bytes[apart], MemoryKind.BUFFERS, late=True)
        several = ~fetches.remote & (np.diff(fetches.pieces) > 1)
        reader = np.flatnonzero(several[readers.fetch])
        for place, start, end in self._lives(readers.tile[reader], self._times.needed[reader]):
            fetch, over = readers.fetch[reader[place]], np.maximum(end, self._times.passed[reader[place]])
            self._hold(fetches.device[fetch], start, over, fetches.bytes[fetch], MemoryKind.KEPT)

    def _sums(self, read: ReadUntil, played: Played) -> Longs:
        """Sums of partial results, or their cells. Returns when they have gone."""
        own, sums = self._arrays.sum_devices, self._arrays.sums
        start, done = self._spans.summed_start[own.sum], self._spans.summed_end[own.sum]
        over = self._kept_sums(read, played, done)
        scattered = sums.scattered[own.sum]
        self._hold(own.device, start, over, own.bytes, MemoryKind.KEPT, early=~scattered, late=True, made=scattered)
        self._scattered(np.flatnonzero(scattered), start, done)
        start, done = self._spans.again_summed_start[own.sum], self._spans.again_summed_end[own.sum]
        again = np.flatnonzero(start != NEVER)
        ends = most(self._arrays.holdings.sum[held := self._arrays.holdings.sum >= 0], read.second[held], len(sums.bytes), 0)
        until, kinds = np.maximum(done, ends[own.sum])[again], {"early": ~scattered[again], "made": scattered[again]}
        self._hold(own.device[again], start[again], until, own.bytes[again], MemoryKind.KEPT, late=True, **kinds)
        self._scattered(again[scattered[again]], start, done)
        return over

    def _kept_sums(self, read: ReadUntil, played: Played, done: Longs) -> Longs:
        """By row of ``SumDevices``: until when its sum is kept: for its readers, or if it has none there until its gradient comes or it is
        known to be over (``left_sums``). ``done``: when it is made."""
        own, times = self._arrays.sum_devices, self._times
        holding = np.flatnonzero((self._arrays.holdings.sum >= 0) & (read.first != NEVER))
        ends = most(self._arrays.holdings.sum[holding], read.first[holding], len(self._arrays.sums.bytes), 0)[own.sum]
        left = np.flatnonzero(~any_of(times.holding_row[holding], len(own.sum)))
        if len(left):
            answered = np.where(times.sum_begun == NEVER, self._ledger.arrived(own.device, done), times.sum_begun)
            ends[left] = left_until(self._arrays, self._spans, played, left, answered[left])
        return np.maximum(done, ends)

    def _scattered(self, rows: Longs, start: Longs, done: Longs) -> None:
        """Sums that are cut into cells: the own one is added up of partial results; when these have gone, it is cut and sent. With
        micro-batches others' cells are copied, as in ``sent``."""
        if not len(rows):
            return
        own = SumDevices._make(column[rows] for column in self._arrays.sum_devices)
        whole, start, done = self._arrays.sums.bytes[own.sum], start[rows], done[rows]
        apart = (own.others > 1) & self._ledger.is_accelerator[own.device] if self._plan.order is None else True
        self._hold(own.device, start, start, whole, MemoryKind.BUFFERS, early=True, over=True)
        sent = np.where(apart, own.sent, own.sent_lying)
        self._ledger.send(own.device, start, self._ledger.arrived(own.device, done), whole - own.bytes, held=sent, made=True)
        received = (np.diff(self._arrays.sums.devices)[own.sum] - 1) * own.bytes
        self._hold(own.device, start, done, received, MemoryKind.BUFFERS, made=True)


_WHOLE: WeakKeyDictionary[KeptParameter, tuple[OperatorGraph, list[int]]] = WeakKeyDictionary()


def _whole_regions(plan: Plan) -> list[int]:
    """Numbers of the regions of parameters that are there as a whole: shards, and what readers gather of parts."""
    found: list[int] = []
    for kept in plan.kept:
        known = _WHOLE.get(kept)
        if known is None or known[0] is not plan.graph:
            parts = [part for region in kept.regions for part, _ in region.parts]
            parts += [region.box for region in kept.regions if region.sync is not None and region.sync.contract.owned_in_parts]
            known = _WHOLE[kept] = plan.graph, [region_number(plan.graph, kept.parameter, box) for box in parts]
        found += known[1]
    return found
