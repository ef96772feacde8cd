"""In which order ranks run a plan's passes, on arrays: ``plan.running`` once more, by the same rules, for predictions.

``RunOrder`` is what ranks follow; its names and comments say why. Here tiles, segments and turns are numbers in arrays, and only what must
see one thing after the other (where gradients flow, turns of segments) is a loop.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from soap.plan.pass_order import Pass, PassOrder
from soap.plan.plan import Plan
from soap.plan.running.epilogue import LossEpilogue, closing_tensors, epilogue_of, kept_epilogue
from soap.simulator.memory.grouped import Bools, Longs, distinct, least, most, owners, rows_of
from soap.simulator.memory.plan_arrays import MESSAGE, PlanArrays, Tiles


class Segments(NamedTuple):
    """``number``: by tile, its segment. By segment, in the order in which they begin: ``first``, its first tile, and ``start``, the place
    of that tile in the order of all."""

    number: Longs
    first: Longs
    start: Longs


class RankOrder(NamedTuple):
    """``forward``: tiles in the order in which they run. ``active``: by tile, whether it has a backward pass. ``turns``: by segment, when
    it runs backward. ``second_turns``: (turn, segment that runs forward a second time right before it), in their order. With micro-batches
    ``Plan.order`` decides, and there are neither."""

    forward: Longs
    active: Bools
    segments: Segments
    turns: Longs
    second_turns: Longs


def rank_order(plan: Plan, arrays: PlanArrays, forward: Longs, backward: Longs) -> RankOrder:
    """The order in which ranks run a plan's passes. ``forward``: all tiles, ``backward``: those with a backward pass, as their passes begin
    in a simulation."""
    return _Ordering(plan, arrays).found(forward, backward)


class _Active(NamedTuple):
    """Which tiles, fetches and sums have gradients."""

    tiles: Bools
    fetches: Bools
    sums: Bools


class _Ordering:
    """Answers what the rules ask of a plan. ``_tensor``: by holding, the number of its tensor among all that operators make. ``_several``:
    by sum, whether several devices get it."""

    def __init__(self, plan: Plan, arrays: PlanArrays) -> None:
        self._plan, self._arrays = plan, arrays
        held, outputs, sums = arrays.holdings, arrays.outputs, arrays.sums
        self._outputs = np.cumsum([0, *(len(op.outputs) for op in plan.graph.operators)])
        operator, place = np.append(sums.operator, -1)[held.sum], np.append(sums.output, -1)[held.sum]
        summed = held.sum >= 0
        operator = np.where(summed, operator, arrays.tiles.operator[held.tile])
        self._tensor = self._outputs[operator] + np.where(summed, place, outputs.place[held.output])
        self._several = np.diff(sums.devices) > 1
        self._tensor_of_fetch = self._tensor[arrays.pieces.holding[arrays.fetches.pieces[:-1]]]
        self._epilogue = self._usable_epilogue()

    def found(self, forward: Longs, backward: Longs) -> RankOrder:
        """The order; see ``rank_order``."""
        if self._nothing_travels():
            forward, backward = np.arange(len(forward)), backward[:0]
        forward = self._forward(forward)
        place = _places(forward)
        active = self._activity()
        again = active.tiles & self._of(self._plan.recomputed_operators)
        maker, reader = self._links(again)
        segments = self._segments(forward, place, self._runs(again, maker, reader), self._answered(active))
        none = np.zeros(0, np.int64)
        if self._plan.order is not None:
            return RankOrder(forward, active.tiles, segments, none, none.reshape(0, 2))
        turns = self._turns(active, segments, backward)
        return RankOrder(forward, active.tiles, segments, turns, _second_turns(segments, turns, again, maker, reader))

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
        """``usable_epilogue``."""
        epilogue, carriers, mixes = epilogue_of(self._plan.graph), self._arrays.carriers, False
        if epilogue.operators and len(carriers.part):
            closes = self._among(closing_tensors(self._plan, epilogue))[self._tensor_of_fetch[self._arrays.pieces.fetch[carriers.part]]]
            closing, begins = closes.astype(np.int64), carriers.parts[:-1]
            mixed = np.minimum.reduceat(closing, begins) != np.maximum.reduceat(closing, begins)
            mixes = bool((mixed & (carriers.pattern == MESSAGE)).any())
        return kept_epilogue(self._plan, epilogue, mixes=mixes)

    def _nothing_travels(self) -> bool:
        """``model_order_if_nothing_travels``."""
        ends = self._among(closing_tensors(self._plan, self._epilogue) | {self._plan.graph.loss})
        summed = self._outputs[self._arrays.sums.operator] + self._arrays.sums.output
        moved = self._tensor_of_fetch[self._arrays.pieces.fetch[self._arrays.carriers.part]]
        return bool(ends[summed[self._several]].all() and ends[moved].all())

    def _forward(self, order: Longs) -> Longs:
        """``forward_order``."""
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

    def _activity(self) -> _Active:
        """``find_activity``. A tile hands a gradient to the fetches that it reads, these to tiles or sums, and sums to their tiles: of each
        of these, all that may reach it comes before it, if they are taken in falling order of tiles."""
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
        active = bytearray(tiles + fetches + sums)
        for number in self._seeds():
            active[number] = 1
        for one, other in zip(gives[order].tolist(), gets[order].tolist(), strict=True):
            if active[one]:
                active[other] = 1
        found = np.frombuffer(active, np.bool_)
        return _Active(found[:tiles], found[tiles : tiles + fetches] & arrays.fetches.gradient, found[tiles + fetches :])

    def _seeds(self) -> list[int]:
        """Tiles at which the backward pass begins."""
        graph, first = self._plan.graph, self._plan.first_tile
        seeds = [name for name in self._epilogue.seeds if name in graph.producers and graph.tensors[name].requires_grad]
        makers = {graph.producers[name][0] for name in seeds}
        tiles = ((first[maker] + tile.index, tile.replica) for maker in makers for tile in self._plan.deliveries[maker].like.tiles)
        return [tile for tile, replica in tiles if replica == 0]

    def _answered(self, active: _Active) -> Bools:
        """``answered_from_afar``, by tile."""
        arrays, found = self._arrays, np.zeros(len(self._arrays.tiles.device), np.bool_)
        held, sums = arrays.holdings, arrays.sums
        holding = arrays.pieces.holding[arrays.pieces.remote & active.fetches[arrays.pieces.fetch]]
        found[held.tile[holding[held.sum[holding] < 0]]] = True
        found[sums.member[rows_of(sums.members, np.flatnonzero(active.sums & self._several))[1]]] = True
        return found

    def _links(self, again: Bools) -> tuple[Longs, Longs]:
        """(tiles, tiles whose second runs read what second runs of these make): ``find_recomputation``. ``again``: those that run twice."""
        none = np.zeros(0, np.int64)
        if not again.any():
            return none, none
        arrays, pieces = self._arrays, self._arrays.pieces
        maker = np.where(arrays.holdings.sum[pieces.holding] < 0, arrays.holdings.tile[pieces.holding], -1)
        remade = again & ~self._of(self._plan.light_operators)
        own = np.flatnonzero((maker >= 0) & remade[maker] & ~arrays.fetches.remote[pieces.fetch])
        place, row = rows_of(arrays.fetches.readers, pieces.fetch[own])
        reader = arrays.readers.tile[row]
        return maker[own][place][again[reader]], reader[again[reader]]

    def _runs(self, again: Bools, maker: Longs, reader: Longs) -> Longs:
        """By tile, the lowest tile of its run, or -1 if it does not run twice: ``Recomputation.run``. Linked tiles take the lower one's
        number, and that one's, until all agree."""
        run, together = np.arange(len(again)), ~self._of(self._plan.light_operators)[reader]
        one, other = maker[together], reader[together]
        while (run[one] != run[other]).any():
            low = np.minimum(run[one], run[other])
            for high in (run[one], run[other]):
                np.minimum.at(run, high, low)
            run = run[run]
        return np.where(again, run, -1)

    def _segments(self, order: Longs, place: Longs, run: Longs, answered: Bools) -> Segments:
        """``cut_segments``. A tile begins a segment, or goes on with that of the tile before it on its device."""
        device = self._arrays.tiles.device[order]
        own = order[np.argsort(device, kind="stable")]  # device by device
        before, begins = own[:-1], self._waits(place)[own]
        begins[:1] = True
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

    def _turns(self, active: _Active, segments: Segments, backward: Longs) -> Longs:
        """``backward_turns``."""
        count, unknown = len(segments.first), len(backward)
        begun = np.full(len(segments.number), unknown)
        begun[backward] = np.arange(unknown)
        first = least(segments.number, begun, count, unknown)
        nodes = count + len(self._arrays.carriers.pattern) + len(self._arrays.sums.operator)
        return _turns(np.lexsort((-segments.start, first)), nodes, *self._needs(active, segments))

    def _needs(self, active: _Active, segments: Segments) -> tuple[Longs, Longs]:
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


