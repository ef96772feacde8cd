"""Memory of gradients over simulated time, of a whole plan at once: between operators, returning from other devices, and of parameters; and
their copies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Plan
from soap.plan.syncs.bucketing import sums_of_one
from soap.simulator.memory.array_ledger import ArrayLedger
from soap.simulator.memory.derived import Derived
from soap.simulator.memory.grouped import Bools, Longs, any_of, least, most, number_groups, rows_of, total
from soap.simulator.memory.plan_arrays import BROADCAST, PlanArrays, compact_numbers, region_number
from soap.simulator.memory.spans import NEVER, Spans


class CountedSums(NamedTuple):
    """Sums of gradients that a segment, named by its first tile, makes of a parameter's region. ``bytes``: what is counted at their ends,
    but is made only when what was added up has gone."""

    segment: Longs
    region: Longs
    bytes: Longs


class _Reads(NamedTuple):
    """Values that tiles read and bring gradients to. ``value``: a fetch with parts from elsewhere, or how many fetches there are plus the
    number of a holding; it takes ``value_bytes``, the gradient ``bytes``. ``leaf``: whether another segment or a sum has made it, so that
    backward passes end there. ``taken``: whether the gradient may be the leaf's; ``spread``: whether it is a few numbers repeated."""

    value: Longs
    value_bytes: Longs
    device: Longs
    tile: Longs
    bytes: Longs
    leaf: Bools
    taken: Bools
    spread: Bools


class _Made(NamedTuple):
    """Gradients of regions of parameters, sorted by segment (its first tile), region and time. Those of one segment and region are added
    up, which is over at ``last_end``; ``turn``: place among these. ``copied``: whether the first to be kept is copied. ``sparse``: whether
    the parameter is looked up."""

    segment: Longs
    region: Longs
    device: Longs
    start: Longs
    end: Longs
    bytes: Longs
    turn: Longs
    last_end: Longs
    copied: Bools
    sparse: Bools


def hold_gradients(
    plan: Plan, arrays: PlanArrays, spans: Spans, times: Derived, ledger: ArrayLedger, counted: CountedSums, left: Longs
) -> None:
    """Write into a ledger how long gradients are held. ``counted``: what else is counted at the end of sums. ``left``: by carrier, when a
    device knows that the gradients that it sends back have left because it then sends for a later micro-batch, or NEVER."""
    own = _Gradients(plan, arrays, spans, times, ledger)
    own.between_operators()
    own.returning(left)
    own.of_parameters(counted)


