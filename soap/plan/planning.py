"""From a strategy to a plan: which tile runs where, what travels, what is summed, who owns which shard. No costs, no torch.

A ``PlanBuilder`` caches what depends on one operator's configuration alone (``OperatorPart``), on its and its readers' configurations
(``Delivery``), and on the configurations of one parameter's users. Cached positions count from the operator's own first tile, so building
a plan is mostly adding offsets. A search should keep one ``PlanBuilder`` for its graph and cluster.

A reduce-scatter is possible where the readers on each device need only a part of the sum. It is chosen if the busiest device then receives
fewer bytes. With B bytes on n devices, a ring all-reduce makes each device receive 2(n-1)/n * B. A reduce-scatter makes it receive n-1
partial results of its cell, and then what its readers need outside of the cell. The backward pass moves the same bytes as the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, combinations, pairwise, starmap
from math import prod
from typing import Any, NamedTuple, TypeVar, overload
from weakref import WeakValueDictionary

from soap.cluster.topology import Topology
from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph, TensorKind
from soap.model.likeness import alike_operators
from soap.model.regions import Box, Interval, cells, contains, intersect, subtract, volume, whole
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.coverage import HolderIndex
from soap.plan.delivery import Carriers, Delivery, LocalFetch, PlacedDelivery, Reader
from soap.plan.plan import Fetch, Holding, Part, Piece, Plan, Reduction
from soap.plan.row_counts import sparse_lookup_operators
from soap.plan.scheduling import Orders
from soap.plan.syncs.keeping import Cell, Keeping
from soap.plan.syncs.represented import Represented
from soap.plan.tiling import Tile, tiles_of
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.marks import with_mark
from soap.strategy.recomputation import STAYS


def choose_cells(box: Box, reads: Sequence[Sequence[Box]]) -> tuple[Box, ...]:
    """One cell per device; the cells are disjoint and cover ``box``. () if an all-reduce is better, or no cells are found.

    ``reads[i]``: the regions of the sum that tiles on the group's i-th device read.
    """
    if not box or len(reads) < 2:
        return ()
    inside = [[part for read in own if (part := intersect(read, box)) is not None] for own in reads]
    hulls = [_hull(own) for own in inside]
    cells = _as_they_are(box, hulls) or _cut_along_one_dimension(box, hulls)
    if not cells:
        return ()
    count = len(reads)
    received = [
        (count - 1) * volume(cell) + sum(volume(read) - _common(read, cell) for read in own)
        for cell, own in zip(cells, inside, strict=True)
    ]
    return cells if count * max(received) < 2 * (count - 1) * volume(box) else ()


def _hull(boxes: Sequence[Box]) -> Box | None:
    """The smallest box that contains them all."""
    if not boxes:
        return None
    return tuple((min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in zip(*boxes, strict=True))


def _common(a: Box, b: Box) -> int:
    found = intersect(a, b)
    return 0 if found is None else volume(found)


def _as_they_are(box: Box, hulls: Sequence[Box | None]) -> tuple[Box, ...]:
    """What the devices read, if these regions are disjoint and together make up the box; else ()."""
    found = [hull for hull in hulls if hull is not None]
    if sum(map(volume, found)) != volume(box) or any(intersect(a, b) is not None for a, b in combinations(found, 2)):
        return ()
    return tuple(_empty(box) if hull is None else hull for hull in hulls)


def _cut_along_one_dimension(box: Box, hulls: Sequence[Box | None]) -> tuple[Box, ...]:
    """Cells along one dimension, in the order in which devices read it. Borders are in the middle of overlaps (halos) and gaps."""
    found = {device: hull for device, hull in enumerate(hulls) if hull is not None}
    if not found:
        return ()
    dim = max(range(len(box)), key=lambda d: (len({hull[d] for hull in found.values()}), -d))
    order = sorted(found, key=lambda device: found[device][dim])
    intervals = [found[device][dim] for device in order]
    if any(a[0] >= b[0] or a[1] >= b[1] for a, b in pairwise(intervals)):
        return ()
    cells = [_empty(box)] * len(hulls)
    for device, cell in zip(order, _borders(box[dim], intervals), strict=True):
        cells[device] = (*box[:dim], cell, *box[dim + 1 :])
    return tuple(cells)


def _borders(whole: Interval, intervals: Sequence[Interval]) -> list[Interval]:
    edges = [whole[0], *((a[1] + b[0]) // 2 for a, b in pairwise(intervals)), whole[1]]
    return list(pairwise(edges))


def _empty(box: Box) -> Box:
    return tuple((start, start) for start, _ in box)


T = TypeVar("T")
_JOINED = ("tiles", "holdings", "fetches", "messages", "exchanges", "reductions")
"""Fields of plans that are those of all deliveries."""

Use = tuple[int, int]
"""(tile, operand position)."""
Read = tuple[str, Box, int, tuple[Use, ...]]
"""A region of an activation that tiles of one operator need on one device: (tensor, box, device, the tiles that read it)."""
Region = tuple[str, Box, int]
"""A region of an activation that is needed on one device: (tensor, box, device)."""


@dataclass(frozen=True)
class OperatorPart:
    """What one operator does under one configuration, whoever reads its outputs. Positions count from its own first tile.

    ``reductions``: its sums, all as all-reduces; ``holdings`` and ``holders`` are what devices hold after these.
    """

    tiles: tuple[Tile, ...]
    reductions: tuple[Reduction, ...]
    holdings: tuple[Holding, ...]
    holders: Mapping[str, HolderIndex]
    reads: tuple[Read, ...]


class Sums(NamedTuple):
    """What devices sum, and have in common. ``groups``: sets of devices that sum partial results. ``regions``: how a region of a parameter
    is to be synchronized, and the region."""

    groups: tuple[tuple[int, ...], ...]
    regions: tuple[tuple[SyncConfig, Cell], ...]


class PlanBuilder:
    """Builds plans for one graph on one cluster, keeping what consecutive strategies have in common."""

    def __init__(
        self,
        graph: OperatorGraph,
        topology: Topology,
        training: PlannedTraining = PLAIN,
        microbatches: int = 1,
        represented: Represented | None = None,
    ) -> None:
        """``microbatches``: of the strategies that are built most often; for others it makes builders of their own. ``represented``: of
        plans of two copies, for which devices of the cluster theirs stand."""
        self.graph = graph
        self.topology = topology
        self.training = training
        self.microbatches = microbatches
        self._orders = Orders(graph)
        self._cut = self._orders.cut(microbatches)
        self._others: dict[int, PlanBuilder] = {}
        size = max(1024, 8 * len(graph.operators))
        self._part = lru_cache(size)(self._make_part)
        self._delivery = lru_cache(size)(self._place)
        self._lying = lru_cache(size)(self._lie)
        self._likes: WeakValueDictionary[Hashable, Delivery] = WeakValueDictionary()
        self._cut_alike: dict[Hashable, tuple[tuple[int, ...], tuple[Cell, ...]]] = {}
        self._cells = lru_cache(size)(self._make_cells)
        self._distances = lru_cache(None)(self._make_distances)
        self._accelerators = frozenset(number for number, device in enumerate(topology.devices) if device.type.kind != "cpu")
        self._represented = represented
        self._keeping = Keeping(graph, topology, represented, training.wrapped)
        self._readers = [_readers(graph, position) for position in range(len(graph.operators))]
        self._links = [_links(graph, position, own) for position, own in enumerate(self._readers)]
        self._alike = lru_cache(1)(lambda: alike_operators(graph, footprints=False))
        self._kinds = lru_cache(1)(lambda: self._find_kinds())

    def __reduce__(self) -> tuple[object, ...]:
        # another process starts with empty caches
        return (PlanBuilder, (self.graph, self.topology, self.training, self.microbatches, self._represented))

    def build(self, strategy: Strategy, *, empty_tiles: bool = False) -> Plan:
        """The plan of a strategy. StrategyError if it is stale, or does not fit the graph or the cluster. ``empty_tiles``: see
        ``Strategy.validate``."""
        strategy.require_exact()
        strategy.validate(self.graph, self.topology.device_count, empty_tiles=empty_tiles)
        if strategy.microbatches != self.microbatches:
            return self._other(strategy.microbatches).build(strategy, empty_tiles=empty_tiles)
        configs = [_divided(strategy.operators[op.name]) for op in self.graph.operators]
        found = [
            self._delivery(position, config, tuple([configs[reader] for reader in self._readers[position]]))
            for position, config in enumerate(configs)
        ]
        first = {name: _offsets([len(getattr(own.like, name)) for own in found]) for name in _JOINED}
        tiles = Later(first["tiles"][-1], lambda: chain.from_iterable(own.tiles() for own in found))
        first_tile = first["tiles"][:-1]
        order = self._orders.order(strategy)
        shards, syncs, kept = self._keeping.keep(first_tile, self._regions(configs), strategy, order)

        def joined(name: str, shifted: Callable[[Delivery, int], Iterable[T]]) -> Sequence[T]:
            own = ((delivery.own, position) for position, delivery in enumerate(found))
            return Later(first[name][-1], lambda: chain.from_iterable(starmap(shifted, own)))

        return Plan(
            strategy=strategy,
            graph=self.graph,
            device_count=self.topology.device_count,
            accelerators=self._accelerators,
            tiles=tiles,
            first_tile=first_tile,
            holdings=joined("holdings", lambda own, i: _shifted_holdings(own, first_tile[i], first["reductions"][i])),
            fetches=joined("fetches", lambda own, i: _shifted_fetches(own, first["holdings"][i], first_tile)),
            messages=joined(
                "messages", lambda own, i: [replace(m, parts=_shifted_parts(m.parts, first["fetches"][i])) for m in own.messages]
            ),
            exchanges=joined(
                "exchanges", lambda own, i: [replace(e, parts=_shifted_parts(e.parts, first["fetches"][i])) for e in own.exchanges]
            ),
            reductions=joined(
                "reductions", lambda own, i: [replace(r, tiles=tuple([first_tile[i] + t for t in r.tiles])) for r in own.reductions]
            ),
            shards=shards,
            syncs=syncs,
            sparse_lookups=sparse_lookup_operators(self.graph, strategy.parameters),
            training=self.training,
            order=order,
            own_samples=self.topology.own_samples,
            deliveries=tuple(found),
            kept=kept,
        )

    def delivery(self, position: int, strategy: Strategy) -> Delivery:
        """What one operator leaves on devices for its readers by a legal strategy."""
        if strategy.microbatches != self.microbatches:
            return self._other(strategy.microbatches).delivery(position, strategy)
        own, *readers = (_divided(strategy.operators[self.graph.operators[p].name]) for p in (position, *self._readers[position]))
        return self._delivery(position, own, tuple(readers)).own

    def sums(self, strategy: Strategy) -> Sums:
        """Who sums what by a legal strategy in one micro-batch, without a plan: of operators that are alike and placed alike once."""
        configs = [_divided(strategy.operators[op.name]) for op in self.graph.operators]
        seen, done = set[Hashable](), set[str]()
        groups, regions = dict[tuple[int, ...], None](), list[tuple[SyncConfig, Cell]]()
        for position, (op, config, same) in enumerate(zip(self.graph.operators, configs, self._alike(), strict=True)):
            names = [operand.tensor for operand in op.parameters]
            tied = any(len(self.graph.parameter_users[name]) > 1 for name in names)
            placed = config.degrees, id(config.devices), config.replicas, config.shares
            key = position if tied else same, *placed, *map(strategy.sync, names)
            if key in seen:
                continue
            seen.add(key)
            groups.update(dict.fromkeys(reduction.devices for reduction in self._part(position, config).reductions))
            for name in names:
                users = sorted({user for user, _ in self.graph.parameter_users[name]})
                cells = () if name in done else self._cells(name, tuple((user, configs[user]) for user in users))
                sync = strategy.sync(name)
                regions += [(sync, cell) for cell in cells if self._keeping.used(name, cell, sync) is not None]
                done.add(name)
        return Sums(tuple(groups), tuple(regions))

    def _other(self, microbatches: int) -> PlanBuilder:
        """A builder of plans with another number of micro-batches."""
        if microbatches not in self._others:
            self._others[microbatches] = PlanBuilder(self.graph, self.topology, self.training, microbatches, self._represented)
        return self._others[microbatches]

    def _make_part(self, position: int, config: OpConfig) -> OperatorPart:
        tiles = tuple(tiles_of(self.graph, position, config, self._cut))
        reductions = tuple(_reductions(self._cut, position, config, tiles))
        holdings = tuple(_holdings(self.graph, position, tiles, reductions))
        holders = _holders(self.graph, position, holdings)
        return OperatorPart(tiles, reductions, holdings, holders, _reads(self.graph, position, tiles))

    def _find_kinds(self) -> list[Hashable]:
        """By operator, a value that is equal for those of which tiles and deliveries differ in names alone."""
        whole = self.graph.copies_of
        of_whole = self._alike() if whole is None else alike_operators(whole, footprints=False)
        sparse = {position for name in self.graph.sparse for position, _ in self.graph.parameter_users.get(name, ())}
        kinds = enumerate(zip(self._alike(), of_whole, self._cut.factors, strict=True))
        return [(position if position in sparse else -1, position in self.graph.epilogue, *kind) for position, kind in kinds]

    def _place(self, position: int, config: OpConfig, readers: tuple[OpConfig, ...]) -> PlacedDelivery:
        """The operator's delivery, like one that is known if there is any."""
        kinds, places = self._kinds(), (position, *self._readers[position])
        devices, lying = self._lying(config.devices, *(own.devices for own in readers))
        split = tuple([(own.degrees, own.replicas, own.shares) for own in (config, *readers)])
        key = tuple([kinds[own] for own in places]), self._links[position], split, lying
        like = self._likes.get(key)
        if like is None:
            like = self._likes[key] = self._make_delivery(position, config, readers)
        theirs, ours = ([out.tensor for out in self.graph.operators[own].outputs] for own in (like.position, position))
        return PlacedDelivery(like, position, places[1:], devices, dict(zip(theirs, ours, strict=True)))

    def _lie(self, *devices: tuple[int, ...]) -> tuple[tuple[int, ...], Hashable]:
        """All of these devices, ascending, and how they lie: which are the same in these rows, and how far they are from each other."""
        found = tuple(sorted({device for own in devices for device in own}))
        place = {device: number for number, device in enumerate(found)}
        apart = tuple([tuple([self._distances(device)[other] for other in found]) for device in found])
        return found, (tuple([tuple([place[device] for device in own]) for own in devices]), apart)

    def _make_delivery(self, position: int, config: OpConfig, readers: tuple[OpConfig, ...]) -> Delivery:
        """Choose the form of the operator's sums, and fetch what its readers need.

        ``readers``: configurations of the operators that read its outputs, in the graph's order.
        """
        part = self._part(position, config)
        reads = self._gather_reads(position, readers)
        reductions = part.reductions
        if config.replicas == 1:  # with replicas, a device's readers may take their values from another replica's sum
            reductions = tuple([self._scattered(reduction, reads) for reduction in part.reductions])
        holdings, holders = part.holdings, part.holders
        if any(reduction.cells for reduction in reductions):
            holdings = tuple(_holdings(self.graph, position, part.tiles, reductions))
            holders = _holders(self.graph, position, holdings)
        read = {reader: self._part(reader, own).tiles for reader, own in zip(self._readers[position], readers, strict=True)}
        closing = config.replicas > 1 and not self.graph.epilogue.isdisjoint(read)
        first = _holders(self.graph, position, holdings, part.tiles) if closing else holders
        fetches = []
        for (tensor, box, device), consumers in reads.items():
            chosen = first if closing and self._begins_backward(consumers, read) else holders
            pieces = chosen[tensor].cover(box, device, self._distances(device))
            fetches.append(LocalFetch(tensor, box, device, pieces, tuple(consumers)))
        carriers = Carriers(self.graph, fetches, part.tiles, holdings, reductions)
        devices, _ = self._lying(config.devices, *(own.devices for own in readers))
        moved = tuple(carriers.messages), tuple(carriers.exchanges)
        return Delivery(part.tiles, reductions, holdings, tuple(fetches), *moved, position, read, devices)

    def _begins_backward(self, consumers: Iterable[Reader], read: Mapping[int, Sequence[Tile]]) -> bool:
        """Whether replica 0 of an operator of the loss's epilogue is among these. It reads from replica 0, wherever that is: ranks begin
        the backward pass at replica 0 of the loss's terms. ``read``: by operator, its tiles."""
        return any(reader in self.graph.epilogue and read[reader][tile].replica == 0 for reader, tile, _ in consumers)

    def _scattered(self, reduction: Reduction, reads: Mapping[Region, Sequence[Reader]]) -> Reduction:
        """The reduction as a reduce-scatter if that moves fewer bytes to the readers on its devices, else as it is."""
        if len(reduction.devices) < 2:
            return reduction
        tensor = self.graph.operators[reduction.operator].outputs[reduction.output].tensor
        needed: dict[int, list[Box]] = {device: [] for device in reduction.devices}
        for read, box, device in reads:
            if read == tensor and device in needed:
                needed[device].append(box)
        cells = choose_cells(reduction.box, [needed[device] for device in reduction.devices])
        return replace(reduction, cells=cells) if cells else reduction

    def _gather_reads(self, position: int, readers: Sequence[OpConfig]) -> dict[Region, list[Reader]]:
        """Distinct regions of the operator's outputs, in the order of their first readers, each with all its readers."""
        outputs = {out.tensor for out in self.graph.operators[position].outputs}
        gathered: dict[Region, list[Reader]] = {}
        for reader, config in zip(self._readers[position], readers, strict=True):
            for tensor, box, device, uses in self._part(reader, config).reads:
                if tensor in outputs:
                    gathered.setdefault((tensor, box, device), []).extend((reader, tile, place) for tile, place in uses)
        return gathered

    def _regions(self, configs: Sequence[OpConfig]) -> Iterator[tuple[str, tuple[Cell, ...]]]:
        """Each parameter with the cells into which its users cut it."""
        users = self.graph.parameter_users
        for tensor in self.graph.parameters:
            operators = sorted({position for position, _ in users.get(tensor.name, ())})
            yield tensor.name, self._cells(tensor.name, tuple((position, configs[position]) for position in operators))

    def _make_distances(self, device: int) -> tuple[int, ...]:
        return tuple(self.topology.distance(source, device) for source in range(self.topology.device_count))

    def _make_cells(self, parameter: str, configs: tuple[tuple[int, OpConfig], ...]) -> tuple[Cell, ...]:
        """``_cut_parameter``, of one that a single operator reads like that of one which is alike on devices that lie alike."""
        if len(configs) != 1:
            return self._cut_parameter(parameter, configs)
        ((position, config),) = configs
        places = tuple([k for k, operand in enumerate(self.graph.operators[position].parameters) if operand.tensor == parameter])
        devices, lying = self._lying(config.devices)
        key = self._kinds()[position], places, config.degrees, config.replicas, config.shares, lying
        if key not in self._cut_alike:
            self._cut_alike[key] = devices, self._cut_parameter(parameter, configs)
        theirs, found = self._cut_alike[key]
        on = dict(zip(theirs, devices, strict=True))
        return tuple([
            (box, tuple([on[device] for device in own]), tuple([(position, tile, place) for _, tile, place in uses]))
            for box, own, uses in found
        ])  # fmt: skip

    def _cut_parameter(self, parameter: str, configs: tuple[tuple[int, OpConfig], ...]) -> tuple[Cell, ...]:
        """Cut a parameter along the borders of all regions that tiles of these operators read."""
        needed: dict[Box, list[tuple[int, int, int, int]]] = {}
        for position, config in configs:
            places = [k for k, operand in enumerate(self.graph.operators[position].parameters) if operand.tensor == parameter]
            for tile in self._part(position, config).tiles:
                for place in places:
                    if volume(tile.parameters[place]) > 0:
                        needed.setdefault(tile.parameters[place], []).append((position, tile.index, place, tile.device))
        result: list[Cell] = []
        grid = cells(needed)
        disjoint = set(grid) == needed.keys()
        for cell in grid:
            users = needed[cell] if disjoint else [use for box, uses in needed.items() if contains(box, cell) for use in uses]
            devices = tuple(sorted({device for *_, device in users}))
            result.append((cell, devices, tuple(sorted((position, tile, place) for position, tile, place, _ in users))))
        if result and self.graph.tensors[parameter].requires_grad:
            result += [(box, result[0][1][:1], ()) for box in _unread(whole(self.graph.tensors[parameter].shape), grid)]
        return tuple(result)


