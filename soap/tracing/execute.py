"""Computing a traced model with real tensors: one tile of one operator, or the whole program as the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from soap.graph import OperatorGraph
from soap.regions import Interval, whole
from soap.simulator.tiling import Tile
from soap.tracing.calls import BufferRef, Call, Program, Ref, is_random, substitute
from soap.tracing.compiled import CompiledTile, OperatorProgram
from soap.tracing.model import TileContext
from soap.tracing.rules import tiled
from soap.tracing.rules.norm import batch_norm_apply, move_running_statistics
from soap.tracing.rules.notation import Local
from soap.tracing.rules.random import seeded


@dataclass
class ExecutableModel:
    """The ``TracedModel`` that ``importer.import_program`` makes."""

    graph: OperatorGraph
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    input_names: Sequence[str]
    example_inputs: Sequence[torch.Tensor]
    programs: Mapping[str, OperatorProgram]
    program: Program
    unchanged: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _compiled: dict[tuple[int, tuple[Interval, ...]], CompiledTile] = field(default_factory=dict, init=False, repr=False)

    def run_tile(
        self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext
    ) -> tuple[torch.Tensor, ...]:
        """See ``TracedModel.run_tile``."""
        key = (tile.operator, tile.intervals)
        compiled = self._compiled.get(key)
        if compiled is None:
            program = self.programs[self.graph.operators[tile.operator].name]
            compiled = self._compiled[key] = CompiledTile(self.program.values, program, tile)
        return compiled.run(inputs, parameters, context)

    def reference_loss(self, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], context: TileContext) -> torch.Tensor:
        """See ``TracedModel.reference_loss``: plain calls on whole tensors, sharing nothing with the tiled execution but random numbers."""
        values: dict[str, torch.Tensor] = dict(self.program.constants)
        values.update(zip(self.program.inputs, inputs, strict=True))
        values.update({value: parameters[name] for value, name in self.program.parameters.items() if name in parameters})
        last = {name: i for i, call in enumerate(self.program.calls) for name in call.operands}
        for i, call in enumerate(self.program.calls):
            result = self._whole(call, values, context)
            results = list(result) if isinstance(result, (tuple, list)) else [result]
            values.update(zip(call.outputs, results, strict=False))
            for name in call.operands:
                if last[name] == i and name != self.program.loss:
                    values.pop(name, None)
        return values[self.program.loss]

    def _whole(self, call: Call, values: Mapping[str, torch.Tensor], context: TileContext) -> Any:
        def change(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return values[leaf.name]
            return context.buffers[leaf.name] if isinstance(leaf, BufferRef) else leaf

        args, kwargs = substitute(list(call.args), change), substitute(dict(call.kwargs), change)
        if call.target is batch_norm_apply:
            return _plain_batch_norm(args, kwargs, context)
        if is_random(call):
            return self._random(call, [values[name] for name in call.operands], context)
        if call.target is torch.ops.aten.view.default:  # copies that made memory contiguous were dropped
            return args[0].reshape(args[1])
        return call.target(*args, **kwargs)

    def _random(self, call: Call, tensors: list[torch.Tensor], context: TileContext) -> Any:
        """Calls that draw random numbers draw the same as tiles do."""
        shapes = [self.program.values[name].shape for name in call.operands]
        out_shapes = [self.program.values[name].shape for name in call.outputs]
        boxes, out_boxes = [whole(shape) for shape in shapes], [whole(shape) for shape in out_shapes]
        local = Local(call, tensors, boxes, out_boxes, shapes, out_shapes, context)
        run = tiled(call, self.program.values).run
        if run is not None:
            return run(local)
        with seeded(local.random_seed, tensors[0].device if tensors else torch.device("cpu")):
            return local.plain()

    def end_step(self, context: TileContext) -> None:
        """See ``TracedModel.end_step``. Statistics move in the order of the program, whatever order the tiles ran in."""

        def change(leaf: Any) -> Any:
            return context.buffers[leaf.name] if isinstance(leaf, BufferRef) else leaf

        with torch.no_grad():
            for call in self.program.calls:
                if call.name in context.statistics:
                    buffers, options = substitute(call.kwargs["buffers"], change), call.kwargs
                    move_running_statistics(buffers, context.statistics.pop(call.name), options["count"], options["momentum"])
            for call in self.program.end_step if context.update_buffers else ():
                call.target(*substitute(list(call.args), change), **substitute(dict(call.kwargs), change))


def _plain_batch_norm(args: list[Any], kwargs: dict[str, Any], context: TileContext) -> torch.Tensor:
    """Training batch norm by torch's own kernel, from x alone: independent of the statistics that tiles exchange."""
    x, rest = args[0], iter(args[2:])
    weight, bias = (next(rest) if present else None for present in kwargs["affine"])
    mean, var = kwargs["buffers"]
    if not context.update_buffers and mean is not None:
        mean, var = mean.clone(), var.clone()
    return torch.nn.functional.batch_norm(x, mean, var, weight, bias, True, kwargs["momentum"], kwargs["eps"])
