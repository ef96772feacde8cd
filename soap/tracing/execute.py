"""Computing a traced model with real tensors: one tile of one operator, or the whole program as the oracle."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from soap.errors import ModelError
from soap.graph import OperatorGraph
from soap.regions import Box, contains, lengths, relative, whole
from soap.simulator.tiling import Tile
from soap.tracing.calls import BufferRef, Call, Program, Ref, substitute
from soap.tracing.model import TileContext
from soap.tracing.rules.norm import batch_norm_apply
from soap.tracing.rules.notation import Local, Maps, Tiled
from soap.tracing.rules.random import keep_mask


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One call of an operator, with its maps over the operator's factors."""

    call: Call
    rule: Tiled
    operands: tuple[Maps, ...]
    outputs: tuple[Maps, ...]


@dataclass(frozen=True, slots=True)
class OperatorProgram:
    """An operator's calls in order. ``inputs`` and ``parameters``: (value, maps) in the order of the operator's operands."""

    steps: tuple[ProgramStep, ...]
    inputs: tuple[tuple[str, Maps], ...]
    parameters: tuple[tuple[str, Maps], ...]
    outputs: tuple[str, ...]


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

    def run_tile(
        self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext
    ) -> tuple[torch.Tensor, ...]:
        """See ``TracedModel.run_tile``."""
        program = self.programs[self.graph.operators[tile.operator].name]
        external: dict[tuple[str, Maps], tuple[torch.Tensor, Box]] = {}
        for (key, tensor), box in zip(
            (*zip(program.inputs, inputs, strict=True), *zip(program.parameters, parameters, strict=True)),
            (*tile.inputs, *tile.parameters),
            strict=True,
        ):
            external[key] = (tensor, box)
        made: dict[str, tuple[torch.Tensor, Box]] = {}
        # Replicas compute the same values; only one copy per device moves the running statistics, and they all move alike.
        for step in program.steps:
            self._step(step, tile, external, made, context)
        return tuple(made[value][0] for value in program.outputs)

    def _step(
        self,
        step: ProgramStep,
        tile: Tile,
        external: Mapping[tuple[str, Maps], tuple[torch.Tensor, Box]],
        made: dict[str, tuple[torch.Tensor, Box]],
        context: TileContext,
    ) -> None:
        values = self.program.values
        tensors, boxes = [], []
        for name, maps in zip(step.call.operands, step.operands, strict=True):
            box = tuple(dim.interval(tile.intervals, size) for dim, size in zip(maps, values[name].shape, strict=True))
            tensor, held = made[name] if name in made else external[(name, maps)]
            if held != box:
                if not contains(held, box) and all(a < b for a, b in box):
                    raise ModelError(f"internal: {step.call.name} needs {box} of {name}, only {held} was computed")
                tensor = tensor[relative(box, held)]
            tensors.append(tensor)
            boxes.append(box)
        output_boxes = [
            tuple(dim.interval(tile.intervals, size) for dim, size in zip(maps, values[name].shape, strict=True))
            for name, maps in zip(step.call.outputs, step.outputs, strict=True)
        ]
        local = Local(
            call=step.call,
            tensors=tensors,
            boxes=boxes,
            output_boxes=output_boxes,
            shapes=[values[name].shape for name in step.call.operands],
            output_shapes=[values[name].shape for name in step.call.outputs],
            random_seed=random_seed(context, step.call.name),
            buffers=context.buffers,
            update_buffers=context.update_buffers,
        )
        result = step.rule.run(local) if step.rule.run is not None else local.plain()
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        for name, tensor, box in zip(step.call.outputs, results, output_boxes, strict=False):
            if tuple(tensor.shape) != lengths(box):
                raise ModelError(f"internal: {step.call.name} gave shape {tuple(tensor.shape)} for region {box}")
            made[name] = (tensor, box)

    def reference_loss(
        self, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], context: TileContext
    ) -> torch.Tensor:
        """See ``TracedModel.reference_loss``: plain calls on whole tensors, sharing nothing with the tiled execution but dropout's masks."""
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
        if call.kind in ("dropout", "dropout_", "scaled_dot_product_attention"):
            return self._random(call, args, kwargs, context)
        if call.target is torch.ops.aten.view.default:  # copies that made memory contiguous were dropped
            return args[0].reshape(args[1])
        if kwargs.get("device", 0) is None:
            kwargs["device"] = next(iter(values.values())).device
        return call.target(*args, **kwargs)

    def _random(self, call: Call, args: list[Any], kwargs: dict[str, Any], context: TileContext) -> Any:
        """Calls with dropout draw the same masks as tiles do; everything else about them is ATen's own."""
        local = Local(
            call=call,
            tensors=[a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)],
            boxes=[whole(self.program.values[n].shape) for n in call.operands],
            output_boxes=[whole(self.program.values[n].shape) for n in call.outputs],
            shapes=[self.program.values[n].shape for n in call.operands],
            output_shapes=[self.program.values[n].shape for n in call.outputs],
            random_seed=random_seed(context, call.name),
        )
        if call.kind == "scaled_dot_product_attention":
            if not local.get("dropout_p", 0.0):
                return call.target(*args, **kwargs)
            from soap.tracing.rules.attention import _run_attention

            return _run_attention(local)
        x, probability = local.tensors[0], float(local.get("p"))
        if not local.get("train") or probability == 0.0:
            return x
        return x * keep_mask(local, x.shape, whole(x.shape), probability, x)

    def end_step(self, context: TileContext) -> None:
        """See ``TracedModel.end_step``."""
        with torch.no_grad():
            for call in self.program.end_step:
                change = lambda leaf: context.buffers[leaf.name] if isinstance(leaf, BufferRef) else leaf  # noqa: E731
                call.target(*substitute(list(call.args), change), **substitute(dict(call.kwargs), change))


def _plain_batch_norm(args: list[Any], kwargs: dict[str, Any], context: TileContext) -> torch.Tensor:
    """Training batch norm by torch's own kernel, from x alone: independent of the statistics that tiles exchange."""
    x, rest = args[0], iter(args[2:])
    weight, bias = (next(rest) if present else None for present in kwargs["affine"])
    mean, var = kwargs["buffers"]
    if not context.update_buffers and mean is not None:
        mean, var = mean.clone(), var.clone()
    return torch.nn.functional.batch_norm(x, mean, var, weight, bias, True, kwargs["momentum"], kwargs["eps"])


def random_seed(context: TileContext, call: str) -> int:
    """63 bits from (seed, step, call): random numbers do not depend on how the operator is split."""
    digest = hashlib.sha256(f"{context.seed}/{context.step}/{call}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
