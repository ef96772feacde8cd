"""Computing a traced model with real tensors: one tile of one operator, or the whole program as the oracle.

Values may be drawn freely for some inputs: this is known of indices of lookups and of class labels. Offsets of bags, lengths, sorted ids,
permutations, masks and other inputs may have a structure that elements of different samples do not have together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch

from soap.errors import ModelError
from soap.model.dtypes import name_of, part_of, replaced
from soap.model.graph import OperatorGraph
from soap.model.regions import Box, Interval, lengths, relative, volume, whole
from soap.plan.tiling import Tile
from soap.tracing.calls import BufferRef, Call, Program, Ref, TileContext, argument, is_random, named_types, on_whole, substitute, walk
from soap.tracing.compiled import CompiledTile, OperatorProgram
from soap.tracing.labels import read_apart
from soap.tracing.record import ExportRecord
from soap.tracing.rules import tiled
from soap.tracing.rules.norm import batch_norm_apply, batch_norm_local, keep_state, move_running_statistics, moves_statistics
from soap.tracing.rules.notation import Local
from soap.tracing.rules.random import seeded

_LOOK_UPS = {"embedding", "embedding_bag"}
_LABELS = {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}
_MOVING = {
    "alias", "cat", "clone", "constant_pad_nd", "contiguous", "expand", "flatten", "pad", "permute", "repeat", "reshape", "roll", "select",
    "slice", "slice_scatter", "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip
_ELEMENTWISE = {"masked_fill", "to", "where"}


def element_inputs(program: Program) -> frozenset[str]:
    """The integer inputs that are only used as indices of lookups, or as class labels of which none is ignored."""
    inputs = {name for name in program.inputs if not _is_inexact(program.values[name].dtype) and program.values[name].dtype != torch.bool}
    origins: dict[str, frozenset[str]] = {name: frozenset([name]) for name in inputs}
    places = {name: name for name in inputs}  # value -> where its elements are used: calls that move them make places of their own
    used: set[str] = set()
    structured: set[str] = set()
    for call in program.calls:
        known = [name for name in call.operands if name in origins]
        if not known:
            continue
        own = frozenset[str]().union(*(origins[name] for name in known))
        read = _read_by_element(call)
        if read in known:
            used |= origins[read]
            structured = structured.union(*(origins[name] for name in known if name != read))
        elif len(call.outputs) != 1 or _is_inexact(program.values[call.outputs[0]].dtype):
            structured |= own
        elif call.kind in _MOVING:
            origins[call.outputs[0]], places[call.outputs[0]] = own, call.outputs[0]
        elif _is_elementwise(call, program) and len({places[name] for name in known}) == 1:
            origins[call.outputs[0]], places[call.outputs[0]] = own, places[known[0]]
        else:
            structured |= own
    return frozenset(used - structured)


def _read_by_element(call: Call) -> str:
    """The operand of which a call takes each element by itself, as an index or a label; "" if there is none."""
    if call.kind == "equal_bags":
        return call.operands[1]
    if call.kind in _LABELS and argument(call, "ignore_index", -100) >= 0:
        return ""  # a batch of ignored labels only would have no mean
    name = "target" if call.kind in _LABELS else "indices" if call.kind in _LOOK_UPS else ""
    found = argument(call, name)
    return found.name if isinstance(found, Ref) else ""


def _is_elementwise(call: Call, program: Program) -> bool:
    """Whether the call makes each element from one element and constants that are the same for all samples."""
    if call.kind not in _ELEMENTWISE and torch.Tag.pointwise not in getattr(call.target, "tags", ()):
        return False
    rank = len(program.values[call.outputs[0]].shape)
    shapes: Mapping[str, Any] = {name: program.values[name].shape for name in call.operands if name in program.constants}
    return all(len(shape) < rank or shape[0] == 1 for shape in shapes.values())


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class Source(Protocol):
    """The source of a traced model, by which it can be traced again."""

    def let_go(self, names: Collection[str]) -> None:
        """Free its values of these parameters, if it has some."""

    def take_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """From now on, trace with these values of buffers. ModelError if there is no file to trace from."""

    def trace(self, *, shapes: Sequence[Sequence[int]] | None = None, dtype: torch.dtype | None = None) -> TracedModel:
        """The model for inputs of these shapes, in this floating-point type; None: as it was traced."""


@dataclass
class TracedModel:
    """The operator graph, and everything that is needed to compute it with real tensors, tile by tile; made by ``importer``."""

    graph: OperatorGraph
    parameters: Mapping[str, torch.Tensor]
    """Full tensors by canonical state-dict name; fake or meta tensors if the model was traced for planning only."""
    buffers: Mapping[str, torch.Tensor]
    """Full tensors by state-dict name."""
    constants: Mapping[str, torch.Tensor]
    """Full tensors of the graph's CONSTANT tensors, by tensor name; for ``state`` their first values."""
    input_names: Sequence[str]
    """The graph's INPUT tensors in the order of the user's flattened tensor arguments."""
    example_inputs: Sequence[torch.Tensor]
    programs: Mapping[str, OperatorProgram]
    program: Program
    state: Mapping[str, str] = field(default_factory=dict)
    """Buffers that the forward pass changes, of which all ranks keep the same copy: name of the graph's CONSTANT tensor, if there is
    one, with the buffer's value when the step begins -> state-dict name."""
    transient: frozenset[str] = frozenset()
    """Buffers that are no entries of the state dict (``persistent=False``)."""
    unchanged: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The rest of the state dict, which training leaves as it is: buffers that are only read, parameters and buffers that nothing uses."""
    source: Source | None = None
    record: ExportRecord | None = None
    """What the model's file says of its export; None if it comes from no file."""
    shapes: Sequence[Sequence[int]] | None = None
    """Shapes of the inputs, if they are not the source's own."""
    dtype: torch.dtype | None = None
    """The type that stands for all floating-point types, if it is not the source's own choice."""
    autocast: str | None = None
    """The type that its calls are cast to by autocast, by torch's name; None without."""
    _compiled: dict[tuple[int, tuple[Interval, ...], bool], CompiledTile] = field(default_factory=dict, init=False, repr=False)

    def run_tile(
        self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext
    ) -> tuple[torch.Tensor, ...]:
        """Compute a tile's outputs from exactly the regions ``tile.inputs`` and ``tile.parameters``; differentiable.

        Returns one tensor of the shape of ``tile.outputs[k]`` per output k; where the operator has summed factors that are split,
        these are partial results. Inputs must not be modified by the caller before the backward pass.
        """
        if context.unread and context.unread.issuperset(self.programs[self.graph.operators[tile.operator].name].outputs):
            return tuple(inputs[0].new_zeros(lengths(box), dtype=torch.float64) for box in tile.outputs)
        return self._tile(tile, told=context.counts is not None).run(inputs, parameters, context)

    def rows_asked_for(self, tile: Tile, parameter: int, inputs: Sequence[torch.Tensor | None], context: TileContext) -> torch.Tensor:
        """The different rows (dimension 0, in the whole parameter's numbers) that a tile looks up of its part of a sparse parameter,
        ascending. ``inputs``: those that exist before the tile runs; None for others. ModelError if there is no such row."""
        return self._tile(tile).rows_asked_for(parameter, inputs, context)

    def run_sparse_lookup(
        self,
        tile: Tile,
        inputs: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        rows: Mapping[int, torch.Tensor],
        context: TileContext,
    ) -> tuple[torch.Tensor, ...]:
        """``run_tile`` with parameters of which only some rows are there. ``rows``: by parameter (position), which rows, ascending; at
        least those that the tile looks up. Its tensor has just these, one below the other."""
        return self._tile(tile, told=context.counts is not None).run_sparse_lookup(inputs, parameters, rows, context)

    def labels_counted(self, tile: Tile, inputs: Sequence[torch.Tensor | None]) -> tuple[str, torch.Tensor]:
        """For a tile of an operator with ``own_inputs``: the call that divides, and what the tile's own labels are of the number that it
        divides by, in float64. ``inputs``: regions as ``own_inputs`` say; None for activations."""
        return self._tile(tile, told=True).labels_counted(inputs)

    def _tile(self, tile: Tile, *, told: bool = False) -> CompiledTile:
        """``told``: whether a mean over labels is told what it divides by."""
        op = self.graph.operators[tile.operator]
        program = self.programs[op.name]
        key = (tile.operator, tile.intervals, told and program.own_labels is not None)
        compiled = self._compiled.get(key)
        if compiled is None:
            own = program.own_labels if told and program.own_labels is not None else program
            own_sums = any(self.graph.tensors[out.tensor].own_sums for out in op.outputs)
            compiled = self._compiled[key] = CompiledTile(self.program.values, own, tile, own_sums=own_sums)
        return compiled

    def forget_tiles(self) -> None:
        """Free the compiled tiles."""
        self._compiled.clear()

    def unread(self, tiles: Sequence[Tile]) -> frozenset[str]:
        """Values that no tile of a plan reads, for ``TileContext``: batch norm's statistics if each tile sees all of its channels."""
        found: dict[str, bool] = {}
        for tile in tiles:
            steps = self.programs[self.graph.operators[tile.operator].name].steps
            for step in (step for step in steps if step.call.target is batch_norm_apply):
                x, sums = step.call.operands[:2]
                shape = self.program.values[x].shape
                dims = [dim.interval(tile.intervals, size) == (0, size) for dim, size in zip(step.operands[0], shape, strict=True)]
                found[sums] = found.get(sums, True) and all(seen for i, seen in enumerate(dims) if i != 1)
        return frozenset(sums for sums, always in found.items() if always)

    def is_pure(self, operator: int) -> bool:
        """Whether tiles of an operator are functions of their operands alone, of fixed shapes: no random numbers, nothing noted for the end
        of the step, no routed rows."""
        op = self.graph.operators[operator]
        if any(operand.tensor in self.graph.routed for operand in (*op.inputs, *op.outputs)):
            return False  # how many rows there are follows from other tensors
        calls = [step.call for step in self.programs[op.name].steps]
        leaves = (leaf for call in calls for leaf in walk((call.args, dict(call.kwargs))))
        return not any(is_random(call) for call in calls) and not any(isinstance(leaf, BufferRef) for leaf in leaves)

    def let_go(self, names: Sequence[str]) -> None:
        """Free the values of these parameters and constants; meta tensors take their places, also in what the model was traced from."""
        for own in (self.parameters, self.constants, self.program.constants):
            assert isinstance(own, dict)
            own.update({name: own[name].detach().to("meta") for name in names if name in own})
        if self.source is not None:
            self.source.let_go(self.parameters.keys() & names)

    def reference_loss(self, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], context: TileContext) -> torch.Tensor:
        """The scalar loss by the whole exported program, call by call; differentiable. It shares but random numbers with the tiles."""
        (loss,) = self.whole_values(self.program, inputs, parameters, context, [self.program.loss])
        return loss

    def whole_values(
        self,
        program: Program,
        inputs: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        context: TileContext,
        wanted: Sequence[str],
    ) -> list[torch.Tensor]:
        """What a program, this model's or a part of it, computes with whole tensors: the values of these names."""
        given = (*inputs, *parameters.values())
        device = given[0].device if given else None
        values: dict[str, torch.Tensor] = {name: constant.to(device) for name, constant in program.constants.items()}
        values.update({value: context.buffers[name].clone() for value, name in program.state.items()})
        values.update(zip(program.inputs, inputs, strict=True))
        values.update({value: parameters[name] for value, name in program.parameters.items() if name in parameters})
        last = {name: i for i, call in enumerate(program.calls) for name in call.operands}
        for i, call in enumerate(program.calls):
            result = self._whole(call, values, context, device)
            results = list(result) if isinstance(result, (tuple, list)) else [result]
            values.update(zip(call.outputs, results, strict=False))
            for name in call.operands:
                if last[name] == i and name not in wanted:
                    values.pop(name, None)
        return [values[name] for name in wanted]

    def _whole(self, call: Call, values: Mapping[str, torch.Tensor], context: TileContext, device: torch.device | None) -> Any:
        def change(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return values[leaf.name]
            return context.buffers[leaf.name] if isinstance(leaf, BufferRef) else leaf

        if call.target is keep_state:
            context.note_state({b.name: values[value] for b, value in zip(call.kwargs["buffers"], call.operands, strict=True)})
        args, kwargs = substitute(list(call.args), change), substitute(dict(call.kwargs), change)
        if call.target is batch_norm_apply:
            return _plain_batch_norm(args[0], args[2:], kwargs, context)
        if call.target is batch_norm_local:
            return self._grouped_batch_norm(call, args, kwargs, context)
        if is_random(call) and not context.drawn_by_torch:
            return self._random(call, [values[name] for name in call.operands], context)
        if is_random(call) and "device" in kwargs:
            kwargs["device"] = device
        return on_whole(call, args, kwargs)

    def _grouped_batch_norm(self, call: Call, args: list[Any], kwargs: dict[str, Any], context: TileContext) -> torch.Tensor:
        """Training batch norm of each region that a tile of the plan has, by itself; of all of x if no plan is given."""
        x, affine = args[0], args[1:]
        regions = [region for region in self._regions(call, context.tiles) if volume(region)]
        out = torch.empty_like(x)
        for region in regions or [whole(x.shape)]:
            channels = slice(*region[1])
            own = {**kwargs, "buffers": [None if b is None or not moves_statistics(region) else b[channels] for b in kwargs["buffers"]]}
            part = relative(region, whole(x.shape))
            out[part] = _plain_batch_norm(x[part], [a[channels] for a in affine], own, context)
        return out

    def _regions(self, call: Call, tiles: Sequence[Tile]) -> list[Box]:
        """The distinct regions of a call's first operand that these tiles of its operator read."""
        for op in self.graph.operators:
            for step in self.programs[op.name].steps:
                if step.call.name == call.name:
                    position, maps, shape = self.graph.index[op.name], step.operands[0], self.program.values[call.operands[0]].shape
                    own = [tile.intervals for tile in tiles if tile.operator == position]
                    return list(dict.fromkeys(tuple(m.interval(t, size) for m, size in zip(maps, shape, strict=True)) for t in own))
        return []

    def resized(self, shapes: Sequence[Sequence[int]]) -> TracedModel:
        """The same model for inputs of these shapes, without parameters. ModelError in one line if it cannot be traced for them."""
        if self.source is None:
            raise ModelError("the model was made from a program in memory; expected soap.load of a file, for batches of other sizes")
        return replace(self.source.trace(shapes=shapes, dtype=self.dtype), parameters={}, shapes=shapes, dtype=self.dtype)

    def with_state(self, values: Mapping[str, torch.Tensor]) -> TracedModel:
        """The same model with other values of buffers that it only reads, by state-dict name; names that it does not have are ignored.
        ModelError if it cannot be traced again."""
        known = {name: tensor for name, tensor in values.items() if name in self.unchanged and name not in self.parameters}
        if all(_is_equal(tensor, self.unchanged[name]) for name, tensor in known.items()):
            return self
        if self.source is None:
            raise ModelError("the model was made from a program in memory; expected soap.load of a file, for other values of buffers")
        self.source.take_state(known)
        return replace(self.source.trace(shapes=self.shapes, dtype=self.dtype), parameters={}, shapes=self.shapes, dtype=self.dtype)

    def in_type(self, dtype: torch.dtype) -> TracedModel:
        """This model with this type in place of all floating-point types that calls name. ModelError if it cannot be traced again."""
        if all(replaced(kind, dtype) == kind for call in self.program.calls for kind in named_types(call)):
            return self
        if self.source is None:
            raise ModelError(f"the model was made from a program in memory; expected soap.load(..., dtype={name_of(dtype)!r}) of a file")
        other = self.source.trace(shapes=self.shapes, dtype=dtype)
        buffers = {name: tensor.to(other.buffers[name].dtype) for name, tensor in self.buffers.items()}
        return replace(other, parameters=self.parameters, buffers=buffers, record=self.record, shapes=self.shapes, dtype=dtype)

    def widened(self) -> TracedModel | None:
        """The same model in float64, without parameters, to judge rounding by; None if it cannot be traced again."""
        return None if self.source is None else replace(self.source.trace(shapes=self.shapes, dtype=torch.float64), parameters={})

    def _random(self, call: Call, tensors: list[torch.Tensor], context: TileContext) -> Any:
        """Calls that draw random numbers draw the same numbers as tiles do."""
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
        """Update the buffers by noted statistics (in program order), found state and step counters; once per rank and training step."""
        buffers, statistics = context.buffers, context.statistics
        with torch.no_grad():
            moved = [move for move in self._moving if move[0] in statistics]
            move_running_statistics([(buffers[mean], buffers[var], statistics[name], momentum) for name, mean, var, momentum in moved])
            statistics.clear()
            for name, value in context.state.items():
                buffers[name].copy_(value)
            context.state.clear()
            for call in self.program.end_step if context.update_buffers else ():
                args = [buffers[arg.name] if isinstance(arg, BufferRef) else arg for arg in call.args]
                call.target(*args, **call.kwargs)

    @cached_property
    def element_inputs(self) -> frozenset[str]:
        """Integer inputs of which each element can be drawn by itself: indices of lookups and class labels, and nothing else."""
        return element_inputs(self.program)

    @cached_property
    def read_apart(self) -> frozenset[str]:
        """Parameters that may still be read when their gradients are complete, because something reads them without a gradient."""
        return read_apart(self.program)

    @cached_property
    def _moving(self) -> list[tuple[str, str, str, float]]:
        """Calls that move running statistics, in order: (call, running mean, running variance, momentum)."""
        calls = [call for call in self.program.calls if call.target in (batch_norm_apply, batch_norm_local)]
        named = [(call, call.kwargs["buffers"]) for call in calls if None not in call.kwargs["buffers"]]
        return [(call.name, mean.name, var.name, call.kwargs["momentum"]) for call, (mean, var) in named]


def _is_equal(value: torch.Tensor, known: torch.Tensor) -> bool:
    return not known.is_meta and torch.equal(value.to(known.dtype), known)


def _plain_batch_norm(x: torch.Tensor, affine: Sequence[torch.Tensor], kwargs: dict[str, Any], context: TileContext) -> torch.Tensor:
    """Training batch norm by torch's own kernel, from x alone: independent of the statistics that tiles exchange."""
    rest = iter(affine)
    weight, bias = (next(rest) if present else None for present in kwargs["affine"])
    mean, var = kwargs["buffers"]
    if not context.update_buffers and mean is not None:
        mean, var = mean.clone(), var.clone()
    if x.numel() == x.shape[1]:  # which torch.nn.functional refuses
        mean = var = None
    return torch.batch_norm(x, weight, bias, mean, var, True, kwargs["momentum"], kwargs["eps"], True)


class _Given(torch.autograd.Function):
    """A number that stands for outputs whose gradients are given. Autograd then has the only reference to these gradients, and frees
    each when it has been used. What is handed to ``backward`` itself stays until the end, and so do the outputs."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros((), dtype=part_of(outputs[0].dtype))  # autograd begins with real numbers only

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = (None, *ctx.gradients)
        ctx.gradients.clear()
        return given


class _Root(torch.autograd.Function):
    """``root_of``."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return hollow(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient  # the same tensor: autograd counts who refers to it


def root_of(output: torch.Tensor) -> torch.Tensor:
    """A tensor without memory from which a backward pass begins in place of an output, whose values need not be there until then."""
    return cast(torch.Tensor, _Root.apply(output))  # type: ignore[no-untyped-call]


def leaf_and_value(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(leaf of autograd's graph, without memory, on which gradients are left; the tensor's values, computed from it). The values stay only
    as long as somebody refers to them, such as a node that has saved them."""
    leaf = tensor.detach().requires_grad_()
    value: torch.Tensor = torch.ops.aten.alias(leaf)  # hands a gradient on as it is: autograd counts who refers to it
    leaf.data = hollow(tensor)
    return leaf, value


_ONE: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def hollow(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, type and device, all of whose elements are one, without a value."""
    key = like.dtype, like.device
    if key not in _ONE:
        _ONE[key] = like.new_empty(1)
    return like.new_empty(0).set_(_ONE[key].untyped_storage(), 0, like.shape, (0,) * like.dim())


def given(gradients: list[torch.Tensor], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The number with which to begin a backward pass. ``gradients``: of the outputs, in their order; the list is emptied then."""
    return cast(torch.Tensor, _Given.apply(gradients, *outputs))  # type: ignore[no-untyped-call]


class PlainModel(TracedModel):
    """A model made by hand, without a program: tiles are computed by ``run_tile`` and nothing else, for one size and type alone. Nothing
    is known of its operators beside that. It sets the attributes that are known."""

    @cached_property
    def element_inputs(self) -> frozenset[str]:
        """None."""
        return frozenset()

    @cached_property
    def read_apart(self) -> frozenset[str]:
        """All parameters."""
        return frozenset(self.parameters)

    def let_go(self, names: Sequence[str]) -> None:
        """Free these values; nobody else has them."""
        for own in (self.parameters, self.constants):
            assert isinstance(own, dict)
            own.update({name: own[name].detach().to("meta") for name in names if name in own})

    def unread(self, tiles: Sequence[Tile]) -> frozenset[str]:
        """All is looked at."""
        return frozenset()

    def is_pure(self, operator: int) -> bool:
        """Not that anybody knows."""
        return False

    def end_step(self, context: TileContext) -> None:
        """There are no buffers."""

    def resized(self, shapes: Sequence[Sequence[int]]) -> TracedModel:
        """There is no program to be traced again."""
        raise ModelError("made by hand for one size")

    def with_state(self, values: Mapping[str, torch.Tensor]) -> TracedModel:
        """There are no buffers."""
        return self

    def in_type(self, dtype: torch.dtype) -> TracedModel:
        """Nothing is known of calls."""
        return self

    def widened(self) -> TracedModel | None:
        """There is no program to be traced again."""
        return None
