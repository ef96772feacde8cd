"""From an ``ExportedProgram`` to a ``Program``: plain, functional calls with names that a person recognises."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from soap.errors import ModelError, SoapWarning
from soap.tracing.aliasing import Aliasing, functional, mutates
from soap.tracing.autocast import Caster, concerns
from soap.tracing.calls import BufferRef, Call, Program, Ref, substitute, walk
from soap.tracing.forms import FORMS, Fake, value_of
from soap.tracing.naming import canonical_names

aten = torch.ops.aten

_DROPPED = {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Reader:
    """One pass over the exported graph. ``dtype`` replaces every floating-point dtype of the program, if given.

    ``autocast``: the casts that ``torch.autocast`` to this type would make are written as calls. ``local_statistics``: training batch norm
    normalises each tile by its own statistics.
    """

    def __init__(
        self,
        exported: ExportedProgram,
        dtype: torch.dtype | None,
        *,
        autocast: torch.dtype | None = None,
        local_statistics: bool = False,
    ) -> None:
        self.exported = exported
        self._dtype = dtype
        self._caster = None if autocast is None else Caster(autocast)
        self.local_statistics = local_statistics
        self._at: dict[torch.fx.Node, Any] = {}  # node -> value name, or names, that it now stands for
        self._aliasing = Aliasing()
        self._buffers: dict[str, str] = {}  # value -> state-dict name
        self._used_names: set[str] = set()
        self.program = Program([], {}, [], {}, {}, {}, "")

    def read(self) -> Program:
        """The program; raises ModelError in one line for what cannot be planned."""
        self._check()
        self._placeholders()
        self._nodes(self.exported.graph, gradients=True)
        self.program.loss = self._loss()
        self._freeze_buffers()
        self._warn_of_unread_inputs()
        return self.program

    # What ``forms.Writer`` asks for

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a value."""
        return self.program.values[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a value."""
        return self.program.values[name].dtype

    def emit(self, call: Call, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Write a call with one output, named as the call, and return that name."""
        self.program.calls.append(call)
        return self._value(call.outputs[0], shape, dtype)

    def updated_buffer(self, leaf: Any) -> BufferRef | None:
        """The buffer behind an argument, which the program changes; None for None."""
        if leaf is None:
            return None
        if not isinstance(leaf, Ref) or leaf.name not in self._buffers:
            raise ModelError(f"running statistics are {leaf}; expected buffers of the module")
        name = self._buffers[leaf.name]
        self.program.buffers.setdefault(name, self._buffer(name))
        return BufferRef(name)

    # Inputs, parameters, buffers

    def _check(self) -> None:
        if self.exported.range_constraints:
            symbol = next(iter(self.exported.range_constraints))
            raise ModelError(f"the program has a dynamic shape ({symbol}); expected whole numbers: see sizes.at_sizes")

    def _convert(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype in _FLOATS else dtype

    def _value(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        self.program.values[name] = value_of(name, shape, dtype)
        return name

    def _placeholders(self) -> None:
        nodes = {n.name: n for n in self.exported.graph.nodes if n.op == "placeholder"}
        canonical = canonical_names(self.exported.state_dict)
        for spec in self.exported.graph_signature.input_specs:
            name, node = spec.arg.name, nodes.get(spec.arg.name)
            fake = node.meta.get("val") if node is not None else None
            if spec.kind is not InputKind.USER_INPUT and not isinstance(fake, torch.Tensor):
                raise ModelError(f"input {name!r} is a {type(fake).__name__}, not a tensor; export without custom objects")
            if node is None or not isinstance(fake, torch.Tensor):
                continue
            self._at[node] = self._value(self._unique(name), fake.shape, self._convert(fake.dtype))
            self._place(spec.kind, self._at[node], str(spec.target), canonical)

    def _place(self, kind: InputKind, value: str, target: str, canonical: Mapping[str, str]) -> None:
        if kind is InputKind.USER_INPUT:
            self.program.inputs.append(value)
        elif kind is InputKind.PARAMETER:
            self.program.parameters[value] = canonical[target]
        elif kind is InputKind.BUFFER:
            self._buffers[value] = target
        else:
            self.program.constants[value] = self._tensor(self.exported.constants[target])

    def _unique(self, name: str) -> str:
        """The name, or, if an inlined part of the graph uses it too, another one like it."""
        candidate, number = name, 1
        while candidate in self._used_names:
            candidate, number = f"{name}_{number}", number + 1
        self._used_names.add(candidate)
        return candidate

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._convert(tensor.dtype))

    def _buffer(self, name: str) -> torch.Tensor:
        state = self.exported.state_dict
        return self._tensor(state[name] if name in state else self.exported.constants[name])

    # Calls

    def _nodes(self, graph: torch.fx.Graph, *, gradients: bool) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                self._node(node, gradients=gradients)
            elif node.op not in ("placeholder", "output", "get_attr"):
                raise ModelError(f"exported graph has a {node.op!r} node {node.name!r}; expected a flat program as torch.export makes it")

    def _node(self, node: torch.fx.Node, *, gradients: bool) -> None:
        target = node.target
        if isinstance(node.meta.get("val"), (int, float)):
            return  # a size, or a condition on sizes: calls take its value
        if target is operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node)
            self._at[node] = self._at[source][index]
            self._aliasing.view(node, source, identical=False)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self._higher_order(node, target, gradients=gradients)
        elif not isinstance(target, torch._ops.OpOverload):
            raise ModelError(f"call {node.name!r} of {target}: expected an ATen operator; the program depends on data or Python values")
        elif _kind(target) not in _DROPPED:
            call = self._call(node, target)
            if mutates(target):
                self._in_place(node, call, gradients=gradients)
            else:
                self._append(node, call)
                self._aliasing.follow(node)

    def _call(self, node: torch.fx.Node, target: torch._ops.OpOverload) -> Call:
        def change(leaf: Any) -> Any:
            if isinstance(leaf, torch.fx.Node):
                self._aliasing.check(leaf)
                return Ref(self._at[leaf]) if leaf in self._at else leaf.meta.get("val")
            return self._convert(leaf) if isinstance(leaf, torch.dtype) else leaf

        args = substitute(tuple(_plain(a) for a in node.args), change)
        kwargs = {k: substitute(_plain(v), change) for k, v in node.kwargs.items() if k not in ("pin_memory", "layout")}
        if "device" in kwargs:
            kwargs["device"] = None
        name = self._unique(node.name)
        return Call(name, target, args, kwargs, (name,), _module_path(node))

    def _append(self, node: torch.fx.Node, call: Call) -> None:
        fake = node.meta.get("val")
        several = isinstance(fake, (tuple, list))
        every: list[Any] = list(fake) if isinstance(fake, (tuple, list)) else [fake]
        tensors = [f for f in every if isinstance(f, torch.Tensor)]
        if not several and not tensors:
            raise ModelError(
                f"call {call.name!r} of {call.kind} returns a {type(fake).__name__} that depends on data; expected tensors of static shape"
            )
        fakes = [Fake(value_of(call.name, f.shape, f.dtype).shape, self._convert(f.dtype)) for f in tensors]
        if self._caster is not None and concerns(call):
            call, dtypes = self._cast(call, self._caster)
            fakes = [Fake(f.shape, dtype) for f, dtype in zip(fakes, dtypes, strict=True)]
        if call.kind in FORMS:
            self._at[node] = FORMS[call.kind](self, call, fakes if several else fakes[0])
            return
        names = [f"{call.name}:{i}" for i in range(len(every))] if several else [call.name]
        kept = [name for name, f in zip(names, every, strict=True) if isinstance(f, torch.Tensor)]
        for name, f in zip(kept, fakes, strict=True):
            self._value(name, f.shape, f.dtype)
        self.program.calls.append(Call(call.name, call.target, call.args, call.kwargs, tuple(kept), call.path))
        self._at[node] = names if several else call.name

    def _cast(self, call: Call, caster: Caster) -> tuple[Call, list[torch.dtype]]:
        """Write the casts that autocast would make of a call's operands; the call that remains, and its outputs' dtypes."""
        found = caster.rewrite(call, self.program.values, self._unique)
        for cast, value in found.casts:
            self.emit(cast, value.shape, value.dtype)
        return found.call, found.dtypes

    def _higher_order(self, node: torch.fx.Node, target: torch._ops.HigherOrderOperator, *, gradients: bool) -> None:
        """Blocks under ``torch.no_grad`` are read in place, their results detached; anything else is control flow."""
        kind = str(getattr(target, "_name", target))
        if kind == "wrap_with_set_grad_enabled":
            enabled, part, *operands = node.args
            detached = not enabled
        elif kind == "wrap_with_autocast" and not node.args[2]:
            part, *operands = node.args[4:]
            detached = False
        else:
            raise ModelError(
                f"the program has data-dependent control flow or a wrapped call ({kind} at {node.name!r}); "
                "expected straight-line code: remove it or export without it"
            )
        if not gradients and not detached:
            raise ModelError(f"gradients are enabled inside torch.no_grad at {node.name!r}; expected no nesting: move that part out")
        assert isinstance(part, torch.fx.Node)
        graph = getattr(node.graph.owning_module, str(part.target)).graph
        inner = [n for n in graph.nodes if n.op == "placeholder"]
        for placeholder, operand in zip(inner, operands, strict=True):
            assert isinstance(operand, torch.fx.Node)
            self._aliasing.check(operand)
            self._at[placeholder] = self._at[operand]
            self._aliasing.view(placeholder, operand, identical=True)
        self._nodes(graph, gradients=gradients and not detached)
        output = next(n for n in graph.nodes if n.op == "output").args[0]
        leaves = list(output) if isinstance(output, (tuple, list)) else [output]
        names = [self._at.get(leaf) for leaf in leaves]
        if detached:
            names = [self._detached(name, node) for name in names]
        self._at[node] = names

    def _detached(self, name: str | None, node: torch.fx.Node) -> str | None:
        if name is None or not self.dtype(name).is_floating_point:
            return name
        result = self._unique(f"{node.name}_detach")
        call = Call(result, aten.detach.default, (Ref(name),), {}, (result,), _module_path(node))
        return self.emit(call, self.shape(name), self.dtype(name))

    # In-place calls

    def _in_place(self, node: torch.fx.Node, call: Call, *, gradients: bool) -> None:
        """``x.add_(y)`` as ``x = x + y``: later uses of x mean the new value."""
        changed = node.args[0]
        assert isinstance(changed, torch.fx.Node)
        root = str(self._at[self._aliasing.root(changed)])
        if root in self._buffers:
            self._update_buffer(node, call, changed, root)
            return
        if root in self.program.parameters:
            raise ModelError(
                f"call {call.name!r} changes parameter {self.program.parameters[root]!r} in place; expected that training alone does"
            )
        if not gradients and self._aliasing.root(changed).graph is not node.graph:
            raise ModelError(f"call {call.name!r} changes a tensor in place under torch.no_grad; write it out of place")
        value = self.program.values[call.operands[0]]
        if call.kind == "copy_":  # the source in the target's shape and dtype
            source = Ref(call.operands[1])
            plain = Call(call.name, aten.expand.default, (source, list(value.shape)), {}, call.outputs, call.path)
        else:
            plain = functional(call)
        self._value(self._written(plain, value.dtype), value.shape, value.dtype)
        for meant in self._aliasing.change(node, changed):
            self._at[meant] = call.name

    def _written(self, functional: Call, dtype: torch.dtype) -> str:
        """Write the out-of-place call, and back to the dtype that the changed tensor keeps."""
        meta = [torch.empty(self.shape(n), dtype=self.dtype(n), device="meta") for n in functional.operands]
        following = iter(meta)
        fill = lambda leaf: next(following) if isinstance(leaf, Ref) else leaf  # noqa: E731
        result = functional.target(*substitute(functional.args, fill), **substitute(dict(functional.kwargs), fill))
        if result.dtype == dtype:
            self.program.calls.append(functional)
            return functional.name
        name = f"{functional.name}:promoted"
        first = Call(name, functional.target, functional.args, functional.kwargs, (name,), functional.path)
        self.emit(first, result.shape, result.dtype)
        self.program.calls.append(Call(functional.name, aten.to.dtype, (Ref(name), dtype), {}, functional.outputs, functional.path))
        return functional.name

    def _update_buffer(self, node: torch.fx.Node, call: Call, changed: torch.fx.Node, root: str) -> None:
        name = self._buffers[root]
        if len(call.operands) > 1 or self._at[changed] != root:
            raise ModelError(
                f"call {call.name!r} updates buffer {name!r} from an activation or in part; "
                "only batch norm's statistics and counters are supported"
            )
        self.updated_buffer(Ref(root))
        self.program.end_step.append(Call(call.name, call.target, (BufferRef(name), *call.args[1:]), call.kwargs, (), call.path))
        self._at[node] = root

    # Outputs

    def _loss(self) -> str:
        """The scalar to minimise: the output called ``loss``, else the first output."""
        leaves = list(walk(_plain(next(n for n in self.exported.graph.nodes if n.op == "output").args)))
        index = self._loss_position()
        node = leaves[index or 0] if leaves else None
        loss = self._at.get(node) if isinstance(node, torch.fx.Node) else None
        if not isinstance(loss, str):
            raise ModelError("the program returns no tensor; expected the scalar training loss as output")
        shape, dtype = self.shape(loss), self.dtype(loss)
        if shape not in ((), (1,)) or not dtype.is_floating_point:
            raise ModelError(
                f"{'the first output' if index is None else 'output loss'} has shape {list(shape)} and dtype "
                f"{str(dtype).removeprefix('torch.')}; "
                "expected a scalar floating-point loss: pass loss=… to soap.export, or return it first"
            )
        if not any(loss in call.outputs for call in self.program.calls):
            raise ModelError("the loss is an input or a constant; expected a loss that the model computes")
        if shape == (1,):
            name = self._unique(f"{loss}_scalar")
            loss = self.emit(Call(name, aten.reshape.default, (Ref(loss), []), {}, (name,)), (), dtype)
        return loss

    def _loss_position(self) -> int | None:
        """Which flat output is called ``loss``, if the outputs have names."""
        signature = self.exported.module_call_graph[0].signature
        spec = signature.out_spec if signature is not None else None
        keys = getattr(spec, "context", None)
        if spec is None or not isinstance(keys, (list, tuple)) or "loss" not in keys:
            return None
        before = spec.children()[: list(keys).index("loss")]
        return int(sum(child.num_leaves for child in before))

    def _freeze_buffers(self) -> None:
        """Buffers that nothing updates are constants."""
        for value, name in self._buffers.items():
            if name not in self.program.buffers:
                self.program.constants[value] = self._buffer(name)
                continue
            reader = next((call for call in self.program.calls if value in call.operands), None)
            if reader is not None:
                raise ModelError(
                    f"call {reader.name!r} reads buffer {name!r}, which the program also updates; expected that no call does both"
                )

    def _warn_of_unread_inputs(self) -> None:
        read = {name for call in self.program.calls for name in call.operands}
        for name in self.program.inputs:
            if name not in read and name != self.program.loss:
                warnings.warn(
                    f"the program does not read input {name!r}: what is given for it has no effect (torch.export joins inputs that are one "
                    "tensor; export with separate tensors)",
                    SoapWarning,
                    stacklevel=2,
                )


def _plain(nest: Any) -> Any:
    """fx's immutable lists and dicts as ordinary ones."""
    if isinstance(nest, (list, tuple)):
        return [_plain(item) for item in nest] if isinstance(nest, list) else tuple(_plain(item) for item in nest)
    if isinstance(nest, dict):
        return {key: _plain(item) for key, item in nest.items()}
    return nest


def _kind(target: torch._ops.OpOverload) -> str:
    return str(target._schema.name.split("::")[-1])


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return str(paths[-1]) if paths else ""
