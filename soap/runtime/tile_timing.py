"""How long one tile takes, run as a training step runs it: ``TracedModel.run_tile`` on its regions with autograd, then its backward pass.

Several copies of a tile run one after the other, and then backward as one, as the tiles of a segment do. They have memory of their own, as
much as the model has: in a step no tile finds its operands in the cache because it has just run. The operands are regions of what the model
computes from its example inputs, so that indices are in range, and laid out in memory as the operator before leaves them.

A tile on rows finds out which ones, copies them out of the table, and runs on them, all of which counts to its forward pass. The table is
one for all copies; their rows lie in memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from soap.graph import OperatorGraph, TensorKind
from soap.regions import Box, relative, volume, whole
from soap.runtime.timing import MOST_SECONDS, Sample, clock_for, repeat, sample
from soap.simulator.row_counts import parameters_held
from soap.simulator.tiling import Tile, tiles_of
from soap.strategy import OpConfig
from soap.tracing.model import TileContext, TracedModel

MOST_COPIES = 16
RUN_SECONDS = 0.05
"""No more copies are made than run forward and backward in about this time."""
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class TileTimes:
    """One tile's passes. ``backward`` is None if there is nothing to be done in it. ``launch_ns``: on a GPU, what the processor takes to
    launch each of them."""

    forward: Sample
    backward: Sample | None
    launch_ns: tuple[float, float] | None = None


class TileTimer:
    """Times tiles of one model on one device. ``threads`` and ``share``: see ``timing.CpuClock``. Keeps all values of a forward pass."""

    def __init__(self, model: TracedModel, device: torch.device, threads: int = 1, share: float = 1.0) -> None:
        self.model, self.graph, self.device = model, model.graph, device
        self._clocks = [clock_for(device, threads, share) for _ in range(2)]  # forward, backward: launching takes another time
        self._buffers = {name: tensor.detach().to(device, copy=True) for name, tensor in model.buffers.items()}
        self._values = self._all_values()
        self._bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._values.values())

    def time(self, tile: Tile, most_seconds: float = MOST_SECONDS) -> TileTimes:
        """The tile's passes, repeated for about so long at most."""
        tables = self._tables(tile)
        copies = [self._copy(tile, tables)]
        first = self._run(tile, copies)  # loads kernels
        if sum(first) < 1e9 * most_seconds:
            spent = sum(self._run(tile, copies)) / 1e9
            copies += [self._copy(tile, tables) for _ in range(self._count(tile, spent) - 1)]
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
        self._run(tile, [self._copy(tile, self._tables(tile))])

    def _count(self, tile: Tile, seconds: float) -> int:
        op = self.graph.operators[tile.operator]
        held = (tile.inputs, parameters_held(self.graph, tile), tile.outputs)
        groups = zip((op.inputs, op.parameters, op.outputs), held, strict=True)
        pairs = [(operand, box) for operands, boxes in groups for operand, box in zip(operands, boxes, strict=True)]
        own = sum(volume(box) * self.graph.tensors[operand.tensor].itemsize for operand, box in pairs)
        return max(1, min(MOST_COPIES, self._bytes // max(1, own), int(RUN_SECONDS / max(seconds, 1e-9))))

    def _run(self, tile: Tile, copies: Sequence[_Operands]) -> list[float]:
        """Times of all forward passes together, and of all backward passes together if there are any; on a GPU each with what launching
        them took."""
        context = TileContext(0, 0, self._buffers, unread=self._unread(tile))
        active = tile.operator in self.graph.backward_operators
        made: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []

        def forward() -> None:
            with torch.set_grad_enabled(active):
                for inputs, parameters in copies:
                    run = self._run_on_rows if tile.on_rows else self.model.run_tile
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

    def _run_on_rows(
        self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext
    ) -> tuple[torch.Tensor, ...]:
        """As a step does it: which rows there are, the rows, then the tile."""
        op, active = self.graph.operators[tile.operator], tile.operator in self.graph.backward_operators
        kinds = (self.graph.tensors[operand.tensor].kind for operand in op.inputs)
        known = [None if kind is TensorKind.ACTIVATION else tensor for kind, tensor in zip(kinds, inputs, strict=True)]
        rows, given = dict[int, torch.Tensor](), list(parameters)
        for place, operand in enumerate(op.parameters):
            if operand.tensor in self.graph.sparse:
                rows[place] = self.model.rows_asked_for(tile, place, known, context)
                taken = parameters[place].index_select(0, rows[place] - tile.parameters[place][0][0])
                given[place] = taken.requires_grad_(active)
        return self.model.run_on_rows(tile, inputs, given, rows, context)

    def _tables(self, tile: Tile) -> dict[int, torch.Tensor]:
        """By parameter (position), a tile's regions of those of which it takes rows."""
        operands = enumerate(zip(self.graph.operators[tile.operator].parameters, tile.parameters, strict=True))
        own = [(place, o.tensor, box) for place, (o, box) in operands if tile.on_rows and o.tensor in self.graph.sparse]
        return {place: self._region(name, box).contiguous() for place, name, box in own}

    def _copy(self, tile: Tile, tables: Mapping[int, torch.Tensor]) -> _Operands:
        """Operands in memory of their own, but for ``tables``; what the model is given and its constants are read where they are, as by all
        tiles of a step."""
        op, active = self.graph.operators[tile.operator], tile.operator in self.graph.backward_operators
        inputs, parameters = [], []
        for operand, box in zip(op.inputs, tile.inputs, strict=True):
            region = self._region(operand.tensor, box)
            if self.graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION:
                region = _dense(region, self._values[operand.tensor])
                region.requires_grad_(active and self.graph.tensors[operand.tensor].requires_grad and region.is_floating_point())
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
        """What nobody would look at if the operators behind were cut alike; of parts of the channels it is not known, and all is made."""
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


_Operands = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Inputs and parameters of a tile."""


def whole_tile(graph: OperatorGraph, position: int) -> Tile:
    """An operator in one piece."""
    return tiles_of(graph, position, OpConfig((1,) * len(graph.operators[position].factors), (0,)))[0]


def _dense(region: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy without gaps whose dimensions lie in memory in the same order as those of the tensor that it is cut from."""
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(like.dim()), key=order.__getitem__)
    return region.detach().permute(order).clone(memory_format=torch.contiguous_format).permute(back)