def _unread(box: Box, read: Sequence[Box]) -> list[Box]:
    """The parts of a parameter that no tile reads. They still need an owner: in one process their gradient is zero, and weight decay
    changes them."""
    rest = [box]
    for cell in read:
        rest = [piece for part in rest for piece in subtract(part, cell)]
    return rest


def build_plan(graph: OperatorGraph, strategy: Strategy, topology: Topology) -> Plan:
    """The plan of one strategy. For many strategies of one graph, keep a ``PlanBuilder``."""
    return PlanBuilder(graph, topology).build(strategy)


def _offsets(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))


def _reductions(cut: MicroBatches, position: int, config: OpConfig, tiles: Sequence[Tile]) -> Iterator[Reduction]:
    """The groups of partial results, if a summed factor is split. Outputs follow no summed factor, so a group has one output region."""
    op = cut.graph.operators[position]
    summed = set(op.summed)
    if prod(config.degrees[i] for i in summed) * (1 if cut.factors[position] not in summed else cut.count) <= 1:
        return
    groups: dict[tuple[object, ...], list[Tile]] = {}
    for tile in tiles:
        kept = tuple(interval for i, interval in enumerate(tile.intervals) if i not in summed)
        groups.setdefault((tile.replica, kept), []).append(tile)
    for output in range(len(op.outputs)):
        for group in groups.values():
            box = group[0].outputs[output]
            if volume(box) > 0:
                devices = tuple(sorted({tile.device for tile in group}))
                yield Reduction(position, output, group[0].replica, box, tuple(tile.index for tile in group), devices)


