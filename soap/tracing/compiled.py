"""A tile of an operator made ready to run: which regions each of its calls reads and makes is worked out once, not in every step.

A training step is then a list of calls on tensors in numbered places. If a call's operands are whole tensors it is the plain ATen call,
so that a tile that holds everything costs no more than the model itself.

*Narrow products*: a part of a sum is made in float32, unless the graph says otherwise (``Tensor.own_sums``), because it may be far larger
than the sum. To multiply in float32 for that takes a GPU many times as long as to multiply 16-bit operands: tensor cores add up in float32
anyway, and cuBLAS gives that out. CPUs have no such product; there operands are widened (``types.wide``). The results are the same but for
the order of additions: products of 16-bit numbers are exact in float32. The gradient of a part is that of the rounded sum, in the type of
the operands, so nothing is lost when it is narrowed again.

*Look-ups*: a tile of a sparse parameter need not have its whole part of the table. It is computed in two steps. First its indices, from
inputs that exist when a step begins. Then, when the rows have come, the call itself, with each index replaced by its row's place among
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from soap.errors import ModelError
from soap.model.regions import Box, contains, lengths, relative, volume, whole
from soap.plan.tiling import Tile
from soap.tracing.autocast import Autocast
from soap.tracing.calls import Call, Ref, TileContext, Value, argument, is_random, substitute, with_argument
from soap.tracing.rules.linear import added_to_bias, first_bias
from soap.tracing.rules.notation import Local, Maps, Tiled
from soap.tracing.rules.random import seeded
from soap.tracing.torch_parts import is_on_gpu, stands_for_gpu
from soap.tracing.types import LOWER_TYPES, wide


def rows_asked_for(local: Local, rule: Tiled) -> torch.Tensor:
    """The different rows that a tile looks up of its part of the table, ascending; ModelError if the table has no such row.

    The table itself is not needed.
    """
    indices = local.tensors[1] if rule.picks is None else rule.picks(local)
    rows, (start, stop) = local.shapes[0][0], local.boxes[0][0]
    found: torch.Tensor = torch.unique(_from_the_front(local, indices))
    if found.numel() and not 0 <= (worst := _furthest(found)) < rows:
        raise ModelError(f"{local.call.name} looks up row {worst} of a table of {rows} rows; expected 0 to {rows - 1}")
    return found if (start, stop) == (0, rows) else found[(found >= start) & (found < stop)]


def look_up(local: Local, rule: Tiled, rows: torch.Tensor) -> Any:
    """The call's result for a tile whose table has just ``rows`` (ascending, all that it looks up among them)."""
    table, indices, *others = local.tensors
    if not len(rows):  # kernels want at least one row; nothing reads it
        table = table.new_zeros((1, *table.shape[1:]))
    count, entire = len(table), local.boxes[0][0] == (0, local.shapes[0][0])
    indices = _from_the_front(local, indices)
    places = torch.searchsorted(rows, indices.contiguous())
    if len(rows):
        places = torch.where(rows[places.clamp(max=count - 1)] == indices, places, count)
    call = local.call
    padding = argument(call, "padding_idx")
    if padding is not None and padding >= 0:
        place = int(torch.searchsorted(rows, padding))
        if place == len(rows) or rows[place] != padding:
            place = -1 if entire else count + 1
            places = places if entire else torch.where(indices == padding, place, places)
        call = with_argument(call, "padding_idx", place)
    # Places behind the table stand for rows of other tiles; so it is no whole table then.
    length = count if entire else count + 2
    own = replace(
        local,
        call=call,
        tensors=[table, places, *others],
        boxes=[((0, count), *local.boxes[0][1:]), *local.boxes[1:]],
        shapes=[(length, *local.shapes[0][1:]), *local.shapes[1:]],
    )
    return own.plain() if rule.run is None else rule.run(own)


def _from_the_front(local: Local, indices: torch.Tensor) -> torch.Tensor:
    """Subscripts with negative ones counted from the end."""
    if local.call.kind != "index":
        return indices
    return torch.where(indices < 0, indices + local.shapes[0][0], indices)


def _furthest(ascending: torch.Tensor) -> int:
    """An index that is out of range, if there is one."""
    first, last = int(ascending[0]), int(ascending[-1])
    return first if first < 0 else last


