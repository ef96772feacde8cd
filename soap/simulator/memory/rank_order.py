"""In which order ranks run a plan's passes: what the runtime's program and predicted memory follow. Tiles, segments and turns are numbers
in arrays, and only what must see one thing after the other (where gradients flow, turns of segments) is a loop.

*Forward*, one rule after the other takes a topological order of all tiles and returns one:

- If only the loss and gradients travel between devices, no order makes any device wait. Then tiles run in the model's own order, which
  completes gradients, and starts their sums, the earliest.
- A tile that waits for no other, such as a sparse lookup, comes right before its first reader if all readers are on its device. The
  backward pass runs in reverse: so its gradient, which may have far to travel, is complete early.
- With micro-batches, actions of ``Plan.order`` follow each other. Those of one action keep their order.
- Tiles of the loss epilogue come after all others (``plan.running.epilogue``).

*Segments* of a device's tiles are one autograd graph each. Everything that a segment receives, or that is summed or gathered for it, is
complete before its first tile, because it comes from segments that start earlier. A tile whose gradient comes from elsewhere (*answered*)
is the last of its segment, so that no other tile waits for that gradient. Tiles of the loss epilogue share no segment with others, nor do
the recomputed tiles of a run (``plan.recomputation``), nor passes of different actions of ``Plan.order``. A tile whose backward pass is in
two is one.

*Backward* a segment can run once all gradients from elsewhere have arrived. If several can, the choice changes only who waits for whom, not
the result. They run in the order in which the simulation began their tiles' backward passes; without a simulation, the segment that started
last goes first.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from soap.plan.pass_order import Pass, PassOrder
from soap.plan.plan import Plan
from soap.plan.running.epilogue import LossEpilogue, closing_tensors, epilogue_of, kept_epilogue, no_epilogue
from soap.simulator.memory.grouped import Bools, Longs, distinct, least, most, owners, rows_of
from soap.simulator.memory.plan_arrays import MESSAGE, PlanArrays, Tiles


class Segments(NamedTuple):
    """``number``: by tile, its segment. By segment, in the order in which they begin: ``first``, its first tile, and ``start``, the place
    of that tile in the order of all."""

    number: Longs
    first: Longs
    start: Longs


class Active(NamedTuple):
    """Which tiles, fetches and sums have gradients: a tile has a backward pass if a gradient reaches one of its outputs. ``seeds``: tiles
    at which the backward pass begins."""

    tiles: Bools
    fetches: Bools
    sums: Bools
    seeds: Longs


class Again(NamedTuple):
    """``tiles``: whether each runs forward twice. ``maker``, ``reader``: pairs of these, of which one reads what the other makes again.
    ``gathered``, ``gatherer``: pairs of one of these and a tile, on any device, that reads what it makes again once that has been gathered,
    or summed, again."""

    tiles: Bools
    maker: Longs
    reader: Longs
    gathered: Longs
    gatherer: Longs


class RankOrder(NamedTuple):
    """``forward``: tiles in the order in which they run. ``turns``: by segment, when it runs backward; with micro-batches ``Plan.order``
    decides, and those of one action keep this order. ``backward``: the tiles with a backward pass as they were given, none if
    their order does not count."""

    epilogue: LossEpilogue
    forward: Longs
    backward: Longs
    active: Active
    again: Again
    segments: Segments
    turns: Longs

    def second_turns(self, turns: Longs) -> Longs:
        """(turn, segment that runs forward a second time right before it), in their order. ``turns``: by segment, of its backward pass.

        A segment's second run comes right before the first backward pass that needs it, its own or that of a segment that reads what it
        makes again; and after the second runs that it reads from. So as little as possible is there at a time.
        """
        count, number, again = len(turns), self.segments.number, self.again
        own = distinct(number[np.append(np.flatnonzero(again.tiles), again.gatherer)])
        reads, made = np.append(again.reader, again.gatherer), np.append(again.maker, again.gathered)
        pairs = distinct(number[reads] * count + number[made])
        makers: dict[int, list[int]] = {}
        for one, other in zip((pairs // count).tolist(), (pairs % count).tolist(), strict=True):
            makers.setdefault(one, []).append(other)
        turn: dict[int, int] = {}
        for segment in own[np.argsort(turns[own])].tolist():
            todo = [segment]
            while todo:
                needed = todo.pop()
                if needed not in turn:
                    turn[needed] = int(turns[segment])
                    todo.extend(makers.get(needed, ()))
        twice = {*number[again.tiles].tolist()}
        found = np.array([(at, segment) for segment, at in turn.items() if segment in twice], np.int64).reshape(-1, 2)
        return found[np.lexsort((self.segments.start[found[:, 1]], found[:, 0]))]


def rank_order(
    plan: Plan, arrays: PlanArrays, forward: Longs, backward: Longs, *, single_tiles: bool = False, turns: bool = True
) -> RankOrder:
    """The order in which ranks run a plan's passes. ``forward``: all tiles in a topological order, ``backward``: those with a backward
    pass, as their passes begin in a simulation; none if it is not known. ``single_tiles``: each tile is a segment. ``turns``: else there
    are none."""
    return _Ordering(plan, arrays, single_tiles).found(forward, backward, turns)


class _Ordering:
    """Answers what the rules ask of a plan. ``_tensor``: by holding, the number of its tensor among all that operators make. ``_several``:
    by sum, whether several devices get it."""

    def __init__(self, plan: Plan, arrays: PlanArrays, single_tiles: bool) -> None:
        self._plan, self._arrays, self._single_tiles = plan, arrays, single_tiles
        held, outputs, sums = arrays.holdings, arrays.outputs, arrays.sums
        self._outputs = np.cumsum([0, *(len(op.outputs) for op in plan.graph.operators)])
        operator, place = np.append(sums.operator, -1)[held.sum], np.append(sums.output, -1)[held.sum]
        summed = held.sum >= 0
        operator = np.where(summed, operator, arrays.tiles.operator[held.tile])
        self._tensor = self._outputs[operator] + np.where(summed, place, outputs.place[held.output])
        self._several = np.diff(sums.devices) > 1
        self._tensor_of_fetch = self._tensor[arrays.pieces.holding[arrays.fetches.pieces[:-1]]]
        self._epilogue = self._usable_epilogue()

    def found(self, forward: Longs, backward: Longs, turns: bool) -> RankOrder:
        """The order; see ``rank_order``."""
        if self._nothing_travels():
            forward, backward = np.arange(len(forward)), backward[:0]
        forward = self._forward(forward)
        place = _places(forward)
        active = self._activity()
        again = self._again(active)
        segments = self._segments(forward, place, self._runs(again), self._answered(active))
        found = self._turns(active, segments, backward) if turns else np.zeros(0, np.int64)
        return RankOrder(self._epilogue, forward, backward, active, again, segments, found)

    def _of(self, operators: frozenset[int]) -> Bools:
        """By tile, whether its operator is one of these."""
        chosen = np.zeros(len(self._plan.graph.operators), np.bool_)
        chosen[list(operators)] = True
        return chosen[self._arrays.tiles.operator]

    def _among(self, tensors: set[str]) -> Bools:
        """By number of a tensor, whether it is one of these."""
        made, chosen = self._plan.graph.producers, np.zeros(self._outputs[-1], np.bool_)
        places = [made[name] for name in tensors if name in made]
        chosen[[self._outputs[operator] + output for operator, output in places]] = True
        return chosen

    def _usable_epilogue(self) -> LossEpilogue:
        """The epilogue, or an empty one if it stays where it is: on a single device, which waits for nobody, or if a message mixes its
        tensors with others. With micro-batches the backward pass begins at the loss's terms even so."""
        if self._single_tiles and self._plan.order is None:
            return no_epilogue(self._plan.graph)
        epilogue, carriers, mixes = epilogue_of(self._plan.graph), self._arrays.carriers, False
        if epilogue.operators and len(carriers.part):
            closes = self._among(closing_tensors(self._plan, epilogue))[self._tensor_of_fetch[self._arrays.pieces.fetch[carriers.part]]]
            closing, begins = closes.astype(np.int64), carriers.parts[:-1]
            mixed = np.minimum.reduceat(closing, begins) != np.maximum.reduceat(closing, begins)
            mixes = bool((mixed & (carriers.pattern == MESSAGE)).any())
        return kept_epilogue(self._plan, epilogue, mixes=mixes)

    def _nothing_travels(self) -> bool:
        """Whether only the loss and gradients travel between devices."""
        ends = self._among(closing_tensors(self._plan, self._epilogue) | {self._plan.graph.loss})
        summed = self._outputs[self._arrays.sums.operator] + self._arrays.sums.output
        moved = self._tensor_of_fetch[self._arrays.pieces.fetch[self._arrays.carriers.part]]
        return bool(ends[summed[self._several]].all() and ends[moved].all())

    def _forward(self, order: Longs) -> Longs:
        """The order after all rules but the first one."""
        arrays, place = self._arrays, _places(order)
        fetches, pieces, held, size = arrays.fetches, arrays.pieces, arrays.holdings, len(order)
        reader = least(arrays.readers.fetch, place[arrays.readers.tile], len(fetches.device), size)  # the first of a fetch
        first = least(held.tile[pieces.holding], reader[pieces.fetch], size, size)
        tied, summed = np.zeros(size, np.bool_), held.sum[pieces.holding]
        tied[arrays.readers.tile] = True
        tied[held.tile[pieces.holding[pieces.remote & (summed < 0)]]] = True
        tied[arrays.sums.member[rows_of(arrays.sums.members, distinct(summed[summed >= 0]))[1]]] = True
        late = ~tied & (first < size)
        sources_late = np.lexsort((place, ~late, np.where(late, first, place)))
        last = self._of(self._epilogue.operators)[sources_late]
        return sources_late[np.lexsort((_ranks(self._plan, arrays.tiles, "F")[sources_late], last))]

    def _activity(self) -> Active:
        """What has gradients. A tile hands a gradient to the fetches that it reads, these to tiles or sums, and sums to their tiles: of
        each of these, all that may reach it comes before it, if they are taken in falling order of tiles."""
        arrays = self._arrays
        readers, pieces, held, members = arrays.readers, arrays.pieces, arrays.holdings, arrays.sums.member
        tiles, fetches, sums = len(arrays.tiles.device), len(arrays.fetches.device), len(arrays.sums.operator)
        whose, carried = owners(arrays.sums.members), arrays.fetches.gradient[pieces.fetch]
        holding = pieces.holding[carried]
        source = np.where(held.sum[holding] >= 0, tiles + fetches + held.sum[holding], held.tile[holding])
        gives = np.concatenate((readers.tile, tiles + pieces.fetch[carried], tiles + fetches + whose))
        gets = np.concatenate((tiles + readers.fetch, source, members))
        tile = np.arange(tiles)
        moment = np.concatenate((4 * tile, 4 * least(readers.fetch, readers.tile, fetches, 0) - 1, 4 * most(whose, members, sums, 0) + 1))
        order = np.argsort(-moment[gives], kind="stable")
        active, seeds = bytearray(tiles + fetches + sums), self._seeds()
        for number in seeds:
            active[number] = 1
        for one, other in zip(gives[order].tolist(), gets[order].tolist(), strict=True):
            if active[one]:
                active[other] = 1
        found = np.frombuffer(active, np.bool_)
        own = found[:tiles], found[tiles : tiles + fetches] & arrays.fetches.gradient, found[tiles + fetches :]
        return Active(*own, np.array(seeds, np.int64))

    def _seeds(self) -> list[int]:
        """Tiles at which the backward pass begins."""
        graph, first = self._plan.graph, self._plan.first_tile
        seeds = [name for name in self._epilogue.seeds if name in graph.producers and graph.tensors[name].requires_grad]
        makers = {graph.producers[name][0] for name in seeds}
        tiles = ((first[maker] + tile.index, tile.replica) for maker in makers for tile in self._plan.deliveries[maker].like.tiles)
        return [tile for tile, replica in tiles if replica == 0]

    def _answered(self, active: Active) -> Bools:
        """By tile, whether its outputs, or partial results, get gradients from other devices."""
        arrays, found = self._arrays, np.zeros(len(self._arrays.tiles.device), np.bool_)
        held, sums = arrays.holdings, arrays.sums
        holding = arrays.pieces.holding[arrays.pieces.remote & active.fetches[arrays.pieces.fetch]]
        found[held.tile[holding[held.sum[holding] < 0]]] = True
        found[sums.member[rows_of(sums.members, np.flatnonzero(active.sums & self._several))[1]]] = True
        return found

    def _again(self, active: Active) -> Again:
        """What runs twice."""
        again, none = active.tiles & self._of(self._plan.recomputed_operators), np.zeros(0, np.int64)
        if not again.any():
            return Again(again, none, none, none, none)
        arrays, pieces = self._arrays, self._arrays.pieces
        maker = np.where(arrays.holdings.sum[pieces.holding] < 0, arrays.holdings.tile[pieces.holding], -1)
        remade = again & ~self._of(self._plan.light_operators)
        remade, remote = (maker >= 0) & remade[maker], arrays.fetches.remote[pieces.fetch]
        gathered = self._of(self._plan.gathered_again)[maker]
        pairs = list[Longs]()
        for own, reads in ((remade & ~remote, again), (remade & remote & gathered, active.tiles)):
            piece = np.flatnonzero(own)
            place, row = rows_of(arrays.fetches.readers, pieces.fetch[piece])
            reader = arrays.readers.tile[row]
            pairs += [maker[piece][place][reads[reader]], reader[reads[reader]]]
        members, readers = self._summed_again(active)
        return Again(again, pairs[0], pairs[1], np.append(pairs[2], members), np.append(pairs[3], readers))

    def _summed_again(self, active: Active) -> tuple[Longs, Longs]:
        """Pairs of a tile and of one that reads a sum, made a second time, to which the first contributes."""
        arrays, chosen = self._arrays, np.zeros(len(self._plan.graph.operators) + 1, np.bool_)
        chosen[list(self._plan.summed_again)] = True
        held = arrays.holdings.sum[arrays.pieces.holding]
        piece = np.flatnonzero(chosen[np.append(arrays.sums.operator, -1)[held]])
        place, row = rows_of(arrays.fetches.readers, arrays.pieces.fetch[piece])
        reader, summed = arrays.readers.tile[row], held[piece][place]
        reader, summed = reader[active.tiles[reader]], summed[active.tiles[reader]]
        place, row = rows_of(arrays.sums.members, summed)
        return arrays.sums.member[row], reader[place]

    def _runs(self, again: Again) -> Longs:
        """By tile, the lowest tile of its run, or -1 if it does not run twice. Linked tiles take the lower one's number, and that one's,
        until all agree."""
        run, together = np.arange(len(again.tiles)), ~self._of(self._plan.light_operators)[again.reader]
        one, other = again.maker[together], again.reader[together]
        while (run[one] != run[other]).any():
            low = np.minimum(run[one], run[other])
            for high in (run[one], run[other]):
                np.minimum.at(run, high, low)
            run = run[run]
        return np.where(again.tiles, run, -1)

    def _segments(self, order: Longs, place: Longs, run: Longs, answered: Bools) -> Segments:
        """A tile begins a segment, or goes on with that of the tile before it on its device."""
        device = self._arrays.tiles.device[order]
        own = order[np.argsort(device, kind="stable")]  # device by device
        before, begins = own[:-1], self._waits(place)[own]
        begins[: len(begins) if self._single_tiles else 1] = True
        epilogue, divided = self._of(self._epilogue.operators), self._of(self._plan.divided)
        begins[1:] |= (self._arrays.tiles.device[own[1:]] != self._arrays.tiles.device[before]) | answered[before]
        begins[1:] |= (epilogue[own[1:]] & ~epilogue[before]) | (run[own[1:]] != run[before]) | divided[own[1:]] | divided[before]
        for kind in ("F", "B") if self._plan.order is not None else ():
            rank = _ranks(self._plan, self._arrays.tiles, kind)
            begins[1:] |= rank[own[1:]] != rank[before]
        first = own[begins]
        sequence = np.argsort(place[first])
        number = np.empty(len(order), np.int64)
        number[own] = _places(sequence)[np.cumsum(begins) - 1]
        return Segments(number, first[sequence], place[first[sequence]])

    def _waits(self, place: Longs) -> Bools:
        """By tile, whether it is the first to read something that is received or summed, or what is gathered for its device."""
        arrays, found, size = self._arrays, np.zeros(len(place), np.bool_), len(self._plan.syncs)
        tiles, readers, pieces = np.argsort(place), arrays.readers, arrays.pieces
        comes = np.zeros(len(arrays.fetches.device), np.bool_)
        comes[pieces.fetch[pieces.remote | (arrays.holdings.sum[pieces.holding] >= 0)]] = True
        found[tiles[least(readers.fetch, place[readers.tile], len(comes), 0)[comes]]] = True
        gathers = [number for number, sync in enumerate(self._plan.syncs) if sync.contract.gathers_values]
        uses = [(number, tile) for number in gathers for tile, _ in self._plan.syncs[number].uses]
        number, tile = np.array(uses, np.int64).reshape(-1, 2).T
        first = least(arrays.tiles.device[tile] * size + number, place[tile], self._plan.device_count * size, -1)
        found[tiles[first[first >= 0]]] = True
        return found

    def _turns(self, active: Active, segments: Segments, backward: Longs) -> Longs:
        """By segment, its turn, from 0 on."""
        count, unknown = len(segments.first), len(backward)
        begun = np.full(len(segments.number), unknown)
        begun[backward] = np.arange(unknown)
        first = least(segments.number, begun, count, unknown)
        nodes = count + len(self._arrays.carriers.pattern) + len(self._arrays.sums.operator)
        return _turns(np.lexsort((-segments.start, first)), nodes, *self._needs(active, segments))

    def _needs(self, active: Active, segments: Segments) -> tuple[Longs, Longs]:
        """(nodes, nodes that need their gradients), sorted: segments, then carriers, then sums."""
        arrays, number = self._arrays, segments.number
        held, pieces, readers, sums = arrays.holdings, arrays.pieces, arrays.readers, arrays.sums
        count, nodes = len(segments.first), len(segments.first) + len(arrays.carriers.pattern) + len(sums.operator)
        own = np.flatnonzero(active.fetches[pieces.fetch])
        holding, carrier = pieces.holding[own], pieces.carrier[own]
        source = np.where(held.sum[holding] >= 0, nodes - len(sums.operator) + held.sum[holding], number[held.tile[holding]])
        carried = carrier >= 0
        to = np.where(carried, count + carrier, source)
        place, row = rows_of(arrays.fetches.readers, pieces.fetch[own])
        reads = active.tiles[readers.tile[row]]
        summed, member = rows_of(sums.members, own_sums := np.flatnonzero(active.sums))
        before = (to[carried], number[readers.tile[row[reads]]], nodes - len(sums.operator) + own_sums[summed])
        after = (source[carried], to[place[reads]], number[sums.member[member]])
        pairs = distinct(np.concatenate(before) * nodes + np.concatenate(after))
        one, other = pairs // nodes, pairs % nodes
        return one[one != other], other[one != other]


