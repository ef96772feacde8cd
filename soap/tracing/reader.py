"""From an ``ExportedProgram`` to a ``Program``: plain, functional calls with names that a person recognises."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from soap.errors import ModelError
from soap.tracing.calls import BufferRef, Call, Program, Ref, Value, argument, substitute, walk
from soap.tracing.rules.norm import batch_norm_apply, batch_norm_statistics

aten = torch.ops.aten

_DROPPED = {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COPIES = {"contiguous", "alias", "lift_fresh_copy", "_to_copy", "to", "lift_fresh", "view_as"}


class Reader:
    """One pass over the exported graph. ``dtype`` replaces every floating-point dtype of the program, if given."""

    def __init__(self, exported: ExportedProgram, dtype: torch.dtype | None) -> None:
        self.exported = exported
        self.dtype = dtype
        self.names: dict[str, str] = {}  # value that a node's name now stands for (dropped copies, in-place updates)
        self.several: dict[str, list[str]] = {}  # outputs of calls with more than one
        self.buffer_values: dict[str, str] = {}
        self.views: dict[str, str] = {}  # view -> the value whose storage it shares
        self.program = Program([], {}, [], {}, {}, {}, "")

    def read(self) -> Program:
        """The program; raises ModelError in one line for what cannot be planned."""
        self._check()
        self._placeholders()
        for node in self.exported.graph.nodes:
            if node.op == "call_function":
                self._node(node)
            elif node.op not in ("placeholder", "output"):
                raise ModelError(f"exported graph has a {node.op!r} node {node.name!r}; expected a flat program as torch.export makes it")
        self.program.loss = self._loss()
        self._freeze_buffers()
        return self.program

    def convert(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the program is to use where the export has ``dtype``."""
        return self.dtype if self.dtype is not None and dtype in _FLOATS else dtype

    def _check(self) -> None:
        if self.exported.range_constraints:
            symbol = next(iter(self.exported.range_constraints))
            raise ModelError(f"the program has a dynamic shape ({symbol}); expected static shapes: export without dynamic_shapes")
        for node in self.exported.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
                raise ModelError(
                    f"the program has data-dependent control flow or a wrapped call ({node.target.name()} at {node.name!r}); "
                    "expected straight-line code: remove it or export without it"
                )

    def _value(self, name: str, fake: torch.Tensor) -> str:
        if any(not isinstance(size, int) for size in fake.shape):
            raise ModelError(f"{name!r} has a shape that depends on data ({tuple(fake.shape)}); expected static shapes")
        self.program.values[name] = Value(name, tuple(fake.shape), self.convert(fake.dtype))
        self.names[name] = name
        return name

    def _placeholders(self) -> None:
        fakes = {n.name: n.meta.get("val") for n in self.exported.graph.nodes if n.op == "placeholder"}
        canonical = canonical_names(self.exported.state_dict)
        for spec in self.exported.graph_signature.input_specs:
            name, fake = spec.arg.name, fakes.get(spec.arg.name)
            if spec.kind is InputKind.USER_INPUT:
                if isinstance(fake, torch.Tensor):
                    self.program.inputs.append(self._value(name, fake))
                continue
            if not isinstance(fake, torch.Tensor):
                raise ModelError(f"input {name!r} is a {type(fake).__name__}, not a tensor; export without custom objects")
            value, target = self._value(name, fake), str(spec.target)
            if spec.kind is InputKind.PARAMETER:
                self.program.parameters[value] = canonical[target]
            elif spec.kind is InputKind.BUFFER:
                self.buffer_values[value] = target
            else:
                self.program.constants[value] = self._tensor(self.exported.constants[target])

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.convert(tensor.dtype))

    def _buffer(self, name: str) -> torch.Tensor:
        state = self.exported.state_dict
        return self._tensor(state[name] if name in state else self.exported.constants[name])

    def _node(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            self.names[node.name] = self._getitem(node)
            return
        kind = _kind(node.target)
        if kind in _DROPPED:
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise ModelError(f"call {node.name!r} of {node.target}: expected an ATen operator; the program depends on data or Python values")
        call = self._call(node)
        if kind in ("split", "split_with_sizes", "chunk", "unbind", "tensor_split"):
            self._split(call, node)
        elif kind == "batch_norm" and argument(call, "training"):
            self._batch_norm(call)
        elif _mutates(node.target):
            self._in_place(call)
        else:
            self._append(call, node)

    def _call(self, node: torch.fx.Node) -> Call:
        def change(leaf: Any) -> Any:
            if isinstance(leaf, torch.fx.Node):
                name = self.names.get(leaf.name, leaf.name)
                if name not in self.program.values:
                    return leaf.meta.get("val")
                return Ref(name)
            return self.convert(leaf) if isinstance(leaf, torch.dtype) else leaf

        args = substitute(tuple(_plain(a) for a in node.args), change)
        kwargs = {k: substitute(_plain(v), change) for k, v in node.kwargs.items() if k not in ("pin_memory", "layout")}
        if "device" in kwargs:
            kwargs["device"] = None
        return Call(node.name, node.target, args, kwargs, (node.name,), _module_path(node))  # type: ignore[arg-type]

    def _append(self, call: Call, node: torch.fx.Node) -> None:
        fake = node.meta.get("val")
        if isinstance(fake, (tuple, list)):
            outputs = tuple(self._value(f"{call.name}:{i}", f) for i, f in enumerate(fake) if isinstance(f, torch.Tensor))
            self.several[call.name] = [f"{call.name}:{i}" for i in range(len(fake))]
            call = Call(call.name, call.target, call.args, call.kwargs, outputs, call.path)
        elif isinstance(fake, torch.Tensor):
            self._value(call.name, fake)
            if self._is_copy(call):
                self.names[node.name] = call.operands[0]
                return
            if _is_view(node.target) and call.operands:
                self.views[call.name] = call.operands[0]
        else:
            raise ModelError(
                f"call {call.name!r} of {call.kind} returns a {type(fake).__name__} that depends on data; expected tensors of static shape"
            )
        self.program.calls.append(call)

    def _is_copy(self, call: Call) -> bool:
        """Whether the call changes neither shape nor dtype nor gradient (casts that became no-ops, contiguous)."""
        if call.kind not in _COPIES or not call.operands:
            return False
        source, out = self.program.values[call.operands[0]], self.program.values[call.name]
        return source.shape == out.shape and source.dtype == out.dtype

    def _getitem(self, node: torch.fx.Node) -> str:
        source, index = node.args
        return self.several[source.name][index]  # type: ignore[union-attr,index]

    def _split(self, call: Call, node: torch.fx.Node) -> None:
        """Each part becomes a slice (or a select) of its own, so that parts are planned apart."""
        parts: list[torch.Tensor] = node.meta["val"]
        source = call.operands[0]
        dim = int(argument(call, "dim", 0) or 0) % len(self.program.values[source].shape)
        names, start = [], 0
        for i, fake in enumerate(parts):
            name = self._value(f"{call.name}:{i}", fake)
            if call.kind == "unbind":
                target, args = aten.select.int, (Ref(source), dim, i)
            else:
                target, args = aten.slice.Tensor, (Ref(source), dim, start, start + fake.shape[dim])
                start += fake.shape[dim]
            self.program.calls.append(Call(name, target, args, {}, (name,), call.path))
            self.views[name] = source
            names.append(name)
        self.several[call.name] = names

    def _batch_norm(self, call: Call) -> None:
        """Statistics over the whole batch, then a pointwise application: see ``rules.norm``."""
        x = argument(call, "input")
        shape = self.program.values[x.name].shape
        buffers = tuple(self._buffer_name(argument(call, name)) for name in ("running_mean", "running_var"))
        for name in buffers:
            if name is not None:
                self.program.buffers.setdefault(name, self._buffer(name))
        affine = (argument(call, "weight"), argument(call, "bias"))
        sums = f"{call.name}:sums"
        self.program.values[sums] = Value(sums, (2, shape[1]), torch.float64)
        self.program.calls.append(Call(sums, batch_norm_statistics, (x,), {}, (sums,), call.path))
        out = self._value(call.name, torch.empty(shape, dtype=self.program.values[x.name].dtype, device="meta"))
        count = 1
        for size in (shape[0], *shape[2:]):
            count *= size
        options: Mapping[str, Any] = {
            "buffers": tuple(BufferRef(n) if n else None for n in buffers),
            "affine": tuple(a is not None for a in affine),
            "count": count,
            "momentum": argument(call, "momentum"),
            "eps": argument(call, "eps"),
        }
        operands = (x, Ref(sums), *(a for a in affine if a is not None))
        self.program.calls.append(Call(out, batch_norm_apply, operands, options, (out,), call.path))

    def _buffer_name(self, leaf: Any) -> str | None:
        if leaf is None:
            return None
        if not isinstance(leaf, Ref) or leaf.name not in self.buffer_values:
            raise ModelError(f"batch norm's running statistics are {leaf}; expected buffers of the module")
        return self.buffer_values[leaf.name]

    def _in_place(self, call: Call) -> None:
        """``x.add_(y)`` as ``x = x + y``: later uses of x, and of what shares its storage, mean the new value."""
        changed = call.operands[0]
        if changed in self.buffer_values:
            if len(call.operands) > 1:
                raise ModelError(
                    f"call {call.name!r} updates buffer {self.buffer_values[changed]!r} from an activation; "
                    "only batch norm's statistics and counters are supported"
                )
            name = self.buffer_values[changed]
            self.program.buffers.setdefault(name, self._buffer(name))
            args = (BufferRef(name), *call.args[1:])
            self.program.end_step.append(Call(call.name, call.target, args, call.kwargs, (), call.path))
            self.names[call.name] = changed
            return
        sharing = [v for view, base in self.views.items() if changed in (view, base) for v in (view, base) if self._used_after(v, call.name, changed)]
        if sharing:
            raise ModelError(f"call {call.name!r} changes {changed!r} in place while {sharing[0]!r} shares its memory; write it out of place")
        functional = _functional(call)
        self.program.calls.append(functional)
        value = self.program.values[changed]
        self.program.values[call.name] = Value(call.name, value.shape, value.dtype)
        self.names = {old: call.name if new == changed else new for old, new in self.names.items()}
        self.names[call.name] = call.name

    def _used_after(self, value: str, place: str, changed: str) -> bool:
        """Whether a node that stands for ``value`` (not for ``changed``) is read after the node ``place``."""
        nodes = {node.name: i for i, node in enumerate(self.exported.graph.nodes)}
        standing = [n for n in self.exported.graph.nodes if self.names.get(n.name) == value and value != changed]
        return any(nodes[user.name] > nodes[place] for node in standing for user in node.users)

    def _loss(self) -> str:
        """The scalar to minimise: the output called ``loss``, else the first output."""
        outputs = [self.names.get(leaf.name) for leaf in walk(_plain(self._output_args())) if isinstance(leaf, torch.fx.Node)]
        index, known = 0, False
        spec = self.exported.module_call_graph[0].signature
        keys = getattr(spec.out_spec, "context", None) if spec is not None else None
        if isinstance(keys, (list, tuple)) and "loss" in keys:
            index, known = list(keys).index("loss"), True
        loss = outputs[index] if index < len(outputs) else None
        if loss is None or loss not in self.program.values:
            raise ModelError("the program returns no tensor; expected the scalar training loss as output")
        value = self.program.values[loss]
        if value.shape not in ((), (1,)) or not value.dtype.is_floating_point:
            what = "output 'loss'" if known else "the first output"
            raise ModelError(
                f"{what} has shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}; "
                "expected a scalar floating-point loss: pass loss=… to soap.export, or return it first"
            )
        return loss

    def _output_args(self) -> Any:
        return next(n for n in self.exported.graph.nodes if n.op == "output").args

    def _freeze_buffers(self) -> None:
        """Buffers that nothing updates are constants."""
        for value, name in self.buffer_values.items():
            if name not in self.program.buffers:
                self.program.constants[value] = self._buffer(name)
            elif any(value in call.operands for call in self.program.calls):
                self.program.constants[value] = self._buffer(name)


def canonical_names(state: Mapping[str, Any]) -> dict[str, str]:
    """State-dict name -> the first name with the same storage (tied weights have one canonical name)."""
    first: dict[Any, str] = {}
    result: dict[str, str] = {}
    for name, tensor in state.items():
        key: Any = name
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta" and not _is_fake(tensor):
            key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else name
        elif isinstance(tensor, torch.Tensor):
            key = id(tensor)
        result[name] = first.setdefault(key, name)
    return result


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def _plain(nest: Any) -> Any:
    """fx's immutable lists and dicts as ordinary ones."""
    if isinstance(nest, (list, tuple)):
        return [_plain(item) for item in nest] if isinstance(nest, list) else tuple(_plain(item) for item in nest)
    if isinstance(nest, dict):
        return {key: _plain(item) for key, item in nest.items()}
    return nest


def _kind(target: Any) -> str:
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else str(target)


def _mutates(target: torch._ops.OpOverload) -> bool:
    arguments = target._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def _is_view(target: Any) -> bool:
    arguments = target._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and not arguments[0].alias_info.is_write


def _functional(call: Call) -> Call:
    """The out-of-place form of an in-place call."""
    name = call.kind.removesuffix("_")
    packet = getattr(aten, name, None)
    overload = call.target._overloadname  # type: ignore[attr-defined]
    if packet is None or overload not in packet.overloads():
        raise ModelError(f"in-place call {call.name!r} of {call.kind} has no functional form; write it out of place")
    return Call(call.name, getattr(packet, overload), call.args, call.kwargs, (call.name,), call.path)


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return str(paths[-1]) if paths else ""


