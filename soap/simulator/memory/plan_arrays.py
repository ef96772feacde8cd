"""A plan as arrays, for what is worked out of all its parts at once: who makes, holds, reads and sends which bytes.

Each table is a named tuple of columns, one row for a tile, a holding, a piece and so on; rows refer to each other by their numbers, which
count all operators' rows. Most of it depends on an operator's delivery alone (``plan.delivery.Delivery``), and is worked out once for
all that are like it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, get_type_hints
from weakref import WeakKeyDictionary

import numpy as np

from soap.model.graph import OperatorGraph, TensorKind
from soap.model.regions import Box, in_one_piece, volume
from soap.plan.delivery import Delivery, PlacedDelivery
from soap.plan.plan import Exchange, Holding, Message, Pattern, Plan, Reduction
from soap.plan.row_counts import row_bytes, tile_lookups
from soap.plan.tiling import Tile, made_bytes, windows
from soap.simulator.memory.footprint import Shares, shares_of
from soap.simulator.memory.grouped import Bools, Longs
from soap.simulator.memory.sizes import PACKING_KINDS, away_bytes, padded_bytes
from soap.simulator.memory.transit import cells_land_in_place, lies_in_one_piece, received_apart

MESSAGE, GATHER, SWAP, BROADCAST = range(4)
"""Patterns of carriers."""
PATTERNS = {Pattern.ALL_GATHER: GATHER, Pattern.ALL_TO_ALL: SWAP, Pattern.BROADCAST: BROADCAST}


class Tiles(NamedTuple):
    """By tile. ``kept``: bytes that it keeps without its outputs; ``product``: what its products make, ``forward``, ``backward``: what is
    there while it runs; ``away``: what it copies to its host if it offloads. ``part``: its micro-batch, or 0."""

    operator: Longs
    device: Longs
    kept: Longs
    product: Longs
    forward: Longs
    backward: Longs
    away: Longs
    part: Longs


class Outputs(NamedTuple):
    """By output of a tile. ``place``: which of the operator's outputs. ``keeps``: whether autograd keeps it for its maker. ``lies``:
    whether it certainly has the memory of an input."""

    tile: Longs
    place: Longs
    bytes: Longs
    keeps: Bools
    lies: Bools


class Given(NamedTuple):
    """By input or constant that a tile reads. ``region``: equal if it is the same region of the same tensor. ``copied``: whether it lies
    in several pieces. ``keeps``: whether autograd keeps it."""

    tile: Longs
    region: Longs
    bytes: Longs
    copied: Bools
    keeps: Bools


class Parameters(NamedTuple):
    """Regions of parameters that tiles read, operand by operand. ``parameter``: number among the graph's. ``region``: as in ``Given``.
    ``bytes``: of the region; ``rows_bytes``: of the rows of it that are looked up, if it is only had by rows. ``keeps``: whether autograd
    keeps it. ``trained``: whether it gets a gradient; ``in_rows``: whether that lies row by row in memory of its own. ``sparse``: whether
    it is looked up."""

    tile: Longs
    parameter: Longs
    region: Longs
    bytes: Longs
    rows_bytes: Longs
    keeps: Bools
    trained: Bools
    in_rows: Bools
    sparse: Bools


class Holdings(NamedTuple):
    """By holding. ``sum``: the reduction that makes it, or -1; else ``output``: the row of ``Outputs``, or -1. ``gradient``: whether it
    gets one. ``in_rows``: whether it certainly lies row by row."""

    tile: Longs
    device: Longs
    sum: Longs
    output: Longs
    bytes: Longs
    gradient: Bools
    in_rows: Bools


class Fetches(NamedTuple):
    """By fetch. Its pieces are ``pieces[f]:pieces[f + 1]``, its readers ``readers[f]:readers[f + 1]``: ``Pieces``, ``Readers``."""

    device: Longs
    bytes: Longs
    gradient: Bools
    remote: Bools
    pieces: Longs
    readers: Longs


class Readers(NamedTuple):
    """Tiles that read fetches. ``operand``: its place. ``keeps``, ``in_rows``, ``spread``: of it, see ``footprint.Shares``. ``views``: the
    sum of 2 to the power of the place of each output that may have its memory."""

    fetch: Longs
    tile: Longs
    operand: Longs
    keeps: Bools
    in_rows: Bools
    spread: Bools
    views: Longs


class Pieces(NamedTuple):
    """Pieces of fetches. ``carrier``: what brings it, or -1. ``apart``: whether it is received into a buffer of its own. ``is_fetch``,
    ``is_holding``: whether it is all of these; ``in_fetch``, ``in_holding``: whether it is contiguous in their memory."""

    fetch: Longs
    holding: Longs
    bytes: Longs
    remote: Bools
    carrier: Longs
    apart: Bools
    is_fetch: Bools
    is_holding: Bools
    in_fetch: Bools
    in_holding: Bools


class Carriers(NamedTuple):
    """By message or exchange: the pieces that it brings are ``part[parts[c]:parts[c + 1]]``. ``number``: place among the plan's messages,
    or among its exchanges."""

    pattern: Longs
    number: Longs
    parts: Longs
    part: Longs


class Sums(NamedTuple):
    """By reduction. ``bytes``: of the partial results; ``gradient_bytes``: of the sum's gradient. ``scattered``: whether devices get cells;
    ``in_place``: whether these land one after the other. Its tiles are ``member[members[s]:members[s + 1]]``; its devices have the rows
    ``devices[s]:devices[s + 1]`` of ``SumDevices``."""

    operator: Longs
    output: Longs
    bytes: Longs
    gradient_bytes: Longs
    scattered: Bools
    in_place: Bools
    members: Longs
    member: Longs
    devices: Longs


class SumDevices(NamedTuple):
    """By device that gets something of a reduction: ``bytes`` of partial results in its cell, or of all; ``gradient_bytes`` of the cell's
    gradient. ``sent``: what it holds to send the others their cells as copies; ``sent_lying``: as they leave from where they lie, if the
    device packs nothing together; ``others``: how many get something."""

    sum: Longs
    device: Longs
    bytes: Longs
    gradient_bytes: Longs
    sent: Longs
    sent_lying: Longs
    others: Longs


class PlanArrays(NamedTuple):
    """All tables of a plan."""

    tiles: Tiles
    outputs: Outputs
    given: Given
    parameters: Parameters
    holdings: Holdings
    fetches: Fetches
    readers: Readers
    pieces: Pieces
    carriers: Carriers
    sums: Sums
    sum_devices: SumDevices


class _Part(NamedTuple):
    """The tables of one delivery, and of those that are like it, with its own positions: the ``COLUMNS``, and how many rows each block
    has. Columns that say where something begins have here how many there are. Tiles have one column more, bytes of their
    parameters, which accelerators pack into one piece, and readers the numbers of their operators, to which their tiles count. Operators,
    devices, parameters and regions are places in what each delivery has by itself (``_Names``); ``counts`` has how many of these there
    are, too. ``regions``: place among the operator's inputs and parameters, and the box."""

    columns: tuple[Longs | Bools, ...]
    counts: tuple[int, ...]
    regions: tuple[tuple[int, Box], ...]