def _turns(segments: Longs, nodes: int, before: Longs, after: Longs) -> Longs:
    """By segment, its turn: the first of those that wait for nothing is next. ``segments``: which of two goes first. ``before``, ``after``:
    pairs of nodes, segments first; the others have no turn, and are taken at once."""
    count, rank, by_rank = len(segments), _places(segments).tolist(), segments.tolist()
    begins, behind = np.searchsorted(before, np.arange(nodes + 1)).tolist(), after.tolist()
    waiting = np.bincount(after, minlength=nodes).tolist()
    ready = [rank[node] for node in range(count) if not waiting[node]]
    heapq.heapify(ready)
    passed = [node for node in range(count, nodes) if not waiting[node]]
    found = list[int]()
    while ready or passed:
        if passed:
            node = passed.pop()
        else:
            found.append(node := by_rank[heapq.heappop(ready)])
        for other in behind[begins[node] : begins[node + 1]]:
            waiting[other] -= 1
            if not waiting[other] and other < count:
                heapq.heappush(ready, rank[other])
            elif not waiting[other]:
                passed.append(other)
    return _places(np.array(found, np.int64))


def _ranks(plan: Plan, tiles: Tiles, kind: Pass) -> Longs:
    """By tile, ``Plan.rank`` of its pass."""
    if plan.order is None:
        return np.zeros(len(tiles.operator), np.int64)
    return pass_ranks(plan.order, kind, tiles.operator, tiles.part)


def pass_ranks(order: PassOrder, kind: Pass, operators: Longs, parts: Longs) -> Longs:
    """``PassOrder.rank`` of passes of parts of operators, worked out once for operators whose passes are in the same actions."""
    cut, first = order.cut, dict[object, int]()
    places = enumerate(zip(order.backward, order.weights, order.chunks, strict=True))
    alike = [first.setdefault((position in cut.graph.epilogue, cut.parts(position), own), position) for position, own in places]
    ranks = {position: [order.rank(kind, position, part) for part in range(cut.count)] for position in first.values()}
    return np.array([ranks[position] for position in alike], np.int64)[operators, parts]


def _places(order: Longs) -> Longs:
    """Where each number comes in an order of all."""
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return places
