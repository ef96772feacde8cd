"""From a ``Program`` to a traced model: groups of calls become operators with names, factor kinds and operands.

What kernels on GPUs neither write nor read of the values that an operator's calls pass to each other; and in which type a call computes.

``Operator.saved_bytes`` is a bound of memory: every value counts, and every copy that a kernel may need. A view is no kernel, though, and
products of matrices take operands that lie in any order of rows and columns. Copies are left that are really made: of values whose elements
do not lie in order (``scattered``), where a call asks for another shape, or ``torch.matmul`` for a batch of matrices.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import Literal

import torch
from torch.export import ExportedProgram

from soap.errors import ModelError, SoapWarning
from soap.model.dtypes import TF32, is_differentiable, name_of, replaced
from soap.model.graph import (
    PRODUCT_KINDS,
    WHOLE,
    DimMap,
    Drawn,
    Factor,
    FactorKind,
    Operand,
    Operator,
    OperatorGraph,
    Tensor,
    TensorKind,
    Unsplit,
    is_rounded_by_default,
)
from soap.tracing.autocast import Autocast, Caster, ListOf
from soap.tracing.calls import Call, Program, Value, argument
from soap.tracing.compiled import OperatorProgram, ProgramStep
from soap.tracing.decompose import decompose
from soap.tracing.execute import TracedModel
from soap.tracing.fold import fold
from soap.tracing.footprints import footprints_later
from soap.tracing.fuse import Fuser, Group, Step, compose, compose_all, simplified, unsplit
from soap.tracing.labels import batch_dimensions, find_sparse, gradients
from soap.tracing.loss_terms import find_loss_terms, own_labels
from soap.tracing.naming import anchor, canonical_names, group_outputs, operator_names, tensor_names
from soap.tracing.nodes import canonical_buffers
from soap.tracing.reader import Reader, Shapes, at_sizes, is_dynamic
from soap.tracing.rewriting import find_equal_bags, find_grouped_queries, find_masks, find_positions, unsort_experts
from soap.tracing.routing import route_experts
from soap.tracing.row_counting import measured_by_examples
from soap.tracing.rules.norm import batch_norm_apply
from soap.tracing.rules.notation import Maps, target_name

_RESHAPING = frozenset({"reshape", "view", "flatten", "unflatten", "ravel", "_unsafe_view"})
"""Views of values that lie in order; of others, too, if no dimensions become one. Else copies."""
_PERMUTING = frozenset({"transpose", "permute", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "mT", "mH", "numpy_T", "matrix_H"})
_SAME_ORDER = frozenset({"squeeze", "unsqueeze", "alias", "detach", "lift_fresh"})
_PARTS = frozenset({"expand", "select", "slice", "narrow", "unbind", "split", "split_with_sizes", "chunk", "diagonal", "unfold"})
"""Views, whose gradients are no views: they are written as a whole."""
_REDUCING = frozenset(
    {"softmax", "log_softmax", "_softmax", "_log_softmax", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "mean", "sum",
     "amax", "var", "logsumexp", "cross_entropy_loss", "nll_loss", "nll_loss_nd"}
)  # fmt: skip
"""Calls that torch.compile's kernels have with pointwise ones, beside those that are light."""
_PRODUCTS = frozenset({"matmul", "mm", "bmm", "mv", "dot", "vdot"})


def scattered(program: Program) -> frozenset[str]:
    """Values whose elements do not lie in memory in the order of their indices. Calls that are no views are taken to write in order."""
    found: set[str] = set()
    for call in program.calls:
        again = call.kind in _SAME_ORDER | _RESHAPING and any(name in found for name in call.operands)
        if call.kind in _PERMUTING | _PARTS or (again and is_view(call, program, found)):
            found.update(call.outputs)
    return frozenset(found)


def is_view(call: Call, program: Program, out_of_order: Collection[str]) -> bool:
    """Whether a call and its gradient only say differently how elements lie in memory, so that a GPU has nothing to do."""
    if call.kind in _RESHAPING:
        source = call.operands[0]
        return source not in out_of_order or not _merges(program.values[source].shape, program.values[call.outputs[0]].shape)
    if call.kind in ("dropout", "feature_dropout"):
        return not argument(call, "train") or not argument(call, "p")
    return call.kind in _PERMUTING | _SAME_ORDER


