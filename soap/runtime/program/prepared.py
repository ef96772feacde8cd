"""A rank's tiles made ready to run. Where each operand comes from and where each output goes is worked out once, not in every step.

A *unit*, which ``torch.compile`` turns into one function, is a run of consecutive tiles of a rank in one segment, with no communication in
between and no random numbers or running statistics inside. It is compiled when it first runs. In data parallelism without dropout it is
the rank's whole model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from soap.errors import RuntimeFailure
from soap.model.graph import Operator, TensorKind
from soap.model.regions import Box, lengths, relative, volume, whole
from soap.plan.delivery import reduced_tensor
from soap.plan.division import is_divided
from soap.plan.plan import forward_name, local_pieces
from soap.plan.running.activity import ValueKey
from soap.plan.samples import Samples
from soap.plan.tiling import Tile
from soap.runtime.comm.packing import cut
from soap.runtime.marks import ON_RANKS
from soap.runtime.program.actions import Action, ActionKind, part_of
from soap.runtime.program.program import Program
from soap.runtime.program.sync_actions import uses_of_gathered
from soap.runtime.sync.roles import pieces_read
from soap.runtime.sync.shards import Region, ShardStore
from soap.strategy.marks import MARKS, mark_of
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from soap.tracing.types import partial_dtype

ByPass = dict[tuple[ActionKind, int], tuple[int, ...]]
"""A pass, (TILE, tile) or (RECOMPUTE, SEGMENT or WEIGHTS, segment) -> positions in ``Plan.syncs``."""
PASSES = (ActionKind.TILE, ActionKind.RECOMPUTE, ActionKind.SEGMENT, ActionKind.WEIGHTS)
Part = tuple[slice, ...] | None
"""The part to cut from a tensor; None for all of it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a holding that a fetch takes."""

    holding: int
    box: Box


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch of this rank. ``key``: its key in the ``ValueStore``. ``carried``: parts of it come from elsewhere. ``holdings``: this rank's
    holdings that it reads, each once. ``sole``: the holding that it equals; None if it has to be cut or assembled.
    """

    number: int
    key: ValueKey
    tensor: str
    box: Box
    carried: bool
    pieces: tuple[Piece, ...]
    holdings: tuple[int, ...]
    sole: int | None


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tile's input comes from: a fetch; or, if that is None, ``part`` of a graph input or constant that every rank has in full.

    ``empty``: the region has no elements.
    """

    tensor: str
    box: Box
    empty: bool
    fetch: Fetched | None
    part: Part


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tile's parameter region. ``sole``: the piece that equals it, or None. ``place``: its number among the rank's distinct regions."""

    tensor: str
    region: Region
    empty: bool
    sole: int | None
    place: int


@dataclass(frozen=True, slots=True)
class RowsRead:
    """A tile's parameter region that it reads by a sparse lookup. ``place``: position of the parameter among the operator's.

    ``syncs``: piece -> position in ``Plan.syncs``, for pieces that are synchronized by rows. ``sole``: the synchronization of the only
    piece, if the region equals it.
    """

    place: int
    region: Region
    syncs: Mapping[int, int]
    sole: int | None


@dataclass(frozen=True, slots=True)
class Held:
    """An output that stays on this device as a holding.

    ``read``: a tile of this rank reads it, or the rank sends it. ``kept``: it outlives its segment as a leaf. ``takes_gradient``: that leaf
    requires a gradient. ``late``: it is read after the backward pass. ``answered``: its gradient comes from outside of its segment, or is
    the constant ``seed``.
    """

    output: int
    holding: int
    read: bool
    kept: bool
    takes_gradient: bool
    late: bool
    answered: bool
    seed: float | None


@dataclass(frozen=True, slots=True)
class Summand:
    """An output that is a partial result of a reduction. ``answered`` and ``seed`` as in ``Held``."""

    output: int
    reduction: int
    answered: bool
    seed: float | None