class _Names(NamedTuple):
    """What places in the tables of a delivery stand for: the operator and its readers, devices, its parameters' numbers among the graph's,
    and numbers of regions."""

    operators: Longs
    devices: Longs
    numbers: Longs
    regions: Longs


_PARTS: WeakKeyDictionary[Delivery, tuple[OperatorGraph, dict[tuple[int, ...], _Part]]] = WeakKeyDictionary()
_NAMES: WeakKeyDictionary[PlacedDelivery, tuple[OperatorGraph, _Names]] = WeakKeyDictionary()

NO_SHARES = Shares(None, frozenset(), frozenset(), 0, 0, 0, 0)
TABLES: dict[str, Any] = get_type_hints(PlanArrays)
FLAGS = {(name, column) for name, table in TABLES.items() for column, hint in get_type_hints(table).items() if hint == Bools}
LISTS = {"carriers": "part", "sums": "member"}
"""Table -> its column that has rows of its own, and so is a block of its own."""
BEGINS = {("fetches", "pieces"), ("fetches", "readers"), ("carriers", "parts"), ("sums", "members"), ("sums", "devices")}
"""Columns that say where a row's part of another table begins."""
BLOCKS = {name: [column for column in table._fields if column != LISTS.get(name)] for name, table in TABLES.items()}
BLOCKS |= {column: [column] for column in LISTS.values()}
BLOCKS["tiles"].append("packed")
BLOCKS["readers"].append("operator")
"""Block -> its columns."""
COLUMNS = [(name, column) for name, columns in BLOCKS.items() for column in columns]
REFERS = {
    ("outputs", "tile"): "tiles", ("given", "tile"): "tiles", ("parameters", "tile"): "tiles", ("holdings", "tile"): "tiles",
    ("holdings", "sum"): "sums", ("holdings", "output"): "outputs", ("readers", "fetch"): "fetches", ("pieces", "fetch"): "fetches",
    ("pieces", "holding"): "holdings", ("pieces", "carrier"): "carriers", ("part", "part"): "pieces", ("member", "member"): "tiles",
    ("sum_devices", "sum"): "sums", ("tiles", "operator"): "operators", ("readers", "operator"): "operators",
    ("sums", "operator"): "operators", ("tiles", "device"): "devices", ("holdings", "device"): "devices", ("fetches", "device"): "devices",
    ("sum_devices", "device"): "devices", ("parameters", "parameter"): "numbers", ("parameters", "region"): "regions",
    ("given", "region"): "regions",
}  # fmt: skip
"""(block, column) -> the table, or field of ``_Names``, of which its numbers are; below 0 there is none."""


