"""How long one tile takes, run as a training step runs it: ``TracedModel.run_tile`` on its regions with autograd, then its backward
pass.

On a CPU different tiles take turns, as in a step: forward one after the other, then backward from the last to the first. When a tile
runs again, neither its operands nor its code are in the caches, and other tiles have used the freed memory. A tile that runs again and
again alone takes a fifth less than in a step of a model with small tiles (docs/lab_notebook.md). Its inputs, though, are written right
before, as the operator before it does.

On a GPU, which is given kernels ahead, copies of one tile run one after the other, and then backward as one. They have memory of their
own, as much as the model has.

A sparse lookup finds out which rows it reads, copies them out of the table, and runs on them; all of this counts as its forward pass.
All copies share one table; their rows have memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from soap.measure.tile_operands import Operands, TileOperands
from soap.measure.timing import MOST_SECONDS, Sample, clock_for, repeat, sample
from soap.model.dtypes import is_differentiable
from soap.model.graph import TensorKind
from soap.plan.tiling import Tile
from soap.tracing.model import TileContext, TracedModel

TOGETHER = 8
"""Number of tiles that take turns. Beside 7 others a tile of a model of 163 took as long as beside 54."""
MOST_COPIES = 16
RUN_SECONDS = 0.05
"""No more copies are made than run forward and backward in about this many seconds."""
WARM_UPS = 2
TURN_SECONDS = 0.1
"""Seconds for which a tile that takes turns is repeated at most."""


@dataclass(frozen=True, slots=True)
class TileTimes:
    """Times of one tile's passes. ``backward`` is None if it has no backward pass. ``launch_ns``: on a GPU, the processor's time to
    launch each of them."""

    forward: Sample
    backward: Sample | None
    launch_ns: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A tile with its operands. ``written``: its inputs that another tile makes."""

    tile: Tile
    inputs: list[torch.Tensor]
    parameters: list[torch.Tensor]
    written: list[torch.Tensor]
    context: TileContext
    active: bool