@dataclass(slots=True)
class PreparedTile:
    """One tile of this rank. ``again``: it is recomputed; ``light``: but for its products. ``mark``: the field of its mark, if ranks do
    something for that, else empty.
    ``empty``: it has no samples to compute. ``made``: expected shape and dtype of each output. ``rows``: parameters that it reads by sparse
    lookups. ``leaves``: the fetches that it reads. ``gathered``: pieces that it reads of values which are gathered for their uses.
    ``needs``, ``frees``: synchronizations of which it is the rank's first, or last, to read such values.

    ``routed``: the input with the experts' numbers, if it makes routed rows.
    ``checked``: shapes and dtypes of its outputs have been checked once.
    """

    number: int
    tile: Tile
    operator: Operator
    name: str
    segment: int
    active: bool
    again: bool
    mark: str
    empty: bool
    inputs: tuple[Source, ...]
    parameters: tuple[Parameter, ...]
    rows: tuple[RowsRead, ...]
    made: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    held: tuple[Held, ...]
    summands: tuple[Summand, ...]
    leaves: tuple[Fetched, ...]
    gathered: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    light: bool = False
    routed: int | None = None
    checked: bool = False

    def check(self, outputs: Sequence[torch.Tensor | None]) -> None:
        """RuntimeFailure if these outputs have not the planned shapes and types, which are the same in every step: looks once."""
        if self.checked:
            return
        for operand, expected, output in zip(self.operator.outputs, self.made, outputs, strict=True):
            shape = None if output is None else output.shape[1:] if self.routed is not None else output.shape
            if output is not None and (shape, output.dtype) != (expected[0][self.routed is not None :], expected[1]):
                raise RuntimeFailure(
                    f"tile {self.tile.index} of operator {self.operator.name!r} made {operand.tensor!r} as {tuple(output.shape)} "
                    f"{output.dtype}; expected {expected[0]} {expected[1]}: this is a defect of the operator's rule, please report it"
                )
        self.checked = True