def plan_arrays(plan: Plan, *, footprints: bool = True) -> PlanArrays:
    """The arrays of a plan. Without ``footprints``, which are found when they are first asked for: as if operators took nothing beside
    their operands, and kept all of these."""
    numbers = {tensor.name: number for number, tensor in enumerate(plan.graph.parameters)}
    parts = [_part_of(plan.graph, own, footprints) for own in plan.deliveries]
    found = _joined(parts, [_names_of(plan.graph, own, part, numbers) for own, part in zip(plan.deliveries, parts, strict=True)])
    tiles, readers, carriers = found["tiles"], found["readers"], found["carriers"]
    readers["tile"] += np.array(plan.first_tile, np.int64)[readers.pop("operator")]
    tiles["kept"] += tiles.pop("packed") * np.isin(tiles["device"], list(plan.accelerators))
    messages = carriers["pattern"] == MESSAGE
    carriers["number"] = np.where(messages, np.cumsum(messages), np.cumsum(~messages)) - 1
    for name, column in LISTS.items():
        found[name] |= found.pop(column)
    for name, column in BEGINS:
        found[name][column] = _begins(found[name][column])
    return PlanArrays(**{name: table(**found[name]) for name, table in TABLES.items()})


def _joined(parts: Sequence[_Part], names: Sequence[_Names]) -> dict[str, dict[str, Any]]:
    """By block the columns of all parts, with the plan's positions."""
    counts = np.array([part.counts for part in parts], np.int64).reshape(-1, len(BLOCKS) + len(_Names._fields))
    firsts = dict(zip((*BLOCKS, *_Names._fields), (np.cumsum(counts, axis=0) - counts).T, strict=True))
    meant = {name: np.concatenate([getattr(own, name) for own in names]) for name in _Names._fields}
    found: dict[str, dict[str, Any]] = {name: {} for name in BLOCKS}
    for (name, column), *joined in zip(COLUMNS, *(part.columns for part in parts), strict=True):
        found[name][column] = own = np.concatenate(joined)
        if (to := REFERS.get((name, column))) is not None:
            shift = np.repeat(firsts[to], counts[:, list(BLOCKS).index(name)])
            np.add(own, shift, out=own, where=own >= 0)
            if to in meant:
                found[name][column] = meant[to][own]
    return found


