"""From a ``Program`` to a traced model: groups of calls become operators with names, factor kinds and operands."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.export import ExportedProgram

from soap.errors import ModelError
from soap.graph import DimMap, Factor, FactorKind, Operand, Operator, OperatorGraph, Tensor, TensorKind
from soap.tracing.calls import Program
from soap.tracing.execute import ExecutableModel, OperatorProgram, ProgramStep
from soap.tracing.fold import fold
from soap.tracing.fuse import Fuser
from soap.tracing.match import Group, Step, compose_all, simplified, unsplit
from soap.tracing.reader import Reader, canonical_names
from soap.tracing.rules.registry import target_name
from soap.tracing.rules.notation import Maps


def import_program(
    exported: ExportedProgram,
    *,
    name: str,
    batch_dims: Mapping[str, int] | None = None,
    plan_only: bool = False,
    dtype: torch.dtype | None = None,
) -> ExecutableModel:
    """The traced model of an exported training program that returns its scalar loss.

    ``batch_dims``: input name -> its batch dimension (default 0; -1: the input has none). ``plan_only``: shapes suffice, no values are computed or kept.
    ``dtype`` replaces every floating-point dtype. Raises ModelError in one line for programs that cannot be planned; warns once per
    operator kind without a rule.
    """
    program = Reader(exported, dtype).read()
    fold(program, plan_only=plan_only)
    groups = Fuser(program).run()
    return _Builder(exported, program, groups, name, batch_dims or {}, dtype).build()


@dataclass
class _Builder:
    exported: ExportedProgram
    program: Program
    groups: list[Group]
    name: str
    batch_dims: Mapping[str, int]
    dtype: torch.dtype | None

    def build(self) -> ExecutableModel:
        program = self.program
        unknown = [name for name in self.batch_dims if name not in program.inputs]
        if unknown:
            raise ModelError(f"batch dimension given for {unknown[0]!r}; the model's inputs are {', '.join(program.inputs)}")
        self.names = self._operator_names()
        self.tensor_names = self._tensor_names()
        self.grads = self._gradients()
        self.samples = self._batch()
        operators, programs = [], {}
        for group, op_name in zip(self.groups, self.names, strict=True):
            operator, steps = self._operator(group, op_name)
            operators.append(operator)
            programs[op_name] = steps
        graph = OperatorGraph(self.name, tuple(operators), self._tensors(operators), self.tensor_names[program.loss], self._aliases())
        state = self.exported.state_dict
        wanted = {t.name for t in graph.parameters}
        parameters = {n: self._converted(state[n]) for n in dict.fromkeys(program.parameters.values()) if n in wanted}
        return ExecutableModel(
            graph=graph,
            parameters=parameters,
            buffers=program.buffers,
            constants={self.tensor_names[v]: t for v, t in program.constants.items()},
            input_names=tuple(self.tensor_names[v] for v in program.inputs),
            example_inputs=self._examples(),
            programs=programs,
            program=program,
        )

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

    def _examples(self) -> tuple[torch.Tensor, ...]:
        if self.exported.example_inputs is None:
            return ()
        args, kwargs = self.exported.example_inputs
        leaves, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        return tuple(self._converted(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _operator_names(self) -> list[str]:
        """Module path of the anchor, with the kind where a module holds several operators, numbered where that is not unique."""
        anchors = [_anchor(group) for group in self.groups]
        paths = [step.call.path for step in anchors]
        taken = {value.name for value in self.program.values.values()} & set(self.program.inputs)
        names: list[str] = []
        for path, step in zip(paths, anchors, strict=True):
            name = path if path and paths.count(path) == 1 else f"{path}.{step.call.kind}".lstrip(".")
            candidate, number = name, 1
            while candidate in taken:
                candidate, number = f"{name}_{number}", number + 1
            taken.add(candidate)
            names.append(candidate)
        return names

    def _tensor_names(self) -> dict[str, str]:
        """Value -> tensor name: parameters by state-dict name, activations by their operator."""
        result = {value: value for value in (*self.program.inputs, *self.program.constants)}
        result.update(self.program.parameters)
        needed = {name for group in self.groups for name in group.reads()} | {self.program.loss}
        for group, name in zip(self.groups, self.names, strict=True):
            made = [value for value in group.made if value in needed and value not in self._derived_only(group)]
            for i, value in enumerate(made):
                result[value] = name if len(made) == 1 else f"{name}:{i}"
        return result

    def _derived_only(self, group: Group) -> set[str]:
        """Values that this group recomputes for itself while other groups do too: never exchanged."""
        return {v for v in group.made if sum(v in other.made for other in self.groups) > 1}

    def _gradients(self) -> set[str]:
        """Values that carry a gradient."""
        trainable = {v for v in self.program.parameters if self.exported.state_dict[self._target(v)].requires_grad}
        result = set(trainable)
        for call in self.program.calls:
            if call.kind == "detach" or not any(name in result for name in call.operands):
                continue
            result.update(name for name in call.outputs if self.program.values[name].dtype.is_floating_point)
        return result

    def _target(self, value: str) -> str:
        return self.program.parameters[value]

    def _batch(self) -> dict[str, int]:
        """Value -> the dimension that carries the batch (as its major part), followed from the inputs through the groups."""
        labels: dict[str, int] = {}
        sizes: list[int] = []
        for value in self.program.inputs:
            shape = self.program.values[value].shape
            dim = self.batch_dims.get(value, 0)
            if dim >= len(shape):
                if value in self.batch_dims:
                    raise ModelError(f"batch dimension {dim} of input {value!r} does not exist; its shape is {list(shape)}")
                continue
            if dim >= 0 and (value in self.batch_dims or not sizes or shape[dim] == sizes[0]):
                labels[value] = dim
                sizes.append(shape[dim])
        for group in self.groups:
            for step in group.steps:
                marked = {
                    maps[labels[v]].factor for v, maps in zip(step.call.operands, step.operands, strict=True) if v in labels and maps
                } - {None}
                for value, maps in zip(step.call.outputs, step.outputs, strict=True):
                    for i, dim in enumerate(maps):
                        if dim.factor in marked and value not in labels:
                            labels[value] = i
        return labels

    def _operator(self, group: Group, name: str) -> tuple[Operator, OperatorProgram]:
        outputs = [v for v in group.made if v in self.tensor_names and self.tensor_names[v].split(":")[0] == name.split(":")[0]]
        outputs = [v for v in outputs if self.tensor_names[v] == name or self.tensor_names[v].startswith(f"{name}:")]
        partitionable = all(step.rule.known for step in group.steps)
        if not partitionable:
            self._warn(group)
        numbers = self._factors(group, outputs) if partitionable else []
        change = {f: DimMap(numbers.index(f)) if f in numbers else unsplit(size) for f, size in group.sizes.items()}
        steps = [
            ProgramStep(s.call, s.rule, self._over(change, s.call.operands, s.operands), self._over(change, s.call.outputs, s.outputs))
            for s in group.steps
        ]
        made = {value: maps for step in steps for value, maps in zip(step.call.outputs, step.outputs, strict=True)}
        reads: dict[tuple[str, Maps], None] = {}
        for step in steps:
            for value, maps in zip(step.call.operands, step.operands, strict=True):
                if value not in made:
                    reads[(value, maps)] = None
        inputs = [(v, m) for v, m in reads if v not in self.program.parameters]
        parameters = [(v, m) for v, m in reads if v in self.program.parameters]
        factors = self._named_factors(group, numbers, inputs, parameters, {v: made[v] for v in outputs})
        values = self.program.values
        kept = [s for s in steps if not s.rule.linear]
        operator = Operator(
            name=name,
            kind=_anchor(group).call.kind,
            factors=factors,
            inputs=tuple(Operand(self.tensor_names[v], m) for v, m in inputs),
            parameters=tuple(Operand(self.tensor_names[v], m) for v, m in parameters),
            outputs=tuple(Operand(self.tensor_names[v], made[v]) for v in outputs),
            flops=sum(s.rule.flops for s in steps),
            saved_bytes=sum(s.rule.saved_bytes for s in steps)
            + sum(prod(values[v].shape) * values[v].dtype.itemsize for s in kept for v in s.call.outputs if v not in outputs),
            calls=tuple(s.call.name for s in steps),
            partitionable=partitionable,
        )
        return operator, OperatorProgram(tuple(steps), tuple(inputs), tuple(parameters), tuple(outputs))

    def _over(self, change: Mapping[int, DimMap], names: Sequence[str], maps: Sequence[Maps]) -> tuple[Maps, ...]:
        shapes = [self.program.values[name].shape for name in names]
        return tuple(simplified(compose_all(m, change), shape) for m, shape in zip(maps, shapes, strict=True))

    def _warn(self, group: Group) -> None:
        for step in group.steps:
            if not step.rule.known:
                warnings.warn(
                    f"no rule for {target_name(step.call.target)} (at {step.call.path or step.call.name}): kept whole, on one device at a time",
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
        sample = {m[self.samples[v]].factor for v, m in inputs if v in self.samples and m}
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
        used = {o.tensor for op in operators for o in (*op.inputs, *op.parameters, *op.outputs)}
        result: dict[str, Tensor] = {}
        for value, info in self.program.values.items():
            name = self.tensor_names.get(value)
            if name is None or (name not in used and value not in self.program.inputs):
                continue
            if value in self.program.parameters:
                kind = TensorKind.PARAMETER
            elif value in self.program.inputs:
                kind = TensorKind.INPUT
            elif value in self.program.constants:
                kind = TensorKind.CONSTANT
            else:
                kind = TensorKind.ACTIVATION
            dtype = str(info.dtype).removeprefix("torch.")
            result[name] = Tensor(name, info.shape, dtype, info.dtype.itemsize, kind, value in self.grads)
        return result

    def _aliases(self) -> dict[str, str]:
        return {alias: name for alias, name in canonical_names(self.exported.state_dict).items() if alias != name}


def _anchor(group: Group) -> Step:
    anchors = [step for step in group.steps if not step.rule.light]
    return anchors[0] if anchors else group.steps[-1]