class PreparedTiles:
    """All tiles of a rank in one program, by number. ``readers``, ``second_readers``, ``takers``: see ``Program``. ``fetches``: the rank's
    own, by number. ``needed``, ``freed``: (TILE, tile), or (RECOMPUTE, SEGMENT or WEIGHTS, segment) -> synchronizations of which it is
    the first, or last, of the rank's passes for which values are gathered at once.
    """

    def __init__(self, program: Program, shards: ShardStore, rank: int, dtype_of: Callable[[str], torch.dtype]) -> None:
        self._program, self._plan = program, program.plan
        self._shards, self._dtype_of = shards, dtype_of
        self._places: dict[tuple[str, Region], int] = {}
        read = enumerate(pieces_read(self._plan))
        self._by_rows = {piece: i for i, own in read for piece in own if self._plan.syncs[i].contract.by_rows}
        self.readers, self.takers = program.readers(rank), program.takers(rank)
        self.second_readers = program.second_readers(rank)
        pairs = zip(self._plan.syncs, pieces_read(self._plan), strict=True)
        self._gathered = {piece for sync, own in pairs if sync.contract.gathers_values for piece in own}
        self.needed, self.freed = self._by_pass(rank, program.interleaved or (*program.forward, *program.backward))
        self.fetches = {i: self._fetched(i) for i, fetch in enumerate(self._plan.fetches) if fetch.device == rank}
        self.tiles = {i: self._prepare(i) for i, tile in enumerate(self._plan.tiles) if tile.device == rank}

    def _prepare(self, number: int) -> PreparedTile:
        program, tile = self._program, self._plan.tiles[number]
        op = self._plan.operator(tile)
        mark = MARKS[mark_of(self._plan.strategy.operators[op.name])].field
        fetches = [program.index.fetch_of.get((number, k)) for k in range(len(op.inputs))]
        return PreparedTile(
            number,
            tile,
            op,
            forward_name(op, tile),
            program.segment_of[number],
            number in program.activity.tiles,
            number in program.recomputed,
            mark if number in program.activity.tiles and mark in ON_RANKS else "",
            not tile.size,
            tuple(self._source(number, k) for k in range(len(op.inputs))),
            tuple(self._parameter(number, k) for k in range(len(op.parameters))),
            tuple(read for k in range(len(op.parameters)) for read in self._rows(number, k)),
            tuple((self._made_shape(op, k, box), self._made_dtype(number, k)) for k, box in enumerate(tile.outputs)),
            tuple(self._held(number, output, holding) for output, holding in program.index.direct.get(number, ())),
            tuple(self._summand(number, k) for k in range(len(op.outputs)) if (number, k) in program.index.partial),
            tuple(self.fetches[fetch] for fetch in fetches if fetch is not None),
            self._gathered_pieces(number),
            self.needed.get((ActionKind.TILE, number), ()),
            self.freed.get((ActionKind.TILE, number), ()),
            number in program.recomputed and tile.operator in self._plan.light_operators,
            self._ids(op),
        )

    def _ids(self, op: Operator) -> int | None:
        """Which input has the experts' numbers of the routed rows that an operator makes; None if it makes none."""
        routed = {self._plan.graph.routed.get(out.tensor) for out in op.outputs} - {None}
        return next((place for place, operand in enumerate(op.inputs) if operand.tensor in routed), None)

    def _gathered_pieces(self, number: int) -> tuple[int, ...]:
        operands = range(len(self._plan.tiles[number].parameters))
        found = (piece for k in operands for piece in self._shards.region(number, k).pieces if piece in self._gathered)
        return tuple(dict.fromkeys(found))

    def _made_shape(self, op: Operator, output: int, box: Box) -> tuple[int, ...]:
        """Of routed rows as many as it makes without any."""
        return (0, *lengths(box)[2:]) if op.outputs[output].tensor in self._plan.graph.routed else lengths(box)

    def _made_dtype(self, number: int, output: int) -> torch.dtype:
        name = self._plan.operator(self._plan.tiles[number]).outputs[output].tensor
        wide = (number, output) in self._program.index.partial and not self._plan.graph.tensors[name].own_sums
        return partial_dtype(self._dtype_of(name)) if wide else self._dtype_of(name)

    def _fetched(self, number: int) -> Fetched:
        plan, fetch = self._plan, self._plan.fetches[number]
        carried = number in self._program.index.carriers
        pieces = tuple(Piece(p.holding, p.box) for p in fetch.pieces)
        is_sole = not carried and len(pieces) == 1 and pieces[0].box == fetch.box == plan.holdings[pieces[0].holding].box
        holdings = tuple(dict.fromkeys(piece.holding for piece in local_pieces(plan, fetch)))
        sole = pieces[0].holding if is_sole else None
        return Fetched(number, ("fetch", number), fetch.tensor, fetch.box, carried, pieces, holdings, sole)

    def _source(self, number: int, place: int) -> Source:
        tile = self._plan.tiles[number]
        name, box = self._plan.operator(tile).inputs[place].tensor, tile.inputs[place]
        tensor = self._plan.graph.tensors[name]
        if tensor.kind is not TensorKind.ACTIVATION:
            return Source(name, box, False, None, _part(whole(tensor.shape), box))
        if volume(box) == 0:
            return Source(name, box, True, None, None)
        return Source(name, box, False, self.fetches[self._program.index.fetch_of[number, place]], None)

    def _parameter(self, number: int, place: int) -> Parameter:
        name = self._plan.operator(self._plan.tiles[number]).parameters[place].tensor
        region = self._shards.region(number, place)
        empty = volume(region.box) == 0
        is_sole = not empty and self._shards.is_one(region)
        key = self._places.setdefault((name, region), len(self._places))
        return Parameter(name, region, empty, region.pieces[0] if is_sole else None, key)

    def _rows(self, number: int, place: int) -> Iterator[RowsRead]:
        region = self._shards.region(number, place)
        syncs = {piece: self._by_rows[piece] for piece in region.pieces if piece in self._by_rows}
        if syncs:
            yield RowsRead(place, region, syncs, syncs[region.pieces[0]] if self._shards.is_one(region) else None)

    def _held(self, number: int, output: int, holding: int) -> Held:
        program, name = self._program, self._plan.holdings[holding].tensor
        read = ("holding", holding) in self.readers
        seed = program.seeds.get(name) if number in program.activity.seeds else None
        return Held(
            output,
            holding,
            read,
            read and holding in program.kept,
            holding in program.activity.holdings and self._plan.graph.tensors[name].requires_grad,
            name in program.seeds or name == self._plan.graph.loss,
            seed is not None or holding in program.answered,
            seed,
        )

    def _summand(self, number: int, output: int) -> Summand:
        program = self._program
        reduction = program.index.partial[number, output]
        tensor = reduced_tensor(self._plan, self._plan.reductions[reduction])
        seed = program.seeds.get(tensor) if number in program.activity.seeds else None
        return Summand(output, reduction, seed is not None or reduction in program.activity.reductions, seed)

    def _by_pass(self, rank: int, actions: Iterable[Action]) -> tuple[ByPass, ByPass]:
        """``uses_of_gathered`` of the passes among these actions."""
        program = self._program
        passes = [(own.kind, own.subject) for own in part_of(actions, rank) if own.kind in PASSES]
        active = program.activity.tiles
        tiles = [
            (kind, (number,) if kind is ActionKind.TILE else [tile for tile in program.segments[number].tiles if tile in active])
            for kind, number in passes
        ]
        needs, frees = uses_of_gathered(self._plan, rank, tiles)
        return {passes[i]: tuple(own) for i, own in needs.items()}, {passes[i]: tuple(own) for i, own in frees.items()}


def _part(held: Box, box: Box) -> Part:
    return None if held == box else relative(box, held)