def _begins(counts: Sequence[int] | Longs) -> Longs:
    return np.concatenate(([0], np.cumsum(np.asarray(counts, np.int64))))


def _part_of(graph: OperatorGraph, own: PlacedDelivery, footprints: bool) -> _Part:
    """One for all deliveries that are alike and whose operators have equal footprints, if these count."""
    known = _PARTS.get(own.like)
    if known is None or known[0] is not graph:
        known = _PARTS[own.like] = graph, {}
    key = _footprints(graph, own) if footprints else ()
    if key not in known[1]:
        alike = not footprints or key == _footprints(graph, own.like)
        known[1][key] = _Maker(graph, own.like if alike else _by_itself(own), footprints).made()
    return known[1][key]


def _footprints(graph: OperatorGraph, own: PlacedDelivery | Delivery) -> tuple[int, ...]:
    """Equal for deliveries whose operators, and those that read them, have equal footprints."""
    return tuple([graph.alike_footprints[position] for position in (own.position, *own.readers)])


def _by_itself(placed: PlacedDelivery) -> Delivery:
    read = zip(placed.readers, placed.like.readers.values(), strict=True)
    return replace(placed.own, readers={reader: tuple([replace(tile, operator=reader) for tile in tiles]) for reader, tiles in read})


def _names_of(graph: OperatorGraph, own: PlacedDelivery, part: _Part, numbers: Mapping[str, int]) -> _Names:
    known = _NAMES.get(own)
    if known is None or known[0] is not graph:
        op = graph.operators[own.position]
        operands = [(*op.inputs, *op.parameters)[place].tensor for place, _ in part.regions]
        regions = [region_number(graph, tensor, box) for tensor, (_, box) in zip(operands, part.regions, strict=True)]
        rows = (own.position, *own.readers), own.devices, [numbers[operand.tensor] for operand in op.parameters], regions
        known = _NAMES[own] = graph, _Names(*(np.array(row, np.int64) for row in rows))
    return known[1]