def _merges(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether dimensions become one: else every position in ``before`` where a dimension begins is one in ``after``, too."""
    steps = [set(accumulate((size for size in shape if size > 1), mul, initial=1)) for shape in (before, after)]
    return not steps[0] <= steps[1]


def _memory(steps: Sequence[ProgramStep], program: Program, out_of_order: Collection[str]) -> dict[str, str]:
    """Of each value that is made: the one that shares its memory and was written."""
    memory: dict[str, str] = {}
    for step in steps:
        viewed = is_view(step.call, program, out_of_order)
        memory.update((name, memory.get(step.call.operands[0], step.call.operands[0]) if viewed else name) for name in step.call.outputs)
    return memory


def _written(memory: Mapping[str, str], outputs: Collection[str]) -> set[str]:
    """What is written to be read within the operator alone."""
    return {own for name, own in memory.items() if name not in outputs and own in memory} - {memory.get(name, "") for name in outputs}


def joined_bytes(steps: Sequence[ProgramStep], outputs: Collection[str], program: Program, out_of_order: Collection[str]) -> int:
    """Of an operator's ``saved_bytes``, beyond what no kernel writes: what light calls, norms, softmax and losses pass to each other or
    keep, other than for a product."""
    memory = _memory(steps, program, out_of_order)
    heavy = [step for step in steps if not (step.rule.light or step.call.kind in _REDUCING)]
    edges = {memory.get(name, name) for step in heavy for name in (*step.call.operands, *step.call.outputs)}
    kept = sum(step.rule.saved_bytes - step.rule.fused_bytes for step in steps if step not in heavy)
    return kept + sum(_bytes(program, name) for name in _written(memory, outputs) - edges)


def unwritten_bytes(steps: Sequence[ProgramStep], outputs: Collection[str], program: Program, out_of_order: Collection[str]) -> int:
    """Of an operator's ``saved_bytes``: views, what views show of it outside, and copies that products do not need."""
    made = [name for step in steps for name in step.call.outputs]
    between = {name for name in made if name not in outputs}
    written = _written(_memory(steps, program, out_of_order), outputs)
    free = sum(_bytes(program, name) for name in between) - sum(_bytes(program, name) for name in written)
    products = [step for step in steps if step.call.kind in _PRODUCTS]
    return free + sum(step.rule.saved_bytes - copied_bytes(step.call, program, out_of_order) for step in products)


def copied_bytes(call: Call, program: Program, out_of_order: Collection[str]) -> int:
    """Bytes of a product's operands that are laid out anew: in ``torch.matmul`` of more than one dimension of batches these become one,
    which needs values in order and without repetition. Other products take any rows and columns."""
    shapes = [program.values[name].shape for name in call.operands]
    batch = max((shape[:-2] for shape in shapes), key=len)
    if len(batch) < 2 or min(map(len, shapes)) < 3:
        return 0
    whole = program.values[call.outputs[0]].shape[:-2]
    copies = [name for name, shape in zip(call.operands, shapes, strict=True) if name in out_of_order or shape[:-2] != whole]
    return sum(prod((*whole, *program.values[name].shape[-2:])) * program.values[name].dtype.itemsize for name in copies)


def _bytes(program: Program, name: str) -> int:
    value = program.values[name]
    return prod(value.shape) * value.dtype.itemsize


def arithmetic_of(call: Call, values: Mapping[str, Value]) -> str:
    """The type by name; empty if no operand is a floating-point number."""
    if isinstance(call.target, Autocast):
        return name_of(call.target.dtype)
    dtype = next((values[name].dtype for name in call.operands if is_differentiable(values[name].dtype)), None)
    if dtype is torch.float32 and _rounds(call.kind):
        return TF32
    return "" if dtype is None else name_of(dtype)


def _rounds(kind: str) -> bool:
    if is_rounded_by_default(kind):
        return bool(torch.backends.cudnn.allow_tf32)
    return kind in PRODUCT_KINDS and torch.get_float32_matmul_precision() != "highest"


BatchNorm = Literal["global", "local"]
"""Over what training batch norm normalises: the whole batch, or each tile's own part of it."""


def import_program(
    exported: ExportedProgram,
    *,
    name: str,
    batch_dims: Mapping[str, int] | None = None,
    plan_only: bool = False,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    autocast_device: ListOf = "cpu",
    batch_norm: BatchNorm = "global",
    sum_dtype: str | None = None,
    shapes: Shapes | None = None,
) -> TracedModel:
    """The traced model of an exported training program that returns its scalar loss.

    ``batch_dims``: input name -> its batch dimension (default 0; -1: the input has none). ``plan_only``: shapes suffice, no values are
    computed or kept. ``dtype`` replaces every floating-point dtype. ``autocast``: with the casts that ``torch.autocast`` would make
    on ``autocast_device``.
    ``batch_norm``: whether training batch norm normalises by the whole batch or each tile by itself. ``sum_dtype``: in which type partial
    results of 16-bit tensors are made and summed (``SUM_DTYPES``); None: float32 on CPUs, their own on GPUs. ``shapes``: of the inputs, if
    the program was exported with symbolic sizes; those of its examples if None.

    Raises ModelError in one line for programs that cannot be planned; warns once per kind of call without a rule.
    """
    with torch.device("cpu"):  # what importing makes lies there, whatever default device the user has set
        if is_dynamic(exported):
            exported = at_sizes(exported, shapes)
        caster = None if autocast is None else Caster(autocast, autocast_device)
        program = Reader(exported, dtype, caster=caster, local_statistics=batch_norm == "local").read()
        find_equal_bags(program)
        unsort_experts(program)
        route_experts(program, _batch(program, batch_dims or {}))
        find_masks(program, plan_only=plan_only)
        find_grouped_queries(program)
        find_positions(program)
        fold(program, plan_only=plan_only)
        decompose(program)
        fold(program, plan_only=plan_only)  # what parts of a call need beside its operands
        groups = Fuser(program).run()
        if not any(program.loss in group.made for group in groups):
            raise ModelError("the loss is a constant; expected a loss that depends on the inputs or parameters")
        graph, programs = _Builder(exported, program, groups, name, batch_dims or {}).build()
        graph = graph.summed_in(sum_dtype or ("own" if autocast_device == "cuda" else "float32"))
        _warn_if_untrained(graph)
        wanted = {t.name for t in graph.parameters}
        state = {n: exported.state_dict[n] for n in dict.fromkeys(program.parameters.values()) if n in wanted}
        model = TracedModel(
            graph=graph,
            parameters={n: _converted(tensor, dtype) for n, tensor in state.items()},
            buffers=program.buffers,
            constants={**program.constants, **{value: program.buffers[n] for value, n in program.state.items() if value in graph.tensors}},
            input_names=tuple(program.inputs),
            example_inputs=_examples(exported, program, dtype),
            programs=programs,
            program=program,
            state=program.state,
            transient=frozenset(name for name in program.buffers if name not in exported.state_dict),
            unchanged=_unchanged(exported, program, graph, dtype),
        )
        known, parts = footprints_later(model, on_gpus=autocast_device == "cuda")
        found = replace(graph, footprints=known, part_footprints=parts)
        model.graph = replace(found, sparse=measured_by_examples(model), loss_terms=find_loss_terms(model))
        return model


def _batch(program: Program, batch_dims: Mapping[str, int]) -> int | None:
    """How many samples the inputs have; None if they have none, or differ."""
    dims = [(program.values[name].shape, batch_dims.get(name, 0)) for name in program.inputs]
    found = {shape[dim] for shape, dim in dims if 0 <= dim < len(shape)}
    return found.pop() if len(found) == 1 else None


def _unchanged(exported: ExportedProgram, program: Program, graph: OperatorGraph, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The entries of the state dict that training does not change. One of several names is one tensor."""
    changed = {*(t.name for t in graph.parameters), *graph.aliases, *program.buffers}
    first = {name: one for name, one in canonical_names(exported.state_dict).items() if name not in changed}
    made = {one: _converted(exported.state_dict[one], dtype) for one in dict.fromkeys(first.values())}
    return {name: made[one] for name, one in first.items()}


def _warn_if_untrained(graph: OperatorGraph) -> None:
    if not graph.tensors[graph.loss].requires_grad:
        warnings.warn("the loss depends on no trainable parameter: nothing will be trained", SoapWarning, stacklevel=3)


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor in the type that replaces its own. Numbers that are only marked as conjugated or negated are written out."""
    return tensor.detach().resolve_conj().resolve_neg().to(replaced(tensor.dtype, dtype))


def _examples(exported: ExportedProgram, program: Program, dtype: torch.dtype | None) -> tuple[torch.Tensor, ...]:
    """The tensors with which the program was exported, in the order of its inputs; none if the file holds none."""
    if exported.example_inputs is None:
        return ()
    leaves, _ = torch.utils._pytree.tree_flatten(exported.example_inputs)
    tensors = tuple(_converted(leaf, dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
    if [tuple(t.shape) for t in tensors] != [program.values[v].shape for v in program.inputs]:
        raise ModelError(
            f"the example inputs have shapes {[list(t.shape) for t in tensors]}, not those of inputs {', '.join(program.inputs)}; "
            "expected the arguments in the order of forward's signature: export again"
        )
    return tensors


@dataclass
class _Builder:
    exported: ExportedProgram
    program: Program
    groups: list[Group]
    name: str
    batch_dims: Mapping[str, int]
    warned: set[str] = field(default_factory=set)
    unsplit: dict[str, tuple[Unsplit, ...]] = field(default_factory=dict)

    def build(self) -> tuple[OperatorGraph, dict[str, OperatorProgram]]:
        """The graph, and each operator's calls."""
        program = self.program
        names = operator_names(program, self.groups)
        outputs = group_outputs(program, self.groups)
        self.tensor_names = tensor_names(program, names, outputs)
        self.grads = gradients(program, {n: self.exported.state_dict[n].requires_grad for n in program.parameters.values()})
        self.out_of_order = scattered(program)
        self.samples = batch_dimensions(program, self.groups, self.batch_dims)
        operators, programs = [], {}
        for group, name, made in zip(self.groups, names, outputs, strict=True):
            operator, programs[name] = self._operator(group, name, made)
            operators.append(operator)
        aliases = {
            alias: n
            for alias, n in (canonical_names(self.exported.state_dict) | canonical_buffers(self.exported)).items()
            if alias != n and (n in self.tensor_names.values() or n in program.buffers)
        }
        loss = self.tensor_names[program.loss]
        graph = OperatorGraph(self.name, tuple(operators), self._tensors(operators), loss, aliases, self.unsplit)
        applied = [call.operands[:2] for call in program.calls if call.target is batch_norm_apply]
        between = [(x, sums) for x, sums in applied if {x, sums} <= self.tensor_names.keys()]  # others stay within an operator
        sums_of = {self.tensor_names[sums]: self.tensor_names[x] for x, sums in between}
        own = ((self.tensor_names.get(value), self.tensor_names.get(info.routed)) for value, info in program.values.items())
        routed = {tensor: ids for tensor, ids in own if tensor is not None and ids is not None}
        return replace(graph, sparse=find_sparse(graph, programs, program.values), sums_of=sums_of, routed=routed), programs

    def _operator(self, group: Group, name: str, outputs: Sequence[str]) -> tuple[Operator, OperatorProgram]:
        partitionable = all(step.rule.known for step in group.steps)
        if not partitionable:
            self._warn(group)
        numbers = self._factors(group, outputs) if partitionable else []
        steps = self._steps(group, numbers)
        made = {value: maps for step in steps for value, maps in zip(step.call.outputs, step.outputs, strict=True)}
        reads = dict.fromkeys(
            (value, maps) for step in steps for value, maps in zip(step.call.operands, step.operands, strict=True) if value not in made
        )
        inputs = tuple((v, m) for v, m in reads if v not in self.program.parameters)
        parameters = tuple((v, m) for v, m in reads if v in self.program.parameters)
        operator = Operator(
            name=name,
            kind=anchor(group).call.kind,
            factors=self._named_factors(group, numbers, inputs, parameters, {v: made[v] for v in outputs}),
            inputs=tuple(Operand(self.tensor_names[v], m) for v, m in inputs),
            parameters=tuple(Operand(self.tensor_names[v], m) for v, m in parameters),
            outputs=tuple(Operand(self.tensor_names[v], made[v]) for v in outputs),
            flops=sum(s.rule.flops for s in steps),
            saved_bytes=self._saved_bytes(steps, outputs),
            calls=tuple(s.call.name for s in steps),
            partitionable=partitionable,
            arithmetic=arithmetic_of(anchor(group).call, self.program.values),
            skipped_share=max(s.rule.skipped_share for s in steps),
            fused_bytes=sum(s.rule.fused_bytes for s in steps) + unwritten_bytes(steps, outputs, self.program, self.out_of_order),
            views=sum(is_view(s.call, self.program, self.out_of_order) for s in steps),
            drawn=tuple(self._drawn(s) for s in steps if s.rule.drawn),
            joined_bytes=joined_bytes(steps, outputs, self.program, self.out_of_order),
        )
        whole = unsplit_dimensions(self.program, group, steps, (*inputs, *parameters), outputs, self.tensor_names)
        self.unsplit.update({name: whole} if whole else {})
        program = OperatorProgram(tuple(steps), inputs, parameters, tuple(outputs))
        own = self._own_labels(group, numbers, operator, program)
        if own is None:
            return operator, program
        own_inputs = tuple(Operand(self.tensor_names[v], m) for v, m in own.inputs)
        return replace(operator, own_inputs=own_inputs), replace(program, own_labels=own)

    def _own_labels(self, group: Group, numbers: Sequence[int], op: Operator, program: OperatorProgram) -> OperatorProgram | None:
        """The calls as they are for tiles that are given only their own labels, if it has such (``own_labels``)."""
        counting = [s for s in group.steps if s.rule.count is not None]
        if len(counting) != 1 or not all(factor.summed for factor in op.factors):
            return None
        (mean,) = counting
        change = {factor: compose(dim, self._change(group, numbers)) for factor, dim in mean.factors.items()}
        given = {v for v, _ in program.inputs if self._kind(v) in (TensorKind.INPUT, TensorKind.CONSTANT)}
        return own_labels(program, mean.call, change, self.program.values, given, len(op.factors))

    @staticmethod
    def _change(group: Group, numbers: Sequence[int]) -> dict[int, DimMap]:
        """The group's factors as those of the operator."""
        return {f: DimMap(numbers.index(f)) if f in numbers else unsplit(size) for f, size in group.sizes.items()}

    def _steps(self, group: Group, numbers: Sequence[int]) -> list[ProgramStep]:
        """The group's calls over the factors that stay."""
        change = self._change(group, numbers)

        def over(names: Sequence[str], maps: Sequence[Maps]) -> tuple[Maps, ...]:
            shapes = [self.program.values[name].shape for name in names]
            return tuple(simplified(compose_all(m, change), shape) for m, shape in zip(maps, shapes, strict=True))

        return [ProgramStep(s.call, s.rule, over(s.call.operands, s.operands), over(s.call.outputs, s.outputs)) for s in group.steps]

    def _saved_bytes(self, steps: Sequence[ProgramStep], outputs: Sequence[str]) -> int:
        """All bytes that the calls keep, and all that they pass to each other, including views: a region may have to be copied."""
        values = self.program.values
        between = [v for s in steps for v in s.call.outputs if v not in outputs]
        return sum(s.rule.saved_bytes for s in steps) + sum(prod(values[v].shape) * values[v].dtype.itemsize for v in between)

    def _drawn(self, step: ProgramStep) -> Drawn:
        shape, dims = self.program.values[step.call.outputs[0]].shape, step.outputs[0]
        return Drawn(dims[0] if dims and not step.rule.drawn_at_once else WHOLE, shape[0] if shape else 1, step.rule.drawn)

    def _warn(self, group: Group) -> None:
        for step in group.steps:
            name = target_name(step.call.target)
            if not step.rule.known and name not in self.warned:
                self.warned.add(name)
                place = step.call.path or step.call.name
                warnings.warn(
                    f"{no_rule(self.program, step.call)} (first at {place}): kept whole, on one device at a time",
                    SoapWarning,
                    stacklevel=2,
                )

    def _factors(self, group: Group, outputs: Sequence[str]) -> list[int]:
        """Factor numbers that may really be split: followed exactly by every output, or summed and followed by none."""
        result = []
        for factor in sorted(group.sizes):
            follows = [any(dim.factor == factor and dim.exact for dim in group.made[v]) for v in outputs]
            touched = any(dim.factor == factor for v in outputs for dim in group.made[v])
            if (all(follows) and factor not in group.summed) or (factor in group.summed and not touched):
                result.append(factor)
        return result

    def _named_factors(
        self,
        group: Group,
        numbers: Sequence[int],
        inputs: Sequence[tuple[str, Maps]],
        parameters: Sequence[tuple[str, Maps]],
        outputs: Mapping[str, Maps],
    ) -> tuple[Factor, ...]:
        sample = {m[self.samples[v]].factor for v, m in (*inputs, *outputs.items()) if v in self.samples and m}
        in_parameter = {dim.factor for _, maps in parameters for dim in maps}
        in_output = {dim.factor for maps in outputs.values() for dim in maps}
        result: list[Factor] = []
        for i, number in enumerate(numbers):
            if i in sample:
                kind = FactorKind.SAMPLE
            elif i not in in_output:
                kind = FactorKind.REDUCTION
            elif i in in_parameter:
                kind = FactorKind.PARAMETER
            else:
                kind = FactorKind.ATTRIBUTE
            base = group.names[number]
            name, again = base, 2
            while any(f.name == name for f in result):
                name, again = f"{base}{again}", again + 1
            result.append(Factor(name, group.sizes[number], kind, summed=i not in in_output))
        return tuple(result)

    def _tensors(self, operators: Sequence[Operator]) -> dict[str, Tensor]:
        program = self.program
        used = {o.tensor for op in operators for o in (*op.inputs, *op.parameters, *op.outputs)}
        result: dict[str, Tensor] = {}
        for value, info in program.values.items():
            name = self.tensor_names.get(value)
            if name is None or (name not in used and value not in program.inputs):
                continue
            dtype = str(info.dtype).removeprefix("torch.")
            result[name] = Tensor(name, info.shape, dtype, info.dtype.itemsize, self._kind(value), value in self.grads)
        return result

    def _kind(self, value: str) -> TensorKind:
        if value in self.program.parameters:
            return TensorKind.PARAMETER
        if value in self.program.inputs:
            return TensorKind.INPUT
        known = value in self.program.constants or value in self.program.state
        return TensorKind.CONSTANT if known else TensorKind.ACTIVATION


_REGROUPING = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel"}


def unsplit_dimensions(
    program: Program,
    group: Group,
    steps: Sequence[ProgramStep],
    reads: Sequence[tuple[str, Maps]],
    outputs: Sequence[str],
    tensor_names: Mapping[str, str],
) -> tuple[Unsplit, ...]:
    """The dimensions of an operator's tensors that none of its factors follows, outputs first; each size and reason once."""
    made = {value: maps for step in steps for value, maps in zip(step.call.outputs, step.outputs, strict=True)}
    result: dict[tuple[int, str], Unsplit] = {}
    for value, maps in (*((v, made[v]) for v in outputs), *reads):
        for dim, (size, follows) in enumerate(zip(program.values[value].shape, maps, strict=True)):
            if size > 1 and follows.factor is None:
                reason = _reason(program, group, value, dim)
                result.setdefault((size, reason), Unsplit(tensor_names[value], dim, size, reason))
    return tuple(result.values())


def _reason(program: Program, group: Group, value: str, dim: int) -> str:
    unknown = next((step.call for step in group.steps if not step.rule.known), None)
    if unknown is not None:
        return no_rule(program, unknown)
    if value in group.made and (factor := group.made[value][dim].factor) is not None:
        return f"only some of the operator's results follow {group.names[factor]}"
    blamed = _blamed(program, group, value, dim)
    return "the operator's calls split it differently" if blamed is None else _words(*blamed)


def _words(call: Call, own: DimMap) -> str:
    name = call.kind if not call.origin else f"{call.kind} in {call.origin}"
    if not own.scale:
        return f"{name} takes a fixed part of it"
    return f"{name} splits it by an outer dimension" if call.kind in _REGROUPING else f"{name} needs it whole"


def no_rule(program: Program, call: Call) -> str:
    """Why a call is kept whole."""
    name = target_name(call.target)
    part = program.stuck.get(call.name, name)
    return f"no rule for {name}" + (f", nor for {part} in it" if part != name else "")


def _blamed(program: Program, group: Group, value: str, dim: int) -> tuple[Call, DimMap] | None:
    """The nearest call whose rule does not split a dimension, or one that follows the same factor in the operator's other calls."""
    open_dims, seen = [(value, dim)], {(value, dim)}
    calls = [(step.call, _sides(step)) for step in group.steps]
    while open_dims:
        place = open_dims.pop(0)
        for call, sides in calls:
            for name, maps in sides:
                if name != place[0]:
                    continue
                own = maps[place[1]]
                if own.factor is None:
                    return call, own
                followers = [(n, d) for n, dims in sides for d, m in enumerate(dims) if m.factor == own.factor]
                wide = [(n, d) for n, d in followers if (n, d) not in seen and program.values[n].shape[d] > 1]
                seen.update(wide)
                open_dims += wide
    return None


def _sides(step: Step) -> list[tuple[str, Maps]]:
    """A call's values with what its own rule says of their dimensions."""
    call, rule = step.call, step.rule
    return [*zip(call.outputs, rule.outputs, strict=True), *zip(call.operands, rule.operands, strict=True)]