Outputs = Sequence[torch.Tensor | None]
"""A tile's outputs; None for those that only other tiles of the unit read."""
Given = Callable[[int, int], torch.Tensor]
"""(tile, place of the operand) -> its value, from outside the unit."""
Counts = Callable[[str], torch.Tensor | None]
Outside = tuple[int | str, ...]
"""A tile and what it takes from outside of the unit: the place of an input; that of a parameter, or a call that is told a count, and which
of both it is."""


@dataclass(frozen=True, slots=True)
class Made:
    """An input that another tile of the unit makes. ``tile``: that tile's place in the unit. ``output``: which of its outputs. ``holding``:
    where the plan holds it. ``piece``: (fetch, piece) that the input reads of it."""

    tile: int
    output: int
    holding: int
    piece: tuple[int, int]


class Unit:
    """Consecutive tiles of a rank as one function of what comes from outside."""

    def __init__(self, program: Program, model: TracedModel, tiles: Sequence[int]) -> None:
        self.program, self.model, self.tiles = program, model, tuple(tiles)
        self.active = self.tiles[0] in program.activity.tiles
        self._inputs = [_sources(program, self.tiles, tile) for tile in self.tiles]
        self._wanted = [_wanted(program, self.tiles, tile) for tile in self.tiles]
        self._function: Callable[..., Sequence[torch.Tensor]] | None = None

    def run(self, given_input: Given, given_parameter: Given, counts: Counts | None = None) -> list[Outputs]:
        """The outputs of all tiles, in the order of the tiles. ``counts``: ``TileContext.counts``; always or never given."""
        outside: dict[Outside, torch.Tensor] = {}
        for tile, inputs in zip(self.tiles, self._inputs, strict=True):
            for k, source in enumerate(inputs):
                if source is None:
                    outside[tile, k] = given_input(tile, k)
            for k in range(len(self.program.plan.operator(self.program.plan.tiles[tile]).parameters)):
                outside[tile, k, "parameter"] = given_parameter(tile, k)
            for call in self.program.plan.operator(self.program.plan.tiles[tile]).calls:
                told = None if counts is None else counts(call)
                if told is not None:
                    outside[tile, call, "count"] = told
        tensors, places = _distinct(outside)
        with torch.set_grad_enabled(self.active):
            if self._function is None:
                self._function = self._compiled(places, tensors)
            results = iter(self._function(*tensors))
        return [[next(results) if wanted else None for wanted in outputs] for outputs in self._wanted]

    def _compiled(self, places: dict[Outside, int], tensors: Sequence[torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            made: list[Sequence[torch.Tensor]] = []
            for tile, inputs in zip(self.tiles, self._inputs, strict=True):
                here = self.program.plan.tiles[tile]
                own = [tensors[places[tile, k]] if source is None else self._made(made, source) for k, source in enumerate(inputs)]
                parameters = [tensors[places[tile, k, "parameter"]] for k in range(len(here.parameters))]
                told = {key[1]: tensors[place] for key, place in places.items() if key[0] == tile and key[-1] == "count"}
                made.append(self.model.run_tile(here, own, parameters, TileContext(counts=told.get if told else None)))
            return [t for wanted, outputs in zip(self._wanted, made, strict=True) for t, kept in zip(outputs, wanted, strict=True) if kept]

        flat = make_fx(function, pre_dispatch=True)(*tensors)
        compiled: Callable[..., Sequence[torch.Tensor]] = torch.compile(flat, dynamic=False)
        return compiled

    def _made(self, made: Sequence[Sequence[torch.Tensor]], source: Made) -> torch.Tensor:
        fetch, piece = source.piece
        held, box = self.program.plan.holdings[source.holding].box, self.program.plan.fetches[fetch].pieces[piece].box
        return cut(made[source.tile][source.output], held, box)


def units_of(program: Program, model: TracedModel, rank: int) -> dict[int, Unit]:
    """First tile -> unit, for one rank."""
    return {tiles[0]: Unit(program, model, tiles) for tiles in _runs(program, model, rank)}


def _runs(program: Program, model: TracedModel, rank: int) -> Iterator[list[int]]:
    current: list[int] = []
    for action in part_of(program.forward, rank):
        tile = action.subject
        fits = action.kind is ActionKind.TILE and _is_pure(program, model, tile)
        if current and not (fits and _belongs(program, current, tile)):
            yield current
            current = []
        if fits:
            current.append(tile)
    if current:
        yield current


def _is_pure(program: Program, model: TracedModel, tile: int) -> bool:
    """Whether a tile depends on its operands alone, runs once a step in one shape, keeps what it keeps, and goes backward at once."""
    own = program.plan.tiles[tile]
    is_there = own.size > 0 and all(volume(box) > 0 for box in (*own.inputs, *own.parameters, *own.outputs))
    marked = own.operator in program.plan.marked and tile in program.activity.tiles
    apart = tile in program.looking_up or marked or is_divided(program.plan, tile)
    return is_there and not apart and model.is_pure(own.operator)


def _belongs(program: Program, tiles: Sequence[int], tile: int) -> bool:
    """Whether a tile can join a unit: it is in the same segment, and each input that it takes from the unit is a single piece."""
    active = program.activity.tiles
    if program.segment_of[tile] != program.segment_of[tiles[0]] or (tile in active) != (tiles[0] in active):
        return False
    makers = set(tiles)
    for k, operand in enumerate(program.plan.operator(program.plan.tiles[tile]).inputs):
        if program.plan.graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION:
            pieces = program.plan.fetches[program.index.fetch_of[tile, k]].pieces
            holdings = [program.plan.holdings[piece.holding] for piece in pieces]
            if len(pieces) > 1 and any(h.reduction is None and h.tile in makers for h in holdings):
                return False
    return True


def _sources(program: Program, tiles: Sequence[int], tile: int) -> list[Made | None]:
    """For each input of a tile, where in the unit it is made; None if it comes from outside."""
    plan, found = program.plan, list[Made | None]()
    for k, operand in enumerate(plan.operator(plan.tiles[tile]).inputs):
        source: Made | None = None
        if plan.graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION:
            fetch = program.index.fetch_of[tile, k]
            holding = plan.fetches[fetch].pieces[0].holding
            held = plan.holdings[holding]
            if held.reduction is None and held.tile in tiles:
                output = next(output for output, direct in program.index.direct[held.tile] if direct == holding)
                source = Made(tiles.index(held.tile), output, holding, (fetch, 0))
        found.append(source)
    return found


def _wanted(program: Program, tiles: Sequence[int], tile: int) -> list[bool]:
    """Which outputs of a tile are needed outside the unit."""
    plan, index = program.plan, program.index
    wanted = [(tile, output) in index.partial for output in range(len(plan.operator(plan.tiles[tile]).outputs))]
    for output, holding in index.direct.get(tile, ()):
        kept = holding in program.kept or holding in program.answered or holding in program.losses.values()
        readers = {reader for fetch in index.fetches_from[holding] for reader, _ in plan.fetches[fetch].consumers}
        wanted[output] = kept or not readers <= set(tiles)
    return wanted


def _distinct(outside: dict[Outside, torch.Tensor]) -> tuple[list[torch.Tensor], dict[Outside, int]]:
    """The distinct tensors, and operand -> its place among them. Different views of one tensor count as distinct."""
    tensors: list[torch.Tensor] = []
    known: dict[int, int] = {}
    places: dict[Outside, int] = {}
    for key, tensor in outside.items():
        if id(tensor) not in known:
            known[id(tensor)] = len(tensors)
            tensors.append(tensor)
        places[key] = known[id(tensor)]
    return tensors, places


def missing_compiler() -> str | None:
    """What ``torch.compile`` lacks on this machine; None if it lacks nothing."""
    if torch.cuda.is_available() or any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl")):
        return None
    return "no C++ compiler on PATH"


@dataclass(frozen=True)
class OwnSamples:
    """Where a rank's tiles find their regions if the rank is given only the samples that it reads. ``samples``: by input."""

    samples: Mapping[str, Samples]
    _parts: dict[tuple[str, Box], Part] = field(default_factory=dict, repr=False)

    def part(self, source: Source) -> Part:
        """What to cut from the tensor that the rank was given."""
        read = self.samples.get(source.tensor)
        if read is None or read.dim is None:
            return source.part
        key = source.tensor, source.box
        if key not in self._parts:
            here = [*source.box]
            here[read.dim] = read.place(source.box[read.dim])
            self._parts[key] = tuple(slice(start, stop) for start, stop in here)
        return self._parts[key]


@dataclass(frozen=True)
class StepInputs:
    """Inputs, constants and state by name, on this rank's device. ``own``: inputs have only the samples that the rank reads; None: all."""

    named: Mapping[str, torch.Tensor]
    own: OwnSamples | None = None

    def read(self, source: Source) -> torch.Tensor:
        """The region that a tile reads; not of an activation."""
        part = source.part if self.own is None else self.own.part(source)
        tensor = self.named[source.tensor]
        return tensor if part is None else tensor[part]