class _Maker:
    """Makes the tables of one operator's delivery."""

    def __init__(self, graph: OperatorGraph, own: Delivery, footprints: bool) -> None:
        self._graph, self._own, self._op, self._footprints = graph, own, graph.operators[own.position], footprints
        self._place = {device: place for place, device in enumerate(own.devices)}
        self._readers = {reader: 1 + place for place, reader in enumerate(own.readers)}
        self._regions: dict[tuple[int, Box], int] = {}
        self._rows: dict[str, list[tuple[int, ...]]] = {name: [] for name in BLOCKS}
        self._output_rows: dict[tuple[int, str], int] = {}

    def made(self) -> _Part:
        """All of them."""
        for number, tile in enumerate(self._own.tiles):
            self._tile(number, tile)
        for holding in self._own.holdings:
            self._holding(holding)
        self._fetches()
        self._carriers()
        for number, reduction in enumerate(self._own.reductions):
            self._sum(number, reduction)
        rows = (np.array(self._rows[name], np.int64).reshape(-1, len(columns)).T for name, columns in BLOCKS.items())
        columns = (own != 0 if name in FLAGS else own.copy() for name, own in zip(COLUMNS, chain.from_iterable(rows), strict=True))
        named = 1 + len(self._readers), len(self._place), len(self._op.parameters), len(self._regions)
        return _Part(tuple(columns), (*map(len, self._rows.values()), *named), tuple(self._regions))

    def _box_bytes(self, tensor: str, box: Box) -> int:
        return volume(box) * self._graph.tensors[tensor].itemsize

    def _shares(self, tile: Tile) -> Shares:
        return shares_of(self._graph, self._graph.operators[tile.operator], tile.intervals) if self._footprints else NO_SHARES

    def _keeps(self, tile: Tile, tensor: str) -> bool:
        """Whether autograd keeps a tile's region of an operand."""
        places, op = self._shares(tile).keeps, self._graph.operators[tile.operator]
        operands = enumerate((*op.inputs, *op.parameters, *op.outputs))
        return places is None or any(place in places for place, operand in operands if operand.tensor == tensor)

    def _tile(self, number: int, tile: Tile) -> None:
        """Add a tile, what it makes, and what it reads of the batch and of parameters."""
        graph, op, shares = self._graph, self._op, self._shares(tile)
        padded = away = 0
        if self._footprints:
            padded, away = sum(padded_bytes(graph, op, k, tile.inputs[k], tile.intervals) for k in windows(op)), away_bytes(graph, tile)
        held = shares.kept + padded, shares.product, shares.forward, shares.backward + padded, away
        boxes = zip(op.parameters, tile.parameters, strict=True) if op.kind in PACKING_KINDS else ()
        packed = sum(self._box_bytes(operand.tensor, box) for operand, box in boxes)
        self._rows["tiles"].append((0, self._place[tile.device], *held, tile.part or 0, packed))
        for place, output in enumerate(op.outputs):
            self._output_rows[number, output.tensor] = len(self._rows["outputs"])
            keeps = self._keeps(tile, output.tensor)
            self._rows["outputs"].append((number, place, made_bytes(graph, op, tile, place), keeps, place in shares.lies))
        for place, (operand, box) in enumerate(zip(op.inputs, tile.inputs, strict=True)):
            tensor = graph.tensors[operand.tensor]
            if tensor.kind in (TensorKind.INPUT, TensorKind.CONSTANT):
                copied, keeps = not in_one_piece(box, tensor.shape), self._keeps(tile, operand.tensor)
                self._rows["given"].append((number, self._region(place, box), self._box_bytes(operand.tensor, box), copied, keeps))
        for place, (operand, box) in enumerate(zip(op.parameters, tile.parameters, strict=True), len(op.inputs)):
            tensor, size = graph.tensors[operand.tensor], self._box_bytes(operand.tensor, box)
            rows_bytes, sparse = size, operand.tensor in graph.sparse
            if sparse and tile.operator in graph.backward_operators:
                rows = min(box[0][1] - box[0][0], tile_lookups(graph, operand.tensor, tile))
                rows_bytes = rows * row_bytes(graph, operand.tensor, box)
            own = number, place - len(op.inputs), self._region(place, box), size, rows_bytes
            flags = self._keeps(tile, operand.tensor), tensor.requires_grad, place in shares.in_rows, sparse
            self._rows["parameters"].append((*own, *flags))

    def _region(self, place: int, box: Box) -> int:
        return self._regions.setdefault((place, box), len(self._regions))

    def _holding(self, held: Holding) -> None:
        graph, op, summed = self._graph, self._op, held.reduction
        tile, in_rows = self._own.tiles[held.tile], summed is not None
        if summed is None:
            first, rows = len(op.inputs) + len(op.parameters), self._shares(tile).in_rows
            in_rows = any(first + k in rows for k, out in enumerate(op.outputs) if out.tensor == held.tensor)
        output = self._output_rows[held.tile, held.tensor] if summed is None else -1
        size, gradient = self._box_bytes(held.tensor, held.box), graph.tensors[held.tensor].requires_grad
        own = held.tile, self._place[held.device], -1 if summed is None else summed, output
        self._rows["holdings"].append((*own, size, gradient, in_rows))

    def _fetches(self) -> None:
        """Add the fetches with their pieces and readers."""
        apart, carriers = received_apart(self._own), self._brought()
        for number, fetch in enumerate(self._own.fetches):
            gradient, holdings = self._graph.tensors[fetch.tensor].requires_grad, self._own.holdings
            remote = any(holdings[holding].device != fetch.device for _, holding in fetch.pieces)
            size = self._box_bytes(fetch.tensor, fetch.box)
            self._rows["fetches"].append((self._place[fetch.device], size, gradient, remote, len(fetch.pieces), len(fetch.consumers)))
            for reader, tile, place in fetch.consumers:
                shares = self._shares(self._own.readers[reader][tile])
                keeps = self._keeps(self._own.readers[reader][tile], fetch.tensor)
                flags = keeps, place in shares.in_rows, place in shares.spread
                views = sum(1 << output for output, own in shares.views if own == place)
                self._rows["readers"].append((number, tile, place, *flags, views, self._readers[reader]))
            for place, (box, holding) in enumerate(fetch.pieces):
                held = holdings[holding]
                own = number, holding, self._box_bytes(fetch.tensor, box), held.device != fetch.device
                moved = carriers.get((number, place), -1), (number, place) in apart
                lies = lies_in_one_piece(box, fetch.box), lies_in_one_piece(box, held.box)
                self._rows["pieces"].append((*own, *moved, box == fetch.box, box == held.box, *lies))

    def _all_carriers(self) -> list[Message | Exchange]:
        return [*self._own.messages, *self._own.exchanges]

    def _brought(self) -> dict[tuple[int, int], int]:
        return {part: number for number, carrier in enumerate(self._all_carriers()) for part in carrier.parts}

    def _carriers(self) -> None:
        """Add the carriers, and the pieces that they bring."""
        begins = _begins([len(fetch.pieces) for fetch in self._own.fetches]).tolist()
        for carrier in self._all_carriers():
            pattern = PATTERNS[carrier.pattern] if isinstance(carrier, Exchange) else MESSAGE
            self._rows["carriers"].append((pattern, 0, len(carrier.parts)))
            self._rows["part"] += [(begins[fetch] + place,) for fetch, place in carrier.parts]

    def _sum(self, number: int, own: Reduction) -> None:
        tensor = self._graph.tensors[self._op.outputs[own.output].tensor]
        size, whole = tensor.partial_itemsize, volume(own.box)
        in_place = bool(own.cells) and cells_land_in_place(own.box, own.cells)
        sizes = whole * size, whole * tensor.itemsize
        self._rows["sums"].append((0, own.output, *sizes, bool(own.cells), in_place, len(own.tiles), len(own.devices)))
        self._rows["member"] += [(tile,) for tile in own.tiles]
        for device, cell in zip(own.devices, own.cells or [own.box] * len(own.devices), strict=True):
            others = [box for other, box in zip(own.devices, own.cells, strict=False) if other != device and volume(box)]
            lie = [lies_in_one_piece(box, own.box) for box in others]
            lying = sum(volume(box) for box, lies in zip(others, lie, strict=True) if not lies) + whole * any(lie)
            sent = sum(volume(box) for box in others)
            sizes = volume(cell) * size, volume(cell) * tensor.itemsize
            self._rows["sum_devices"].append((number, self._place[device], *sizes, sent * size, lying * size, len(others)))


def compact_numbers(plan: Plan) -> list[int]:
    """Places among the graph's parameters of those that only servers hold as a whole: tiles get the rows that they look up, in a compact
    table."""
    names = {sync.parameter for sync in plan.syncs if sync.contract.by_rows and sync.contract.has_servers}
    return [number for number, own in enumerate(plan.graph.parameters) if own.name in names] if names else []


def region_number(graph: OperatorGraph, tensor: str, box: Box) -> int:
    """A number for a region of a tensor of the graph, the same whenever it is asked for."""
    return graph.region_numbers.setdefault((tensor, box), len(graph.region_numbers))