def _holdings(graph: OperatorGraph, position: int, tiles: Sequence[Tile], reductions: Sequence[Reduction]) -> Iterator[Holding]:
    """What devices hold once the operator has run: its tiles' outputs, or, for summed outputs, the sums or cells of them."""
    outputs = graph.operators[position].outputs
    reduced = {reduction.output for reduction in reductions}
    for place, reduction in enumerate(reductions):
        first: dict[int, int] = {}
        for index in reduction.tiles:
            first.setdefault(tiles[index].device, index)
        for i, device in enumerate(reduction.devices):
            box = reduction.cells[i] if reduction.cells else reduction.box
            if volume(box) > 0:
                yield Holding(outputs[reduction.output].tensor, box, device, first[device], place)
    for output, operand in enumerate(outputs):
        for tile in tiles if output not in reduced else ():
            if volume(tile.outputs[output]) > 0:
                yield Holding(operand.tensor, tile.outputs[output], tile.device, tile.index)


def _holders(
    graph: OperatorGraph, position: int, holdings: Sequence[Holding], of_replica_0: Sequence[Tile] = ()
) -> Mapping[str, HolderIndex]:
    """By output, who holds it. ``of_replica_0``: the operator's tiles, if other replicas do not count."""
    places: dict[str, list[int]] = {out.tensor: [] for out in graph.operators[position].outputs}
    for place, holding in enumerate(holdings):
        if not of_replica_0 or of_replica_0[holding.tile].replica == 0:
            places[holding.tensor].append(place)
    return {tensor: HolderIndex(tensor, own, holdings) for tensor, own in places.items()}