def can_stay_narrow(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are operands of one 16-bit type on a GPU, numbers of experts aside."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return is_on_gpu(tensors[0]) and tensors[0].dtype in LOWER_TYPES and len(dtypes) == 1


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product of two 16-bit matrices, or two batches of as many, in float32."""
    if stands_for_gpu():
        return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32)
    return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)


class _Product(torch.autograd.Function):
    """``multiply``, which autograd does not know."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return multiply(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors
        narrow = gradient.to(a.dtype)
        return (
            narrow @ b.mT if ctx.needs_input_grad[0] else None,
            a.mT @ narrow if ctx.needs_input_grad[1] else None,
        )


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of 16-bit tensors in float32, as ``torch.matmul`` broadcasts. Both have two dimensions at least."""
    if b.dim() == 2:
        found: torch.Tensor = _Product.apply(a.reshape(-1, a.shape[-1]), b)  # type: ignore[no-untyped-call]
        return found.view(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    wide_a, wide_b = (own.expand(*batch, *own.shape[-2:]).reshape(-1, *own.shape[-2:]) for own in (a, b))
    found = _Product.apply(wide_a, wide_b)  # type: ignore[no-untyped-call]
    return found.view(*batch, a.shape[-2], b.shape[-1])


def _linear(local: Local) -> torch.Tensor:
    (x, weight), bias = local.tensors[:2], first_bias(local)
    found = product(x, weight.t())
    return found if bias is None else found + bias


def _matmul(local: Local) -> torch.Tensor | None:
    a, b = local.tensors
    return product(a, b) if min(a.dim(), b.dim()) > 1 else None


def _addmm(local: Local) -> torch.Tensor:
    _, a, b = local.tensors
    return added_to_bias(local, product(a, b))


def _expert_product(local: Local) -> torch.Tensor:
    rows, weight, ids = local.tensors
    if rows.dim() == 3:
        return product(rows, weight)
    first = local.boxes[1][0][0]
    counts = [int((ids == first + expert).sum()) for expert in range(len(weight))]
    return torch.cat([product(own, matrix) for own, matrix in zip(torch.split(rows, counts), weight, strict=True)])


PRODUCTS: Mapping[str, Callable[[Local], torch.Tensor | None]] = MappingProxyType(
    {
        **{"linear": _linear, "matmul": _matmul, "mm": _matmul, "bmm": _matmul, "addmm": _addmm, "baddbmm": _addmm},
        "expert_product": _expert_product,
    }
)
"""By kind of call: a part of a sum from operands that ``can_stay_narrow``; None if it has to be widened after all."""


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One call of an operator, with its maps over the operator's factors."""

    call: Call
    rule: Tiled
    operands: tuple[Maps, ...]
    outputs: tuple[Maps, ...]


@dataclass(frozen=True, slots=True)
class OperatorProgram:
    """An operator's calls in order. ``inputs`` and ``parameters``: (value, maps) in the order of the operator's operands. ``own_labels``:
    the same calls for tiles that are told what a mean over labels divides by (``Operator.own_inputs``); None for other operators."""

    steps: tuple[ProgramStep, ...]
    inputs: tuple[tuple[str, Maps], ...]
    parameters: tuple[tuple[str, Maps], ...]
    outputs: tuple[str, ...]
    own_labels: OperatorProgram | None = None


class CompiledTile:
    """The calls of one tile. ``run`` may be called again and again, but not from several threads at once."""

    def __init__(self, values: Mapping[str, Value], program: OperatorProgram, tile: Tile, *, own_sums: bool = False) -> None:
        """``own_sums``: parts of sums are of the type of their sum (``Tensor.own_sums``)."""
        self._own_sums = own_sums
        self._places: dict[tuple[str, Maps] | str, int] = {}
        self._boxes: list[Box] = []
        for key, box in zip((*program.inputs, *program.parameters), (*tile.inputs, *tile.parameters), strict=True):
            self._place(key, box)
        self._steps = [self._prepare(step, tile, values) for step in program.steps]
        self._outputs = [self._places[name] for name in program.outputs]
        self._inputs = len(program.inputs)
        self._made_here = [None] * (len(self._boxes) - len(program.inputs) - len(program.parameters))
        self._forget_early()

    def run(self, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext) -> tuple[torch.Tensor, ...]:
        """The tile's outputs from its regions of inputs and parameters."""
        made: list[Any] = [*inputs, *parameters, *self._made_here]
        for step in self._steps:
            step.perform(made, context)
        return tuple([made[place] for place in self._outputs])

    def rows_asked_for(self, parameter: int, inputs: Sequence[torch.Tensor | None], context: TileContext) -> torch.Tensor:
        """See ``TracedModel.rows_asked_for``."""
        made: list[Any] = [*inputs, *[None] * (len(self._boxes) - len(inputs))]
        look_up = self._look_up_of(parameter)
        for number in self._before(look_up, frozenset(place for place, tensor in enumerate(inputs) if tensor is not None)):
            self._steps[number].perform(made, context)
        return self._steps[look_up].rows_asked_for(made)

    def run_sparse_lookup(
        self,
        inputs: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        rows: Mapping[int, torch.Tensor],
        context: TileContext,
    ) -> tuple[torch.Tensor, ...]:
        """See ``TracedModel.run_sparse_lookup``."""
        look_ups = {self._look_up_of(parameter): own for parameter, own in rows.items()}
        made: list[Any] = [*inputs, *parameters, *self._made_here]
        for number, step in enumerate(self._steps):
            if number in look_ups:
                step.look_up(made, look_ups[number])
            else:
                step.perform(made, context)
        return tuple([made[place] for place in self._outputs])

    def labels_counted(self, inputs: Sequence[torch.Tensor | None]) -> tuple[str, torch.Tensor]:
        """See ``TracedModel.labels_counted``."""
        made: list[Any] = [*inputs, *[None] * (len(self._boxes) - len(inputs))]
        (counting,) = (number for number, step in enumerate(self._steps) if step.rule.count is not None)
        context = TileContext()
        for number in self._before(counting, frozenset(place for place, tensor in enumerate(inputs) if tensor is not None)):
            self._steps[number].perform(made, context)
        return self._steps[counting].local.call.name, self._steps[counting].counted(made)

    def _look_up_of(self, parameter: int) -> int:
        """The step that looks up rows of a parameter."""
        found = [number for number, step in enumerate(self._steps) if any(place == self._inputs + parameter for place, _ in step.reads)]
        if len(found) != 1 or not self._steps[found[0]].rule.looks_up or self._steps[found[0]].reads[0][0] != self._inputs + parameter:
            raise ModelError(f"internal: parameter {parameter} of {self._steps[0].local.call.name} is not looked up; please report this")
        return found[0]

    def _before(self, step: int, known: frozenset[int]) -> list[int]:
        """The steps that compute those operands of a step (without the first operand) that depend on ``known`` inputs only, in order."""
        computable, makers = set(known), dict[int, int]()
        for number, earlier in enumerate(self._steps[:step]):
            if all(place in computable for place, _ in earlier.reads):
                computable.update(place for place, _ in earlier.makes)
                makers.update({place: number for place, _ in earlier.makes})
        wanted = [place for place, _ in self._steps[step].reads[1:] if place in makers]
        found: set[int] = set()
        while wanted:
            number = makers[wanted.pop()]
            if number not in found:
                found.add(number)
                wanted += [place for place, _ in self._steps[number].reads if place in makers]
        return sorted(found)

    def _place(self, key: tuple[str, Maps] | str, box: Box) -> int:
        self._places[key] = len(self._boxes)
        self._boxes.append(box)
        return self._places[key]

    def _prepare(self, step: ProgramStep, tile: Tile, values: Mapping[str, Value]) -> _Step:
        call = step.call
        reads, boxes = [], []
        for name, maps in zip(call.operands, step.operands, strict=True):
            box = _box(maps, tile, values[name])
            place = self._places[name if name in self._places else (name, maps)]
            reads.append((place, _cut(self._boxes[place], box, call.name)))
            boxes.append(box)
        output_boxes = [_box(maps, tile, values[name]) for name, maps in zip(call.outputs, step.outputs, strict=True)]
        shapes = [values[name].shape for name in call.operands]
        output_shapes = [values[name].shape for name in call.outputs]
        local = Local(call, (), boxes, output_boxes, shapes, output_shapes)
        part_of_sum = not self._own_sums and _is_part_of_sum(step, boxes, shapes)
        named = argument(call, "dtype") if part_of_sum else None
        if isinstance(named, torch.dtype) and named in LOWER_TYPES:
            call = local.call = with_argument(call, "dtype", torch.float32)
        entire = all(box == whole(shape) for box, shape in zip((*boxes, *output_boxes), (*shapes, *output_shapes), strict=True))
        run = _plain_runner(call) if step.rule.run is None or (entire and _may_run_plainly(step)) else None
        rule = step.rule
        if isinstance(call.target, Autocast) and rule.run is not None:
            rule = replace(rule, run=call.target.within(rule.run))
        shapes_made = [None if values[name].routed else lengths(box) for name, box in zip(call.outputs, output_boxes, strict=True)]
        makes = [(self._place(name, box), shape) for name, box, shape in zip(call.outputs, output_boxes, shapes_made, strict=True)]
        narrow = None if isinstance(call.target, Autocast) else PRODUCTS.get(call.kind)
        return _Step(local, reads, makes, run, rule, widens=part_of_sum, narrow=narrow if part_of_sum else None)

    def _forget_early(self) -> None:
        """Tensors that only the tile itself reads are freed behind their last reader, as in a plain forward pass."""
        seen = set(self._outputs)
        for step in reversed(self._steps):
            last = {place for place, _ in (*step.reads, *step.makes)} - seen
            step.forgets = tuple(last)
            step.unread = last.intersection(place for place, _ in step.makes)
            seen |= last


Runner = Callable[[Sequence[torch.Tensor], TileContext], Any]


class _Step:
    """One call. ``reads``: (place, what to cut of it). ``makes``: (place, shape; None of routed rows). Shapes are checked when it first
    runs. ``widens``: its result is a part of a sum; narrow types are computed in float32, as parts may be far larger than their sum.
    ``narrow``: makes such a result without that, where operands allow it."""

    __slots__ = (
        "_checked", "_cuts", "_narrow", "_only", "_places", "_widens", "forgets", "local", "makes", "reads", "rule", "run", "unread",
    )  # fmt: skip

    def __init__(
        self,
        local: Local,
        reads: Sequence[tuple[int, _Cut]],
        makes: Sequence[tuple[int, tuple[int, ...] | None]],
        run: Runner | None,
        rule: Tiled,
        *,
        widens: bool = False,
        narrow: Callable[[Local], torch.Tensor | None] | None = None,
    ) -> None:
        self._widens, self._narrow = widens, narrow
        self.local, self.reads, self.makes, self.run, self.rule = local, reads, makes, run, rule
        self.forgets: tuple[int, ...] = ()
        self.unread: frozenset[int] | set[int] = frozenset()
        """Results that nobody reads. Their form depends on torch's kernel, on the type and on whether gradients are wanted, so they are
        not checked."""
        self._places = tuple(place for place, _ in reads)
        self._cuts = any(cut is not None for _, cut in reads)
        self._only = makes[0][0] if len(makes) == 1 else None
        self._checked = False

    def perform(self, made: list[Any], context: TileContext) -> None:
        """Run the call on the tensors in ``made`` and put its results there."""
        if self._cuts:
            tensors = [made[place] if cut is None else cut(made[place]) for place, cut in self.reads]
        else:
            tensors = [made[place] for place in self._places]
        narrow = self._product(tensors) if self._narrow is not None and can_stay_narrow(tensors) else None
        if self._widens and narrow is None:
            tensors = [wide(tensor) for tensor in tensors]
        if narrow is not None:
            result: Any = narrow
        elif self.run is not None:
            result = self.run(tensors, context)
        else:
            local = self.local
            assert self.rule.run is not None
            local.tensors, local.context = tensors, context
            result = self.rule.run(local)
            local.tensors = ()
        results = result if isinstance(result, (tuple, list)) else (result,)
        if self._widens:
            results = [wide(tensor) for tensor in results]
        if not self._checked:
            self._check(results)
        if self._only is not None:
            made[self._only] = results[0]
        else:
            for (place, _), tensor in zip(self.makes, results, strict=False):
                made[place] = tensor
        for place in self.forgets:
            made[place] = None

    def _product(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        assert self._narrow is not None
        self.local.tensors = tensors
        found = self._narrow(self.local)
        self.local.tensors = ()
        return found

    def rows_asked_for(self, made: Sequence[Any]) -> torch.Tensor:
        """The rows that the call, a lookup, reads. Values that are not known yet are missing in ``made``."""
        return rows_asked_for(replace(self.local, tensors=self._operands(made)), self.rule)

    def counted(self, made: Sequence[Any]) -> torch.Tensor:
        """What the labels in ``made`` are of the number that the call, a mean, divides by. Its scores may be missing."""
        assert self.rule.count is not None
        return self.rule.count(replace(self.local, tensors=self._operands(made)))

    def look_up(self, made: list[Any], rows: torch.Tensor) -> None:
        """Run the call, a lookup, on a table that has only these rows."""
        operands = self._operands(made)
        result = look_up(replace(self.local, tensors=[wide(t) for t in operands] if self._widens else operands), self.rule, rows)
        results = result if isinstance(result, (tuple, list)) else (result,)
        if self._widens:
            results = [wide(tensor) for tensor in results]
        self._check(results)
        for (place, _), tensor in zip(self.makes, results, strict=False):
            made[place] = tensor
        for place in self.forgets:
            made[place] = None

    def _operands(self, made: Sequence[Any]) -> list[Any]:
        return [made[place] if cut is None or made[place] is None else cut(made[place]) for place, cut in self.reads]

    def _check(self, results: Sequence[torch.Tensor]) -> None:
        for (place, shape), tensor in zip(self.makes, results, strict=False):
            if place not in self.unread and shape is not None and tensor.shape != shape:
                name, box = self.local.call.name, self.local.output_boxes
                raise ModelError(f"internal: {name} gave shape {tuple(tensor.shape)} for region {box}; please report this")
        self._checked = True


def _box(maps: Maps, tile: Tile, value: Value) -> Box:
    return tuple(dim.interval(tile.intervals, size) for dim, size in zip(maps, value.shape, strict=True))


def _is_part_of_sum(step: ProgramStep, boxes: Sequence[Box], shapes: Sequence[Sequence[int]]) -> bool:
    """Whether a tile with these regions of a call's operands gives a part of a sum: a factor that no output follows is cut."""
    if not step.rule.summed:
        return False
    followed = {dim.factor for maps in step.outputs for dim in maps}
    operands = zip(step.operands, boxes, shapes, strict=True)
    places = ((dim, interval, size) for maps, box, shape in operands for dim, interval, size in zip(maps, box, shape, strict=True))
    return any(dim.factor is not None and dim.factor not in followed and interval != (0, size) for dim, interval, size in places)


_Cut = Callable[[torch.Tensor], torch.Tensor] | None
"""Takes a part of a tensor; None takes all of it."""


def _cut(held: Box, box: Box, call: str) -> _Cut:
    """The part ``box`` of a tensor that holds ``held``; empty parts may lie anywhere."""
    if held == box:
        return None
    if volume(box) == 0:
        shape = lengths(box)
        return lambda tensor: tensor.new_empty(shape)
    if not contains(held, box):
        raise ModelError(f"internal: {call} needs region {box} of an operand, only {held} was computed; please report this")
    region = relative(box, held)
    return lambda tensor: tensor[region]


def _may_run_plainly(step: ProgramStep) -> bool:
    """Whether a call on whole tensors is just the ATen call: views are not, nor lookups with sparse gradients, since ours are dense."""
    call, own = step.call, step.rule.light or step.rule.lean
    return isinstance(call.target, torch._ops.OpOverload) and not (own or is_random(call) or argument(call, "sparse", False))


def _plain_runner(call: Call) -> Runner:
    """The call's target on local operands; random numbers start from the call's seed."""
    if is_random(call):
        return lambda tensors, context: _seeded(call, tensors, context)
    places = [i for i, arg in enumerate(call.args) if isinstance(arg, Ref)]
    target, template, kwargs = call.target, list(call.args), dict(call.kwargs)
    if len(places) < len(call.operands):
        return _nested_runner(call)
    if places == list(range(len(places))):
        rest = template[len(places) :]
        if kwargs:
            return lambda tensors, _: target(*tensors, *rest, **kwargs)
        return lambda tensors, _: target(*tensors, *rest)

    def run(tensors: Sequence[torch.Tensor], _: TileContext) -> Any:
        args = template.copy()
        for place, tensor in zip(places, tensors, strict=True):
            args[place] = tensor
        return target(*args, **kwargs)

    return run


def _nested_runner(call: Call) -> Runner:
    """Operands in lists, or passed by name."""
    spans: list[tuple[int, int | None]] = []  # position of an argument that is a tensor (None), or of a list with so many tensors
    for i, arg in enumerate(call.args):
        if isinstance(arg, Ref):
            spans.append((i, None))
        elif isinstance(arg, (list, tuple)) and arg and all(isinstance(item, Ref) for item in arg):
            spans.append((i, len(arg)))
    if sum(count or 1 for _, count in spans) < len(call.operands):
        return lambda tensors, _: Local(call, tensors, (), (), (), ()).plain()
    target, template, kwargs = call.target, list(call.args), dict(call.kwargs)

    def run(tensors: Sequence[torch.Tensor], _: TileContext) -> Any:
        args, first = template.copy(), 0
        for place, count in spans:
            args[place] = tensors[first] if count is None else tensors[first : first + count]
            first += count or 1
        return target(*args, **kwargs)

    return run


def _seeded(call: Call, tensors: Sequence[torch.Tensor], context: TileContext) -> Any:
    following = iter(tensors)
    fill: Callable[[Any], Any] = lambda leaf: next(following) if isinstance(leaf, Ref) else leaf  # noqa: E731
    with seeded(context.random_seed(call.name), tensors[0].device if tensors else torch.device("cpu")):
        return call.target(*substitute(list(call.args), fill), **substitute(dict(call.kwargs), fill))
