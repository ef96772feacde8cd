"""From an ``ExportedProgram`` to a ``Program``: plain, functional calls with names that a person recognises.

Programs that were exported with symbolic sizes, at given sizes. Afterwards they look as if they had been exported with these sizes.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from soap.errors import ModelError, SoapWarning, first_line
from soap.logs import TRIALS, silenced
from soap.tracing.autocast import Caster
from soap.tracing.calls import BufferRef, Call, Program, Ref
from soap.tracing.example import loss_position, outputs_of
from soap.tracing.naming import canonical_names
from soap.tracing.nodes import NodeReader, about, canonical_buffers, check_memory
from soap.tracing.rules.norm import keep_state, next_state
from soap.tracing.torch_parts import node_line

aten = torch.ops.aten


class Reader(NodeReader):
    """One pass over the exported graph. ``dtype`` replaces every floating-point dtype of the program, if given. ``caster``: finds
    the casts that ``torch.autocast`` would make, which are written as calls. ``local_statistics``: training batch norm normalises each tile
    by its own statistics."""

    def __init__(
        self,
        exported: ExportedProgram,
        dtype: torch.dtype | None,
        *,
        caster: Caster | None = None,
        local_statistics: bool = False,
    ) -> None:
        super().__init__(Program([], {}, [], {}, {}, {}, ""), dtype, caster=caster, local_statistics=local_statistics)
        self.exported = exported
        self._first: dict[torch.fx.Node, str] = {}  # placeholder -> its value
        self._frozen: dict[str, str] = {}  # value of a parameter that training does not change -> canonical name

    def read(self) -> Program:
        """The program; raises ModelError in one line for what cannot be planned."""
        self._check()
        self._placeholders()
        self.nodes(self.exported.graph, gradients=True)
        self.program.loss = self._loss()
        self._end_buffers()
        self._warn_of_unread_inputs()
        return self.program

    # Inputs, parameters, buffers

    def _check(self) -> None:
        if self.exported.range_constraints:
            symbol = next(iter(self.exported.range_constraints))
            raise ModelError(f"the program has a dynamic shape ({symbol}); expected whole numbers: see sizes.at_sizes")

        self._check_not_decomposed()

    def _check_not_decomposed(self) -> None:
        """Refuse programs in which ``run_decompositions`` has made plain results of what was detached, so that gradients flow there."""
        moved = next((spec.target for spec in self.exported.graph_signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION), None)
        if moved is None and self.exported.dialect == "TRAINING":
            return
        detached = next((node.name for node in self.exported.graph.nodes if node.target is aten.alias.default), None)
        found = f"buffer {moved!r} is moved" if moved is not None else f"{detached!r} was detached"
        if moved is not None or detached is not None:
            raise ModelError(
                f"the program was decomposed (run_decompositions): it no longer says where gradients stop ({found}); "
                "expected the program as torch.export.export returns it"
            )
        warnings.warn(
            "the program was decomposed (run_decompositions): gradients flow through what was computed under torch.no_grad, if any was; "
            "export it without that to be sure",
            SoapWarning,
            stacklevel=2,
        )

    def _placeholders(self) -> None:
        nodes = {n.name: n for n in self.exported.graph.nodes if n.op == "placeholder"}
        canonical = canonical_names(self.exported.state_dict) | canonical_buffers(self.exported)
        for spec in self.exported.graph_signature.input_specs:
            name, node = spec.arg.name, nodes.get(spec.arg.name)
            fake = node.meta.get("val") if node is not None else None
            if spec.kind is not InputKind.USER_INPUT and not isinstance(fake, torch.Tensor):
                raise ModelError(
                    f"forward uses a torch.Generator of its own, or another custom object ({name!r}), which a program does not have; "
                    "expected torch's global generator (drop generator=), and tensors alone"
                )
            if node is None or not isinstance(fake, torch.Tensor):
                continue
            self.at[node] = self.value(self.unique(name), fake.shape, self.convert(fake.dtype))
            self._first[node] = self.at[node]
            if spec.kind is InputKind.PARAMETER and not self.exported.state_dict[str(spec.target)].requires_grad:
                self.changes.nodes[node] = self._frozen[self.at[node]] = canonical[str(spec.target)]
            if spec.kind is InputKind.BUFFER:
                if not node.users:
                    continue  # of a buffer with several names, one is used
                self.changes.nodes[node] = canonical.get(str(spec.target), str(spec.target))
            self._place(spec.kind, self.at[node], str(spec.target), canonical)

    def _place(self, kind: InputKind, value: str, target: str, canonical: Mapping[str, str]) -> None:
        if kind is InputKind.USER_INPUT:
            self.program.inputs.append(value)
        elif kind is InputKind.PARAMETER:
            self.program.parameters[value] = canonical[target]
        elif kind is InputKind.BUFFER:
            self.buffers[value] = canonical.get(target, target)
        else:
            self.program.constants[value] = self._tensor(self.exported.constants[target])

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().resolve_conj().resolve_neg().to(self.convert(tensor.dtype))

    def buffer(self, name: str) -> torch.Tensor:
        """The first value of a buffer."""
        state = self.exported.state_dict
        return self._tensor(state[name] if name in state else self.exported.constants[name])

    # Outputs

    def _loss(self) -> str:
        """The scalar to minimise."""
        output = outputs_of(self.exported)[loss_position(self.exported)]
        node = output.node
        loss = self.now(node) if isinstance(node, torch.fx.Node) and node in self.at else None
        if not isinstance(loss, str):
            raise ModelError("the program returns no tensor; expected the scalar training loss as output")
        shape, dtype = self.shape(loss), self.dtype(loss)
        if shape not in ((), (1,)) or not dtype.is_floating_point:
            way = "return its real part or magnitude" if dtype.is_complex else "pass loss=… to soap.export, or return it first"
            raise ModelError(
                f"{f'output {output.path}' if output.path else 'the output'} has shape {list(shape)} and dtype "
                f"{str(dtype).removeprefix('torch.')}; expected a scalar floating-point loss: {way}"
            )
        if not any(loss in call.outputs for call in self.program.calls):
            raise ModelError("the loss is an input or a constant; expected a loss that the model computes")
        if shape == (1,):
            name = self.unique(f"{loss}_scalar")
            loss = self.emit(Call(name, aten.reshape.default, (Ref(loss), []), {}, (name,)), (), dtype)
        return loss

    def _end_buffers(self) -> None:
        """Decide what becomes of buffers: counters that nobody reads move behind the step, others that change are state, or constants."""
        moved = self._moved()
        check_memory(self.exported, {*moved, *self.program.buffers})
        counters = self.changes.counters(self.program, self.buffers | self._frozen)
        for value, name in self._frozen.items():
            if name in counters or name in moved:  # a teacher's weights, which follow the student's: buffers, whatever they are called
                self.buffers[value] = self.program.parameters.pop(value)
        self.program.end_step += [call for _, call in sorted((move for own in counters.values() for move in own), key=lambda m: m[0])]
        ending: dict[str, str] = {}
        for value, name in self.buffers.items():
            if name in self.program.buffers:
                self._check_statistics(value, name)
            elif name in counters:
                self.program.buffers[name] = self.buffer(name)
            elif name in moved:
                self.program.buffers[name], self.program.state[value] = self.buffer(name), name
                ending[name] = moved[name]
            else:
                self.program.constants[value] = self.buffer(name)
        if ending:
            self._keep(ending)

    def _moved(self) -> dict[str, str]:
        """Buffers that the program changes, with their values at its end."""
        found = {}
        for node, name in self.changes.nodes.items():
            with about(name):
                now = str(self.now(node))
            if now != self._first[node]:
                found[name] = now
        return found

    def _check_statistics(self, value: str, name: str) -> None:
        """Refuse programs that read the new values of running statistics, which change when the step is over."""
        found = [call.name for call in self.program.calls if value in call.operands]
        found += [self.changes.found[name].last] if name in self.changes.found else []
        if found:
            raise ModelError(
                f"buffer {name!r} holds running statistics of batch norm, which call {found[0]!r} reads or changes as well; "
                "expected that batch norm alone does: give that call a buffer of its own, which forward moves"
            )

    def _keep(self, ending: Mapping[str, str]) -> None:
        """The calls that end a program with state. ``ending``: by buffer, its last value."""
        for name, value in ending.items():
            shape = self.program.buffers[name].shape
            if self.shape(value) != tuple(shape):
                raise ModelError(f"buffer {name!r} is given shape {list(self.shape(value))}, but has {list(shape)}; expected one shape")
        last = self.unique("next_state")
        names = [self.unique(f"{last}:{i}") for i in range(len(ending))]
        for made, value in zip(names, ending.values(), strict=True):
            self.value(made, self.shape(value), self.dtype(value))
        self.program.calls.append(Call(last, next_state, tuple(map(Ref, ending.values())), {}, tuple(names)))
        kept = self.unique("keep_state")
        buffers = tuple(map(BufferRef, ending))
        self.emit(Call(kept, keep_state, tuple(map(Ref, names)), {"buffers": buffers}, (kept,)), (), torch.int32)
        self.program.kept = (kept,)

    def _warn_of_unread_inputs(self) -> None:
        read = {name for call in self.program.calls for name in call.operands}
        for name in self.program.inputs:
            if name not in read and name != self.program.loss:
                warnings.warn(
                    f"the program does not read input {name!r}: values given for it have no effect (torch.export joins inputs that are one "
                    "tensor; export with separate tensors)",
                    SoapWarning,
                    stacklevel=2,
                )


Shapes = Sequence[Sequence[int]]
"""One shape per tensor input, in the order of the program's inputs."""