def _divided(config: OpConfig) -> OpConfig:
    """How an operator is divided and placed, whatever becomes of what it keeps: then strategies that differ in that share what follows."""
    return with_mark(config, STAYS)


def _readers(graph: OperatorGraph, position: int) -> tuple[int, ...]:
    """The operators that read an operator's outputs, in order."""
    outputs = graph.operators[position].outputs
    return tuple(sorted({reader for out in outputs for reader, _ in graph.consumers.get(out.tensor, ())}))


def _links(graph: OperatorGraph, position: int, readers: Iterable[int]) -> Hashable:
    """Which inputs of its readers are which outputs of an operator."""
    made = {out.tensor: place for place, out in enumerate(graph.operators[position].outputs)}
    return tuple([tuple([made.get(operand.tensor) for operand in graph.operators[reader].inputs]) for reader in readers])


def _reads(graph: OperatorGraph, position: int, tiles: Sequence[Tile]) -> tuple[Read, ...]:
    """Regions of activations that the operator reads, each once per device, in the order of their first readers."""
    operands = graph.operators[position].inputs
    activations = [(k, operand.tensor) for k, operand in enumerate(operands) if graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION]
    readers: dict[tuple[str, Box, int], list[Use]] = {}
    for tile in tiles:
        for k, tensor in activations:
            if volume(tile.inputs[k]) > 0:
                readers.setdefault((tensor, tile.inputs[k], tile.device), []).append((tile.index, k))
    return tuple((*key, tuple(uses)) for key, uses in readers.items())


