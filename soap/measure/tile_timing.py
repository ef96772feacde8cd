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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from soap.measure.timing import MOST_SECONDS, Sample, clock_for, repeat, sample
from soap.model.dtypes import is_differentiable
from soap.model.graph import TensorKind
from soap.model.regions import Box, relative, volume, whole
from soap.plan.row_counts import parameters_held
from soap.plan.tiling import Tile, whole_tile
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel

Operands = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Inputs and parameters of a tile."""


class TileOperands:
    """Operands of one model's tiles on one device. ``bytes``: of all values of a forward pass, which it keeps."""

    def __init__(self, model: TracedModel, device: torch.device) -> None:
        self.model, self.graph, self.device = model, model.graph, device
        self._buffers = {name: tensor.detach().to(device, copy=True) for name, tensor in model.buffers.items()}
        self._values = self._all_values()
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._values.values())

    def is_active(self, tile: Tile) -> bool:
        """Whether a step computes a gradient of this tensor."""
        return tile.operator in self.graph.backward_operators

    def context(self, tile: Tile) -> TileContext:
        """The context of a first step."""
        return TileContext(0, 0, self._buffers, unread=self._unread(tile))

    def bytes_of(self, tile: Tile) -> int:
        """What the tile reads and makes."""
        op = self.graph.operators[tile.operator]
        held = (tile.inputs, parameters_held(self.graph, tile), tile.outputs)
        groups = zip((op.inputs, op.parameters, op.outputs), held, strict=True)
        pairs = [(operand, box) for operands, boxes in groups for operand, box in zip(operands, boxes, strict=True)]
        return sum(volume(box) * self.graph.tensors[operand.tensor].itemsize for operand, box in pairs)

    def sparse_tables(self, tile: Tile) -> dict[int, torch.Tensor]:
        """By parameter (position), the tile's region of each parameter of which it takes rows."""
        operands = enumerate(zip(self.graph.operators[tile.operator].parameters, tile.parameters, strict=True))
        own = [(place, o.tensor, box) for place, (o, box) in operands if tile.sparse_lookup and o.tensor in self.graph.sparse]
        return {place: self._region(name, box).contiguous() for place, name, box in own}

    def copy(self, tile: Tile, tables: Mapping[int, torch.Tensor]) -> Operands:
        """Operands in memory of their own, without ``tables``. The model's inputs and constants are read where they are."""
        op, active = self.graph.operators[tile.operator], self.is_active(tile)
        inputs, parameters = [], []
        for operand, box in zip(op.inputs, tile.inputs, strict=True):
            region = self._region(operand.tensor, box)
            if self.graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION:
                region = _dense(region, self._values[operand.tensor])
                region.requires_grad_(active and self.graph.tensors[operand.tensor].requires_grad and is_differentiable(region.dtype))
            inputs.append(region)
        for place, (operand, box) in enumerate(zip(op.parameters, tile.parameters, strict=True)):
            if place in tables:
                parameters.append(tables[place])
                continue
            region = self._region(operand.tensor, box).clone(memory_format=torch.contiguous_format)
            parameters.append(region.requires_grad_(active and self.graph.tensors[operand.tensor].requires_grad))
        return inputs, parameters

    def _region(self, name: str, box: Box) -> torch.Tensor:
        value = self._values[name]
        return value[relative(box, whole(value.shape))]

    def _unread(self, tile: Tile) -> frozenset[str]:
        """Whether batch norm's statistics can be left out, as nobody reads them if the operators behind are cut alike."""
        op, tiles = self.graph.operators[tile.operator], [tile]
        shapes = (self.graph.tensors[operand.tensor].shape for operand in op.inputs)
        if all(box == whole(shape) for box, shape in zip(tile.inputs, shapes, strict=True)):
            readers = {reader for out in op.outputs for reader, _ in self.graph.consumers.get(out.tensor, ())}
            tiles += [whole_tile(self.graph, reader) for reader in sorted(readers)]
        return self.model.unread(tiles)

    def _all_values(self) -> dict[str, torch.Tensor]:
        """Every tensor of the graph, from the example inputs."""
        given = dict(zip(self.model.input_names, self.model.example_inputs, strict=True))
        values = {
            name: tensor.detach().to(self.device) for name, tensor in {**self.model.parameters, **self.model.constants, **given}.items()
        }
        context = TileContext(0, 0, self._buffers, update_buffers=False)
        with torch.no_grad():
            for position, op in enumerate(self.graph.operators):
                tile = whole_tile(self.graph, position)
                inputs, parameters = (
                    [values[operand.tensor][relative(box, whole(values[operand.tensor].shape))] for operand, box in zip(*pair, strict=True)]
                    for pair in ((op.inputs, tile.inputs), (op.parameters, tile.parameters))
                )
                outputs = self.model.run_tile(tile, inputs, parameters, context)
                values.update({operand.tensor: output for operand, output in zip(op.outputs, outputs, strict=True)})
        return values


def _dense(region: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy without gaps whose dimensions are in the same order in memory as those of the tensor that it is cut from."""
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(like.dim()), key=order.__getitem__)
    return region.detach().permute(order).clone(memory_format=torch.contiguous_format).permute(back)


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
    """Times of one tile's passes. ``backward``: None if it has none. ``launch_ns``: on a GPU, the processor's time to launch each."""

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
        """The tiles in their order, in groups that take turns and together need no more memory than the model; on a GPU each alone."""
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
        """Times of all forward passes together, and of all backward passes if there are any; on a GPU with the times of launching them."""
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