def is_dynamic(exported: ExportedProgram) -> bool:
    """Whether any size of the program is symbolic."""
    return bool(exported.range_constraints)


def at_sizes(exported: ExportedProgram, shapes: Shapes | None = None) -> ExportedProgram:
    """The program for inputs of these shapes (of the example inputs if None): the same calls under the same names, with whole numbers.

    Shares all tensors with ``exported``. Raises ModelError if the program was not exported for such shapes.
    """
    unknown = next((symbol for symbol in exported.range_constraints if not str(symbol).startswith("s")), None)
    if unknown is not None:
        raise ModelError(
            f"the program has a dynamic shape that depends on data ({unknown}{_made_at(exported, unknown)}); expected shapes that follow "
            "from the inputs': keep all rows and mask those that do not count (for experts: grouped products)"
        )
    inputs = _inputs(exported)
    if shapes is None:
        shapes = [[_hint(size) for size in fake.shape] for fake in inputs.values()]
    _check(exported, inputs, shapes)
    result = copy.copy(exported)
    result._graph_module = copy.deepcopy(exported.graph_module)
    for node, original in zip(result._graph_module.graph.nodes, exported.graph.nodes, strict=True):
        node.name = original.name  # fx numbers names that Python has, such as "input", when it copies a graph
    result._range_constraints = {}
    if [list(t.shape) for t in _example_tensors(exported)] != [list(shape) for shape in shapes]:
        result._example_inputs = None
    given = dict(zip(inputs, shapes, strict=True))
    with silenced(*TRIALS), FakeTensorMode() as mode, torch.no_grad():
        values = [_fake(node, given.get(node.name), mode) for node in result._graph_module.graph.nodes if node.op == "placeholder"]
        try:
            _Evaluation(result._graph_module).run(*values)
        except Exception as error:
            raise ModelError(f"the program does not work for inputs of shapes {[list(s) for s in shapes]}: {first_line(error)}") from error
    return result