def _shifted_holdings(own: Delivery, first_tile: int, first_reduction: int) -> Iterator[Holding]:
    for h in own.holdings:
        reduction = None if h.reduction is None else first_reduction + h.reduction
        yield Holding(h.tensor, h.box, h.device, first_tile + h.tile, reduction)


def _shifted_fetches(own: Delivery, first_holding: int, first_tile: Sequence[int]) -> Iterator[Fetch]:
    for f in own.fetches:
        pieces = tuple([Piece(box, first_holding + holding) for box, holding in f.pieces])
        consumers = tuple([(first_tile[reader] + tile, place) for reader, tile, place in f.consumers])
        yield Fetch(f.tensor, f.box, f.device, pieces, consumers)


def _shifted_parts(parts: Sequence[Part], first_fetch: int) -> tuple[Part, ...]:
    return tuple([(first_fetch + fetch, piece) for fetch, piece in parts])


class Later(Sequence[T]):
    """A sequence of known length, made when one of its items is first asked for. Equal to any other one, or a tuple, with equal items."""

    def __init__(self, length: int, make: Callable[[], Iterable[T]]) -> None:
        self._length, self._make = length, make
        self._made: tuple[T, ...] | None = None

    def _items(self) -> tuple[T, ...]:
        if self._made is None:
            self._made = tuple(self._make())
        return self._made

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return iter(self._items())

    @overload
    def __getitem__(self, place: int) -> T: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[T]: ...

    def __getitem__(self, place: int | slice) -> T | Sequence[T]:
        return self._items()[place]

    def __eq__(self, other: object) -> bool:
        return self._items() == tuple(other) if isinstance(other, (Later, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._items())

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._items(),)
