"""Tiles that ``torch.compile`` turns into one function.

A unit is a run of consecutive tiles of a rank in one segment, with no communication in between and no random numbers or running statistics
inside. Its tiles are traced into one flat program of ATen calls, like the model itself. That program is compiled when the unit first runs.
In data parallelism without dropout, a unit is the rank's whole model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from soap.model.graph import TensorKind
from soap.model.regions import volume
from soap.plan.division import is_divided
from soap.runtime.comm.packing import cut
from soap.runtime.program.actions import ActionKind, part_of
from soap.runtime.program.program import Program
from soap.tracing.model import TileContext, TracedModel

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
    """Whether a tile depends on its operands alone, has the same shapes in every step, runs once in it, and keeps what it keeps; and goes
    backward at once, as compiled functions do."""
    own = program.plan.tiles[tile]
    is_there = own.size > 0 and all(volume(box) > 0 for box in (*own.inputs, *own.parameters, *own.outputs))
    apart = tile in program.looking_up or tile in program.recomputed or tile in program.come_back_with or is_divided(program.plan, tile)
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