def _made_at(exported: ExportedProgram, symbol: Any) -> str:
    """Where a size that depends on data is made: the user's code if the program knows it, else the call and its module."""
    for node in exported.graph.nodes:
        leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
        sizes: list[Any] = [size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape if not isinstance(size, int)]
        if any(symbol in size.node.expr.free_symbols for size in sizes):
            if (place := node_line(node)) is not None:
                return f", at {place}"
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            return f" in call {node.name!r}{f' of module {stack[-1][0]!r}' if stack and stack[-1][0] else ''}"
    return ""


class _Evaluation(torch.fx.Interpreter):
    """Runs a graph on fake tensors of known sizes and writes each result where torch.export keeps the symbolic one."""

    def run_node(self, n: torch.fx.Node) -> Any:
        """One node, nested graphs included."""
        result = super().run_node(n)
        if n.op != "get_attr":
            n.meta = {**n.meta, "val": result}
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block (under ``no_grad``, for example) is evaluated in place."""
        if isinstance(target, torch._ops.HigherOrderOperator):
            place = next((i for i, arg in enumerate(args) if isinstance(arg, torch.fx.GraphModule)), None)
            if place is not None:
                return _Evaluation(args[place]).run(*args[place + 1 :])
        return super().call_function(target, args, kwargs)


def _inputs(exported: ExportedProgram) -> dict[str, torch.Tensor]:
    """Placeholder name -> fake tensor of the user's tensor inputs, in order."""
    fakes = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    names = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return {name: fakes[name] for name in names if isinstance(fakes.get(name), torch.Tensor)}


def _example_tensors(exported: ExportedProgram) -> list[torch.Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(exported.example_inputs)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _check(exported: ExportedProgram, inputs: Mapping[str, torch.Tensor], shapes: Shapes) -> None:
    """Raise ModelError unless each symbol gets one value in its range, and all other sizes are those of the export."""
    known: dict[Any, int] = {}
    for (name, fake), shape in zip(inputs.items(), shapes, strict=True):
        sizes: Sequence[Any] = fake.shape
        wrong = f"input {name!r} has shape {list(shape)}: expected {_written(fake.shape)} as the program was exported"
        if len(shape) != fake.dim():
            raise ModelError(wrong)
        for size, value in zip(sizes, shape, strict=True):
            if isinstance(size, int):
                fits = value == size
            else:
                expr = size.node.expr
                if expr.is_Symbol:
                    known.setdefault(expr, value)
                fits = expr.free_symbols <= known.keys() and int(expr.subs(known)) == value and value > 0
            if not fits:
                raise ModelError(wrong)
    for symbol, value in known.items():
        allowed = exported.range_constraints.get(symbol)
        if allowed is not None and not allowed.lower <= value <= allowed.upper:
            raise ModelError(f"size {value}: expected {allowed.lower} to {allowed.upper}, as the program was exported; export it anew")


def _written(shape: Sequence[Any]) -> str:
    """A shape with symbols as people write them."""
    return f"[{', '.join(str(size) for size in shape)}]"


def _hint(size: Any) -> int:
    hint = size if isinstance(size, int) else size.node.hint
    if hint is None:
        raise ModelError("the program has symbolic sizes without an example; expected a program with its example inputs: export it again")
    return int(hint)


def _fake(node: torch.fx.Node, shape: Sequence[int] | None, mode: FakeTensorMode) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    sizes = list(value.shape) if shape is None else list(shape)
    return torch.empty(sizes, dtype=value.dtype, device=value.device)