class TileTimer:
    """Times tiles of one model on one device. ``threads`` and ``share``: see ``timing.CpuClock``. It keeps all values of a forward pass."""

    def __init__(self, model: TracedModel, device: torch.device, threads: int = 1, share: float = 1.0) -> None:
        self.model, self.graph, self.device = model, model.graph, device
        self.operands = TileOperands(model, device)
        self._clocks = [clock_for(device, threads, share) for _ in range(2)]  # forward, backward: launching takes a different time for each

    def groups(self, tiles: Sequence[Tile]) -> list[list[Tile]]:
        """The tiles in their order, in groups of those that take turns and together need no more memory than the model; on a GPU each
        alone."""
        found: list[list[Tile]] = []
        room = 0
        for tile in tiles:
            size = self.operands.bytes_of(tile)
            if self.device.type == "cuda" or room < size or len(found[-1]) == TOGETHER:
                found.append([])
                room = self.operands.bytes
            found[-1].append(tile)
            room -= size
        return found

    def time(self, tiles: Sequence[Tile]) -> list[TileTimes]:
        """The passes of each tile."""
        return [self.time_copies(tile) for tile in tiles] if self.device.type == "cuda" else self.time_in_turns(tiles)

    def time_in_turns(self, tiles: Sequence[Tile], most_seconds: float = TURN_SECONDS) -> list[TileTimes]:
        """The passes of each tile, repeated for about so long at most for each of them."""
        turns = [self._prepare(tile) for tile in tiles]
        seconds = most_seconds * len(turns)
        if sum(self._round(turns)) < 1e9 * seconds:  # the first call loads kernels
            for _ in range(WARM_UPS):
                self._round(turns)
        passes = [sample(times) for times in repeat(lambda: self._round(turns), seconds)]
        forward, backward = passes[: len(turns)], passes[len(turns) :]
        return [TileTimes(one, other if other.ns > 0 else None) for one, other in zip(forward, backward, strict=True)]

    def time_copies(self, tile: Tile, most_seconds: float = MOST_SECONDS) -> TileTimes:
        """The passes of a tile: the time of all copies together divided by their number. Copies are repeated for about so long at most."""
        tables = self.operands.sparse_tables(tile)
        copies = [self.operands.copy(tile, tables)]
        first = self._run(tile, copies)  # the first call loads kernels
        if sum(first) < 1e9 * most_seconds:
            spent = sum(self._run(tile, copies)) / 1e9
            copies += [self.operands.copy(tile, tables) for _ in range(self._count(tile, spent) - 1)]
            for _ in range(WARM_UPS if len(copies) > 1 else 0):
                self._run(tile, copies)
        found = [sample(times, len(copies)) for times in repeat(lambda: self._run(tile, copies), most_seconds)]
        if self.device.type != "cuda":
            return TileTimes(found[0], found[1] if len(first) > 1 else None)
        if len(first) == 2:
            return TileTimes(found[0], None, (found[1].ns, 0.0))
        return TileTimes(found[0], found[2], (found[1].ns, found[3].ns))

    def exercise(self, tile: Tile) -> None:
        """Run a tile forward and backward without timing it."""
        self._round([self._prepare(tile)])

    def _prepare(self, tile: Tile) -> _Prepared:
        inputs, parameters = self.operands.copy(tile, self.operands.sparse_tables(tile))
        operands = self.graph.operators[tile.operator].inputs
        kinds = [self.graph.tensors[operand.tensor].kind for operand in operands]
        written = [one for one, kind in zip(inputs, kinds, strict=True) if kind is TensorKind.ACTIVATION and is_differentiable(one.dtype)]
        return _Prepared(tile, inputs, parameters, written, self.operands.context(tile), self.operands.is_active(tile))

    def _round(self, turns: Sequence[_Prepared]) -> list[float]:
        """Times of all forward passes, then of all backward passes, in the order of the tiles; 0 for a pass that does not exist."""
        forward, backward = [0.0] * len(turns), [0.0] * len(turns)
        made: list[list[torch.Tensor]] = [[] for _ in turns]
        for number, turn in enumerate(turns):
            with torch.no_grad():
                for tensor in turn.written:
                    tensor.add_(0)
            run = self._run_sparse_lookup if turn.tile.sparse_lookup else self.model.run_tile
            with torch.set_grad_enabled(turn.active):
                (forward[number],) = self._clocks[0].times_ns([partial(_keep, made[number], run, turn)])
        for number in reversed(range(len(turns))):
            outputs = [tensor for tensor in made[number] if tensor.requires_grad]
            if not turns[number].active or not outputs:
                continue
            for tensor in (*turns[number].inputs, *turns[number].parameters):
                tensor.grad = None
            gradients = [torch.ones_like(tensor) for tensor in outputs]
            made[number].clear()
            (backward[number],) = self._clocks[1].times_ns([partial(torch.autograd.backward, outputs, gradients)])
        return forward + backward

    def _count(self, tile: Tile, seconds: float) -> int:
        own = max(1, self.operands.bytes_of(tile))
        return max(1, min(MOST_COPIES, self.operands.bytes // own, int(RUN_SECONDS / max(seconds, 1e-9))))

    def _run(self, tile: Tile, copies: Sequence[Operands]) -> list[float]:
        """Times of all forward passes together, and of all backward passes together if there are any; on a GPU each with the time of
        launching them."""
        context, active = self.operands.context(tile), self.operands.is_active(tile)
        made: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []

        def forward() -> None:
            with torch.set_grad_enabled(active):
                for inputs, parameters in copies:
                    run = self._run_sparse_lookup if tile.sparse_lookup else self.model.run_tile
                    made.extend(run(tile, inputs, parameters, context))

        def ready() -> Callable[[], object]:
            for inputs, parameters in copies:
                for tensor in (*inputs, *parameters):
                    tensor.grad = None
            made[:] = [tensor for tensor in made if tensor.requires_grad]
            gradients.extend(torch.ones_like(tensor) for tensor in made)
            return lambda: torch.autograd.backward(made, gradients)

        times = self._clocks[0].times_ns([forward])
        if active and any(tensor.requires_grad for tensor in made):
            times += self._clocks[1].times_ns([ready()])
        return times

    def _run_sparse_lookup(
        self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext
    ) -> tuple[torch.Tensor, ...]:
        """As in a step: which rows there are, the rows, then the tile."""
        op, active = self.graph.operators[tile.operator], self.operands.is_active(tile)
        kinds = (self.graph.tensors[operand.tensor].kind for operand in op.inputs)
        known = [None if kind is TensorKind.ACTIVATION else tensor for kind, tensor in zip(kinds, inputs, strict=True)]
        rows, given = dict[int, torch.Tensor](), list(parameters)
        for place, operand in enumerate(op.parameters):
            if operand.tensor in self.graph.sparse:
                rows[place] = self.model.rows_asked_for(tile, place, known, context)
                taken = parameters[place].index_select(0, rows[place] - tile.parameters[place][0][0])
                given[place] = taken.requires_grad_(active)
        return self.model.run_sparse_lookup(tile, inputs, given, rows, context)


def _keep(outputs: list[torch.Tensor], run: Callable[..., Sequence[torch.Tensor]], turn: _Prepared) -> None:
    outputs.extend(run(turn.tile, turn.inputs, turn.parameters, turn.context))