class _Gradients:
    """Writes into a ledger how long gradients are held."""

    def __init__(self, plan: Plan, arrays: PlanArrays, spans: Spans, times: Derived, ledger: ArrayLedger) -> None:
        self._plan, self._arrays, self._spans, self._times, self._ledger = plan, arrays, spans, times, ledger
        self._goes_back = times.goes_back
        fetches, readers, pieces = arrays.fetches, arrays.readers, arrays.pieces
        answered = any_of(readers.fetch[times.goes_back[readers.tile]], len(fetches.device))
        self._fetched = fetches.gradient & fetches.remote & answered  # leaves of autograd with parts from elsewhere
        self._parts = pieces.holding[self._fetched[pieces.fetch]]  # the holdings that these are parts of

    def between_operators(self) -> None:
        """Gradients of what tiles read: of regions with parts from elsewhere, held until all have taken their parts, and of holdings. Each
        later one is held with the sum that it is added to."""
        hold, spans, fetches = self._ledger.hold, self._spans, self._arrays.fetches
        reads = self._reads()
        start, end = spans.backward_start[reads.tile], spans.backward_end[reads.tile]
        order = np.lexsort((reads.bytes, end, start, reads.value))
        later = order[1:][reads.value[order[1:]] == reads.value[order[:-1]]]
        hold(reads.device[later], start[later], end[later], reads.bytes[later], MemoryKind.WORKSPACE)
        begun = least(reads.value, start, len(fetches.device) + len(self._arrays.holdings.device), spans.end + 1)
        own = np.flatnonzero(self._fetched)
        hold(fetches.device[own], begun[own], self._times.taken[own], fetches.bytes[own], MemoryKind.WORKSPACE, late=True)
        self._copied(reads)
        self._collected(begun[len(fetches.device) :])

    def _reads(self) -> _Reads:
        """All of them: the regions with parts from elsewhere, and piece by piece what lies on their devices."""
        fetches, readers, pieces, holdings = self._arrays.fetches, self._arrays.readers, self._arrays.pieces, self._arrays.holdings
        apart = np.flatnonzero(self._fetched[readers.fetch] & self._goes_back[readers.tile])
        local = np.flatnonzero((fetches.gradient & ~fetches.remote)[pieces.fetch])
        place, reader = rows_of(fetches.readers, pieces.fetch[local])
        back = self._goes_back[readers.tile[reader]]
        piece, reader = local[place[back]], reader[back]
        holding, tile, sole = pieces.holding[piece], readers.tile[reader], np.diff(fetches.pieces)[pieces.fetch[piece]] == 1
        elsewhere = (holdings.sum[holding] >= 0) | (self._spans.segment[holdings.tile[holding]] != self._spans.segment[tile])
        taken = sole & readers.in_rows[reader] & holdings.in_rows[holding]
        fetched, all_readers = readers.fetch[apart], np.concatenate((apart, reader))
        return _Reads(
            value=np.concatenate((fetched, len(fetches.device) + holding)),
            value_bytes=np.concatenate((fetches.bytes[fetched], holdings.bytes[holding])),
            device=fetches.device[readers.fetch[all_readers]],
            tile=readers.tile[all_readers],
            bytes=np.concatenate((fetches.bytes[fetched], pieces.bytes[piece])),
            leaf=np.concatenate((np.ones(len(apart), np.bool_), elsewhere)),
            taken=np.concatenate((readers.in_rows[apart], taken)),
            spread=np.concatenate((np.zeros(len(apart), np.bool_), sole & readers.spread[reader] & ~elsewhere)),
        )

    def _copied(self, reads: _Reads) -> None:
        """Gradients that autograd copies when it brings them to leaves.

        The first one is taken as it is if it lies row by row in memory of its own, as the leaf does (``Footprint.in_rows``). Others are
        copied: that of a shortcut is the gradient of what it is added to as well, that of a mean is one number repeated, that of a part is
        a view. Footprints know such gradients as made once, as within a segment they are. The last reader in the first segment to go back
        brings a leaf's gradient, added up. A copy may take the place of a gradient that it is made of, which counts, but takes hardly any
        memory.
        """
        tiles, spans = len(self._arrays.tiles.device), self._spans
        own = np.flatnonzero(reads.leaf)
        tile = reads.tile[own]
        start, end, segment = spans.backward_start[tile], spans.backward_end[tile], spans.segment[tile]
        order = np.lexsort((tile, segment, end, start, reads.value[own]))
        own, segment = own[order], segment[order]
        leaf, begins = number_groups(reads.value[own])
        first = np.flatnonzero(segment == segment[begins][leaf])
        copied = any_of(leaf[first[~reads.taken[own[first]]]], len(begins))
        last = own[most(leaf[first], first, len(begins), 0)[copied]]
        copies = total(reads.tile[last], reads.value_bytes[last], tiles)
        copying = np.flatnonzero(copies)
        begun, over = spans.backward_start[copying], spans.backward_end[copying]
        size = np.maximum(0, copies - self._spread(reads))[copying]
        self._ledger.hold(self._arrays.tiles.device[copying], begun, over, size, MemoryKind.WORKSPACE)

    def _spread(self, reads: _Reads) -> Longs:
        """By tile, bytes that it makes of which only one tile of its segment reads anything, and to which that gives a few numbers
        repeated."""
        fetches, holdings = len(self._arrays.fetches.device), self._arrays.holdings
        lies = reads.value >= fetches
        holding = reads.value[lies] - fetches
        times_read = total(np.concatenate((holding, self._parts)), 1, len(holdings.device))
        spread = holding[reads.spread[lies] & (times_read[holding] == 1)]
        return total(holdings.tile[spread], holdings.bytes[spread], len(self._arrays.tiles.device))

    def _collected(self, begun: Longs) -> None:
        """Gradients of holdings. From ``begun`` on, unless that is after the step, one is what the local readers have left on a leaf. If
        other parts come separately, all are added up in another tensor when the gradient is needed."""
        hold, holdings = self._ledger.hold, self._arrays.holdings
        wanted, end = self._times.wanted_start, self._times.wanted_end
        made, apart = begun <= self._spans.end, any_of(self._parts, len(begun))
        own = np.flatnonzero(made)
        until = np.where(apart, wanted, end)[own]
        hold(holdings.device[own], begun[own], until, holdings.bytes[own], MemoryKind.WORKSPACE, late=apart[own])
        own = np.flatnonzero(apart)
        hold(holdings.device[own], wanted[own], end[own], holdings.bytes[own], MemoryKind.WORKSPACE, early=True)
        summed = holdings.sum[(made | apart) & (holdings.sum >= 0)]
        self._summed(any_of(summed, len(self._arrays.sums.bytes)) & (self._spans.summed_back_start != NEVER))

    def _summed(self, wanted: Bools) -> None:
        """Gradients of these sums, as their members gather or sum them."""
        sums, own, times, hold = self._arrays.sums, self._arrays.sum_devices, self._times, self._ledger.hold
        rows = np.flatnonzero(wanted[own.sum])
        of, device = own.sum[rows], own.device[rows]
        start, size = self._spans.summed_back_start[of], sums.gradient_bytes[of]
        begun, until = (np.where(times.sum_last[rows] == NEVER, start, one[rows]) for one in (times.sum_begun, times.sum_last))
        hold(device, start, until, size, MemoryKind.WORKSPACE, early=True)
        cut = sums.scattered[of]
        self._ledger.send(device[cut], start[cut], self._spans.end, own.gradient_bytes[rows[cut]])
        cut &= ~sums.in_place[of]  # they come in another buffer first
        hold(device[cut], start[cut], begun[cut], size[cut], MemoryKind.BUFFERS, late=True)

    def returning(self, left: Longs) -> None:
        """Gradients that return from other devices: buffers in which each is received, buffers for several together, and what is sent."""
        carriers, returned = self._arrays.carriers, np.flatnonzero(self._spans.returned_start != NEVER)
        place, part = rows_of(carriers.parts, returned)
        carrier, piece = returned[place], carriers.part[part]
        self._received(carrier, piece)
        self._sent(carrier, piece, left)

    def _received(self, carrier: Longs, piece: Longs) -> None:
        """Buffers of gradients that come back with carriers to where pieces are from. Of a broadcast a device gets one, the sum."""
        hold, pieces = self._ledger.hold, self._arrays.pieces
        start, size = self._spans.returned_start[carrier], pieces.bytes[piece]
        device, wanted = self._arrays.holdings.device[pieces.holding[piece]], self._times.wanted_start[pieces.holding[piece]]
        room, first = number_groups(carrier, device)
        count, one_by_one = len(first), self._arrays.carriers.pattern[carrier] != BROADCAST
        own = np.union1d(first, np.flatnonzero(one_by_one))
        hold(device[own], start[own], wanted[own], size[own], MemoryKind.BUFFERS, late=True)
        until, size = least(room, wanted, count, 0), total(room, size, count)
        several = (total(room, 1, count) > 1) & one_by_one[first]
        own = first[several]
        hold(device[own], start[own], until[several], size[several], MemoryKind.BUFFERS, late=True)

    def _sent(self, carrier: Longs, piece: Longs, left: Longs) -> None:
        """Gradients of parts of fetches that devices send at once. Autograd leaves the gradient of a region that came row by row, as the
        region lies: a part in one piece leaves from there. What a broadcast brought is summed on the way back, in a copy."""
        fetches, pieces, ledger = self._arrays.fetches, self._arrays.pieces, self._ledger
        parcel, first = number_groups(carrier, fetches.device[pieces.fetch[piece]], self._arrays.holdings.device[pieces.holding[piece]])
        several, size = total(parcel, 1, len(first)) > 1, total(parcel, pieces.bytes[piece], len(first))
        carrier, piece = carrier[first], piece[first]
        device = fetches.device[pieces.fetch[piece]]
        send, first = number_groups(carrier, device)
        together = ledger.is_accelerator[device] & (total(send, 1, len(first)) > 1)[send]
        copied = several | together | (self._arrays.carriers.pattern[carrier] == BROADCAST) | ~pieces.in_fetch[piece]
        if self._plan.order is not None:  # see ``sent``
            copied |= ~pieces.is_fetch[piece]
        carrier, device = carrier[first], device[first]
        over = ledger.arrived(device, self._spans.returned_end[carrier])
        over = np.where(left[carrier] == NEVER, over, np.minimum(over, left[carrier]))
        sizes, held = total(send, size, len(first)), total(send, size * copied, len(first))
        numbers = ledger.send(device, self._spans.returned_start[carrier], over, sizes, held=held, copied=True)
        lies = pieces.fetch[piece[~copied]]
        ledger.stay(numbers[send[~copied]], -1 - lies, self._times.taken[lies], fetches.bytes[lies])

    def of_parameters(self, counted: CountedSums) -> None:
        """Gradients of parameters that backward tasks make, with what these pass from call to call, and sums of them that autograd makes in
        a segment. If a single device owns the shard, the gradient that stays is counted elsewhere, from the first gradient on: it is that
        one itself, or a copy of it, which is then there as well (``Footprint.in_rows``). Later ones are added to it."""
        hold, tiles, spans = self._ledger.hold, self._arrays.tiles, self._spans
        back, weights = np.flatnonzero(self._goes_back), np.flatnonzero(spans.weights_start != NEVER)
        for start, end, own in ((spans.backward_start, spans.backward_end, back), (spans.weights_start, spans.weights_end, weights)):
            hold(tiles.device[own], start[own], end[own], tiles.backward[own], MemoryKind.WORKSPACE)
        made = self._made_of_parameters()
        shards = (self._plan.shards[number] for number in sums_of_one(self._plan))
        alone = np.isin(made.region, [region_number(self._plan.graph, shard.parameter, shard.box) for shard in shards])
        own = np.flatnonzero(~(alone & _stay(made)))
        hold(made.device[own], made.start[own], made.end[own], made.bytes[own], MemoryKind.GRADIENTS)
        own = np.flatnonzero((made.turn > 0) & ~alone)
        hold(made.device[own], made.end[own - 1], made.end[own], made.bytes[own], MemoryKind.GRADIENTS)
        self._added_up(made, counted)

    def _made_of_parameters(self) -> _Made:
        """All of them, in the order in which segments make them."""
        parameters, spans = self._arrays.parameters, self._spans
        rows = np.flatnonzero(self._goes_back[parameters.tile] & parameters.trained)
        tile, region = parameters.tile[rows], parameters.region[rows]
        by_rows = np.isin(parameters.parameter[rows], compact_numbers(self._plan))
        size = np.where(by_rows, parameters.rows_bytes[rows], parameters.bytes[rows])
        start, end = self._times.weighed[tile], self._times.last[tile]
        order = np.lexsort((size, end, start, region, spans.segment[tile]))
        rows, tile, region, end = rows[order], tile[order], region[order], end[order]
        segment, sparse = spans.segment[tile], parameters.sparse[rows]
        sums, first = number_groups(segment, region)
        copied = any_of(sums[~(parameters.in_rows[rows] | sparse)], len(first))
        return _Made(
            segment=segment,
            region=region,
            device=self._arrays.tiles.device[tile],
            start=start[order],
            end=end,
            bytes=size[order],
            turn=np.arange(len(rows)) - first[sums],
            last_end=most(sums, end, len(first), 0)[sums],
            copied=copied[sums],
            sparse=sparse,
        )

    def _added_up(self, made: _Made, counted: CountedSums) -> None:
        """The first two gradients of a sum and the sum itself, at the moment at which they are added up. The first sum may be of views, and
        is then a third tensor, one at a time."""
        own = np.flatnonzero((made.turn == 1) & ~made.sparse)
        device, end, size = made.device[own], made.end[own], made.bytes[own]
        segments, regions = (np.append(one[own], other) for one, other in ((made.segment, counted.segment), (made.region, counted.region)))
        sums, first = number_groups(segments, regions)
        known = total(sums[len(own) :], counted.bytes, len(first))[sums[: len(own)]] * (end == made.last_end[own])
        self._ledger.hold(device, end, end, np.maximum(0, 2 * size - known), MemoryKind.GRADIENTS, early=True)
        moment, first = number_groups(device, end)
        third = most(moment, np.minimum(size, np.maximum(0, 3 * size - known)), len(first), 0)
        self._ledger.hold(device[first], end[first], end[first], third, MemoryKind.GRADIENTS, early=True)


def _stay(made: _Made) -> Bools:
    """Whether gradients are the first of all of their regions, and no copies, so that they stay; of tables, the first of a segment."""
    order = np.lexsort((made.segment, made.end, made.start))
    region, first = number_groups(made.region[order])
    earliest = np.zeros(len(order), np.bool_)
    earliest[order] = made.segment[order] == made.segment[order[first]][region]
    stays: Bools = (made.turn == 0) & ~made.copied & (earliest | made.sparse)
    return stays