def _second_turns(segments: Segments, turns: Longs, again: Bools, maker: Longs, reader: Longs) -> Longs:
    """``RunOrder.second_turns``."""
    count, number = len(turns), segments.number
    own = distinct(number[again])
    pairs = distinct(number[reader] * count + number[maker])
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
    found = np.array([(at, segment) for segment, at in turn.items()], np.int64).reshape(-1, 2)
    return found[np.lexsort((segments.start[found[:, 1]], found[:, 0]))]


def _ranks(plan: Plan, tiles: Tiles, kind: Pass) -> Longs:
    """By tile, ``Plan.rank`` of its pass."""
    if plan.order is None:
        return np.zeros(len(tiles.operator), np.int64)
    return pass_ranks(plan.order, kind, tiles.operator, tiles.part)


def pass_ranks(order: PassOrder, kind: Pass, operators: Longs, parts: Longs) -> Longs:
    """``PassOrder.rank`` of passes of parts of operators, worked out once for equal ones."""
    scale = order.cut.count
    keys, group = np.unique(operators * scale + parts, return_inverse=True)
    return np.array([order.rank(kind, *divmod(key, scale)) for key in keys.tolist()], np.int64)[group]


def _places(order: Longs) -> Longs:
    """Where each number comes in an order of all."""
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return places
