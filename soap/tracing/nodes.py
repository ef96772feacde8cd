"""Graph nodes, one after another, as calls of a ``Program``: plain and functional, including in-place calls and blocks under
``no_grad``. ``reader`` gives it an exported program, ``decompose`` the parts of a single call.

Buffers that a program changes: the value of each when the forward pass ends, and which of them are simple enough to be changed after
the step.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from soap.errors import ModelError
from soap.model.dtypes import is_differentiable
from soap.tracing.aliasing import SAME, Aliasing, ViewOf, changed_by, changed_together, functional
from soap.tracing.autocast import Caster, concerns
from soap.tracing.calls import BufferRef, Call, Program, Ref, Target, Value, argument, is_random, kind_of, substitute
from soap.tracing.forms import FORMS, Fake, value_of
from soap.tracing.naming import canonical_names
from soap.tracing.types import TypeMap, written_out


@contextmanager
def about(buffer: str | None) -> Iterator[None]:
    """Within this context refusals name the buffer, if it is one."""
    try:
        yield
    except ModelError as error:
        if buffer is None:
            raise
        raise ModelError(f"buffer {buffer!r} is changed in a way that cannot be followed: {error}") from None


@dataclass
class Change:
    """In-place calls on one buffer, or frozen parameter. ``moves``: the calls as they are, for the end of the step; None if one of them
    needs more than the buffer. ``written``: results of their out-of-place forms, which also identify the calls. ``last``: name of the
    last call."""

    moves: list[tuple[int, Call]] | None = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    last: str = ""


class BufferChanges:
    """Changes in the order of the program. ``nodes``: placeholders of buffers and frozen parameters, with their state-dict names."""

    def __init__(self) -> None:
        self.nodes: dict[torch.fx.Node, str] = {}
        self.found: dict[str, Change] = {}
        self._count = 0

    def note(self, name: str, call: Call, written: Iterable[str], *, alone: bool) -> None:
        """Note that ``call`` changes the buffer in place and was written as calls with the results ``written``. ``alone``: it reads
        nothing but the whole buffer, so that it could as well run when the step is over."""
        change = self.found.setdefault(name, Change())
        change.written.update(written)
        change.last = call.name
        if not alone:
            change.moves = None
        if change.moves is not None:
            ending = Call(call.name, call.target, (BufferRef(name), *call.args[1:]), call.kwargs, (), call.path)
            change.moves.append((self._count, ending))
        self._count += 1

    def counters(self, program: Program, first: dict[str, str]) -> dict[str, list[tuple[int, Call]]]:
        """Buffers that only their own in-place calls read, with these calls: batch norm's counters of steps. ``first``: the value that
        a buffer has when the step begins -> its name."""
        own = {value: name for name, change in self.found.items() for value in change.written}
        read: set[str] = {own[program.loss]} if program.loss in own else set()
        for call in program.calls:
            for value in call.operands:
                name = own.get(value) or first.get(value)
                if name is not None and not (name in self.found and self.found[name].written.issuperset(call.outputs)):
                    read.add(name)
        return {name: change.moves for name, change in self.found.items() if change.moves is not None and name not in read}


def canonical_buffers(exported: ExportedProgram) -> dict[str, str]:
    """Buffer -> the first buffer that is the same tensor, if a module has two names for it."""
    buffers = {spec.target for spec in exported.graph_signature.input_specs if spec.kind is InputKind.BUFFER}
    return canonical_names({name: tensor for name, tensor in exported.state_dict.items() if name in buffers})


def check_memory(exported: ExportedProgram, moved: Container[str]) -> None:
    """ModelError for two tensors of the state that share memory, of which one changes: an optimizer would move both. Several names of one
    tensor are fine. ``moved``: canonical names of what the program changes."""
    canonical = canonical_names(exported.state_dict) | canonical_buffers(exported)
    read = {node.name for node in exported.graph.nodes if node.op == "placeholder" and node.users}
    held: dict[int, list[str]] = {}  # memory -> the tensors in it
    for spec in exported.graph_signature.input_specs:
        name = str(spec.target)
        tensor = exported.state_dict.get(name)
        if spec.arg.name not in read or tensor is None or tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
            continue
        changes = tensor.requires_grad or canonical.get(name, name) in moved
        found = held.setdefault(tensor.untyped_storage().data_ptr(), []) if tensor.numel() else []
        for other in found:
            own = exported.state_dict[other]
            if (changes or own.requires_grad or canonical.get(other, other) in moved) and _overlap(tensor, own):
                raise ModelError(_shared(name, other, both=tensor.requires_grad and own.requires_grad))
        found.append(name)


def _shared(name: str, other: str, *, both: bool) -> str:
    if both:
        return (
            f"{other!r} and {name!r} are two parameters in one memory, which optimizers move one after the other; expected one parameter "
            f"(module.{name} = module.{other}, again after load_state_dict(assign=True)), or memory of their own: a clone"
        )
    return f"{name!r} shares memory with {other!r}, and one of them changes; expected memory of its own: register a clone"


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in the same memory have an element there in common."""
    reaches = [(t.storage_offset(), sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))) for t in (one, other)]
    begin = min(start for start, _ in reaches)
    if max(start for start, _ in reaches) > min(start + reach for start, reach in reaches):
        return False
    if one.dtype != other.dtype or (one.is_contiguous() and other.is_contiguous()):
        return True
    marks = torch.zeros(max(start + reach for start, reach in reaches) - begin + 1, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - begin).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - begin).any())


class ProgramWriter:
    """Writes to ``program``; a ``forms.Writer``. ``dtype`` replaces every floating-point dtype, if given; see ``Reader`` for the rest."""

    def __init__(
        self, program: Program, dtype: torch.dtype | None, *, caster: Caster | None = None, local_statistics: bool = False
    ) -> None:
        self.program = program
        self.buffers: dict[str, str] = {}  # value -> state-dict name
        self.local_statistics = local_statistics
        self.caster = caster
        self.types = TypeMap(dtype)
        self._used_names: set[str] = set(program.values)

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
        return self.value(call.outputs[0], shape, dtype)

    def updated_buffer(self, leaf: Any) -> BufferRef | None:
        """The buffer behind an argument, which the program changes; None for None."""
        if leaf is None:
            return None
        if not isinstance(leaf, Ref) or leaf.name not in self.buffers:
            raise ModelError(f"running statistics are {leaf}; expected buffers of the module")
        name = self.buffers[leaf.name]
        self.program.buffers.setdefault(name, self.buffer(name))
        return BufferRef(name)

    def buffer(self, name: str) -> torch.Tensor:
        """The first value of a buffer."""
        raise ModelError(f"buffer {name!r} is changed where none is known")

    # Values

    def convert(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that is used in place of this one."""
        return self.types.of(dtype)

    def value(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        """A new value of the program."""
        self.program.values[name] = value_of(name, shape, dtype)
        return name

    def unique(self, name: str) -> str:
        """The name, or a similar one if an inlined part of the graph uses it too."""
        candidate, number = name, 1
        while candidate in self._used_names:
            candidate, number = f"{name}_{number}", number + 1
        self._used_names.add(candidate)
        return candidate


aten = torch.ops.aten

_DROPPED = {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size"}


class NodeReader(ProgramWriter):
    """Writes nodes to ``program``."""

    def __init__(self, program: Program, dtype: torch.dtype | None, **options: Any) -> None:
        super().__init__(program, dtype, **options)
        self.at: dict[torch.fx.Node, Any] = {}  # node -> value name, or names, of its current value
        self.changes = BufferChanges()
        self._aliasing = Aliasing(self.changes.nodes)
        self._cut_off: set[str] = set()  # values that no gradient flows through

    # Calls

    def nodes(self, graph: torch.fx.Graph, *, gradients: bool) -> None:
        """All calls of a graph whose placeholders are in ``at``."""
        for node in graph.nodes:
            if node.op == "call_function":
                self._node(node, gradients=gradients)
            elif node.op not in ("placeholder", "output", "get_attr"):
                raise ModelError(f"exported graph has a {node.op!r} node {node.name!r}; expected a flat program as torch.export makes it")

    def path(self, node: torch.fx.Node) -> str:
        """Path of the module that a node belongs to."""
        stack = node.meta.get("nn_module_stack") or {}
        paths = [entry[0] for entry in stack.values()]
        return str(paths[-1]) if paths else ""

    def _node(self, node: torch.fx.Node, *, gradients: bool) -> None:
        target = node.target
        if isinstance(node.meta.get("val"), (int, float)):
            return  # a size, or a condition on sizes: calls take its value
        if target is operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node) and isinstance(index, int)
            self.at[node] = self.at[source][index]
            self._aliasing.part(node, source, index)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self._higher_order(node, target, gradients=gradients)
        elif not isinstance(target, torch._ops.OpOverload):
            raise ModelError(f"call {node.name!r} of {target}: expected an ATen operator; the program depends on data or Python values")
        elif kind_of(target) not in _DROPPED:
            call = self._call(node, target)
            if (together := changed_together(node)) is not None:
                self._in_place_together(node, call, *together)
            elif (changed := self._changed(node)) is not None:
                self._in_place(node, call, changed, gradients=gradients)
            else:
                self._append(node, call)
                self._aliasing.follow(node)

    def _call(self, node: torch.fx.Node, target: torch._ops.OpOverload) -> Call:
        def change(leaf: Any) -> Any:
            if isinstance(leaf, torch.fx.Node):
                return Ref(self.now(leaf)) if leaf in self.at else leaf.meta.get("val")
            if isinstance(leaf, float):
                return self.types.number(leaf)
            return self.convert(leaf) if isinstance(leaf, torch.dtype) else leaf

        args = substitute(tuple(plain(a) for a in node.args), change)
        kwargs = substitute({k: plain(v) for k, v in node.kwargs.items() if k not in ("pin_memory", "layout")}, change)
        if "device" in kwargs:
            kwargs["device"] = None
        name = self.unique(node.name)
        return Call(name, target, args, kwargs, (name,), self.path(node))

    def _append(self, node: torch.fx.Node, call: Call) -> None:
        fake = node.meta.get("val")
        several = isinstance(fake, (tuple, list))
        every: list[Any] = list(fake) if isinstance(fake, (tuple, list)) else [fake]
        tensors = [f for f in every if isinstance(f, torch.Tensor)]
        if not several and not tensors:
            raise ModelError(
                f"call {call.name!r} of {call.kind} returns a {type(fake).__name__} that depends on data; expected tensors of static shape"
            )
        fakes = [Fake(value_of(call.name, f.shape, f.dtype).shape, self.convert(f.dtype)) for f in tensors]
        if fakes:
            self._refuse_bits(node, call, tensors[0])
            call = written_out(call, fakes[0].dtype, self.program.values, self.unique, self.emit)
        if self.caster is not None and concerns(call):
            call, dtypes = self._cast(call, self.caster)
            fakes = [Fake(f.shape, dtype) for f, dtype in zip(fakes, dtypes, strict=True)]
        if call.kind in FORMS:
            self.at[node] = FORMS[call.kind](self, call, fakes if several else fakes[0])
            return
        names = [f"{call.name}:{i}" for i in range(len(every))] if several else [call.name]
        kept = [name for name, f in zip(names, every, strict=True) if isinstance(f, torch.Tensor)]
        for name, f in zip(kept, fakes, strict=True):
            self.value(name, f.shape, f.dtype)
        self.program.calls.append(Call(call.name, call.target, call.args, call.kwargs, tuple(kept), call.path))
        self.at[node] = names if several else call.name

    def _refuse_bits(self, node: torch.fx.Node, call: Call, fake: torch.Tensor) -> None:
        source = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], torch.fx.Node) else None
        if isinstance(source, torch.Tensor):
            self.types.refuse_bits(call, source.dtype, fake.dtype)

    def _cast(self, call: Call, caster: Caster) -> tuple[Call, list[torch.dtype]]:
        """Write the casts that autocast would make of a call's operands. Returns the remaining call, and its outputs' dtypes."""
        found = caster.rewrite(call, self.program.values, self.unique)
        for cast, value in found.casts:
            self.emit(cast, value.shape, value.dtype)
        return found.call, found.dtypes

    def _higher_order(self, node: torch.fx.Node, target: torch._ops.HigherOrderOperator, *, gradients: bool) -> None:
        """Blocks under ``torch.no_grad`` are read in place, with their results detached. Any other block is control flow, and refused."""
        part, operands, detached = self._block(node, str(getattr(target, "_name", target)))
        if not gradients and not detached:
            raise ModelError(f"gradients are enabled inside torch.no_grad at {node.name!r}; expected no nesting: move that part out")
        graph = getattr(node.graph.owning_module, str(part.target)).graph
        inner = [n for n in graph.nodes if n.op == "placeholder"]
        for placeholder, operand in zip(inner, operands, strict=True):
            assert isinstance(operand, torch.fx.Node)
            if operand not in self.at:  # a size: calls take its value
                placeholder.meta["val"] = operand.meta.get("val")
                continue
            self.at[placeholder] = self.now(operand)
            self._aliasing.view(placeholder, operand, SAME)
        self.nodes(graph, gradients=gradients and not detached)
        output = next(n for n in graph.nodes if n.op == "output").args[0]
        leaves = list(output) if isinstance(output, (tuple, list)) else [output]
        names = [self.now(leaf) if leaf in self.at else None for leaf in leaves]
        self._aliasing.passed_on(node, leaves, None if detached else SAME)
        if detached:
            names = [self._detached(name, node) for name in names]
        self.at[node] = names

    def _block(self, node: torch.fx.Node, kind: str) -> tuple[torch.fx.Node, Sequence[Any], bool]:
        """The graph of a block, its operands, and whether its results are detached."""
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
        assert isinstance(part, torch.fx.Node)
        return part, operands, detached

    def _detached(self, name: str | None, node: torch.fx.Node) -> str | None:
        if name is None or name in self._cut_off or not is_differentiable(self.dtype(name)):
            return name
        result = self.unique(f"{node.name}_detach")
        call = Call(result, aten.detach.default, (Ref(name),), {}, (result,), self.path(node))
        return self.emit(call, self.shape(name), self.dtype(name))

    # In-place calls

    def _changed(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The node whose tensor a call changes."""
        roots = (self._aliasing.root(read) for read in node.all_input_nodes)
        with about(next((self.changes.nodes[root] for root in roots if root in self.changes.nodes), None)):
            return changed_by(node)

    def now(self, node: torch.fx.Node) -> Any:
        """The node's value. It is taken from its base anew if that has changed through another view."""
        if self._aliasing.stale(node):
            base = self._aliasing.base(node)
            if base is None or base[1] is None:
                with about(self.changes.nodes.get(self._aliasing.root(node))):
                    raise self._aliasing.refusal(node)
            self.at[node] = self._view(f"{node.name}_again", base[1].take, (self.now(base[0]),), base[1].take_args, node)
            self._aliasing.renew(node)
        return self.at[node]

    def _view(self, name: str, target: Any, operands: Sequence[str], args: Sequence[Any], like: torch.fx.Node) -> str:
        """Write a call with a result of the shape of ``like``'s tensor; nothing for a call that changes nothing."""
        if target is aten.alias.default:
            return operands[0]
        name = self.unique(name)
        call = Call(name, target, (*map(Ref, operands), *args), {}, (name,), self.path(like))
        return self.emit(call, like.meta["val"].shape, _counterpart(self.dtype(operands[0]), like.meta["val"].dtype))

    def _put(self, name: str, how: ViewOf, operands: Sequence[str], base: torch.fx.Node) -> str:
        """Write the calls that put a view's elements back, of complex numbers on their parts: torch has no gradients for that."""
        if not (how.onto and self.dtype(operands[1]).is_complex):
            return self._view(name, how.put, operands, how.put_args, base)
        parts = [self._part(f"{name}_{part}", how, operands, base, part) for part in ("real", "imag")]
        return self._view(name, aten.complex.default, parts, (), base)

    def _part(self, name: str, how: ViewOf, operands: Sequence[str], base: torch.fx.Node, part: str) -> str:
        """The same for the real or the imaginary parts."""
        own = []
        for value, place in zip(operands, ("around", "changed"), strict=True):
            taken = self.unique(f"{name}_{place}")
            call = Call(taken, getattr(aten, part).default, (Ref(value),), {}, (taken,), self.path(base))
            own.append(self.emit(call, self.shape(value), self.dtype(value).to_real()))
        name = self.unique(name)
        call = Call(name, how.put, (*map(Ref, own), *how.put_args), {}, (name,), self.path(base))
        return self.emit(call, self.shape(own[0]), self.dtype(own[0]))

    def _put_back(self, node: torch.fx.Node, changed: torch.fx.Node, now: str) -> None:
        """Note that ``changed`` has a new value, and give the tensors of which it is a view theirs, up to the one that made the memory."""
        # what surrounds the changed elements, as it was before: read first, while it is up to date
        outer, around = changed, []
        while (found := self._aliasing.outer(outer)) is not None and found[1] is not None:
            outer = found[0]
            around.append((found[0], found[1], self.now(outer)))
        self._aliasing.changed(changed, node.name)
        for same in self._aliasing.same(changed):
            self._renew(same, now)
        for base, how, before in around:
            operands = (before, now) if how.onto else (now,)
            now = self._put(f"{node.name}_base", how, operands, base)
            for same in self._aliasing.same(base):
                self._renew(same, now)

    def _renew(self, node: torch.fx.Node, value: str) -> None:
        self.at[node] = value
        self._aliasing.renew(node)

    def _in_place(self, node: torch.fx.Node, call: Call, changed: torch.fx.Node, *, gradients: bool) -> None:
        """``x.add_(y)`` as ``x = x + y``: later uses of x, and of what shares its memory, mean the new value."""
        origin = self._aliasing.root(changed)
        root, buffer = str(self.at[origin]), self.changes.nodes.get(origin)
        if buffer is None and root in self.program.parameters:
            if call.kind == "embedding_renorm_":
                raise _renorm_refusal(call, self.program.parameters[root])
            raise ModelError(
                f"call {call.name!r} changes parameter {self.program.parameters[root]!r} in place; expected that only training changes it: "
                "register what forward moves as a buffer"
            )
        if buffer is None and not gradients and origin.graph is not node.graph:
            raise ModelError(f"call {call.name!r} changes a tensor in place under torch.no_grad; write it out of place")
        value = self.program.values[self.now(changed)]
        alone = len(call.operands) == 1 and not is_random(call) and self._aliasing.is_root(changed)
        before = len(self.program.calls)
        with about(buffer):
            if call.kind == "copy_":  # the source in the target's shape and dtype
                source = Ref(call.operands[1])
                written = Call(call.name, aten.expand.default, (source, list(value.shape)), {}, call.outputs, call.path)
            else:
                written = functional(call)
            now = self.value(self._written(written, value), value.shape, value.dtype)
        if buffer is not None and not gradients:
            now = str(self._detached(now, node))
            self._cut_off.add(now)
        self.at[node] = now
        self._put_back(node, changed, now)
        self._aliasing.view(node, changed, SAME)
        if buffer is not None:
            made = (name for own in self.program.calls[before:] for name in own.outputs)
            self.changes.note(buffer, call, made, alone=alone)

    def _in_place_together(self, node: torch.fx.Node, call: Call, target: Target, changed: Sequence[torch.fx.Node]) -> None:
        """Write a call that changes several buffers as one that gives its result, a mask, and then their new values."""
        fake = node.meta["val"]
        values = [self.program.values[self.now(one)] for one in changed]
        if argument(call, "per_row_fake_quant") and values[0].shape != (fake.shape[argument(call, "ch_axis")],):
            raise ModelError(
                f"call {call.name!r} of {call.kind} gives buffer {changed[0].name!r} its shape with the first batch; "
                "expected it before the export: run the module once"
            )
        made = [(fake.shape, self.convert(fake.dtype)), (fake.shape, torch.bool), *((value.shape, value.dtype) for value in values)]
        names = [self.value(f"{call.name}:{i}", shape, dtype) for i, (shape, dtype) in enumerate(made)]
        self.program.calls.append(Call(call.name, target, call.args, call.kwargs, tuple(names), call.path))
        self.at[node] = names[0]
        for one, name in zip(changed, names[2:], strict=True):
            buffer = self.changes.nodes.get(self._aliasing.root(one))
            if buffer is None:
                raise ModelError(f"call {call.name!r} of {call.kind} changes {one.name!r} in place; expected buffers of the module alone")
            now = str(self._detached(name, node))
            self._put_back(node, one, now)
            self.changes.note(buffer, call, (name, now), alone=False)

    def _written(self, functional: Call, value: Value) -> str:
        """Write the out-of-place call, and a cast back to the dtype that the changed tensor keeps. ``value``: its value before."""
        dtype = value.dtype
        meta = [torch.empty(self.shape(n), dtype=self.dtype(n), device="meta") for n in functional.operands]
        following = iter(meta)
        fill = lambda leaf: next(following) if isinstance(leaf, Ref) else leaf  # noqa: E731
        result = functional.target(*substitute(functional.args, fill), **substitute(dict(functional.kwargs), fill))
        if result.shape != value.shape:
            raise ModelError(f"call {functional.name!r} of {functional.kind} changes a tensor's shape in place; write it out of place")
        if result.dtype == dtype:
            self.program.calls.append(functional)
            return functional.name
        name = f"{functional.name}:promoted"
        first = Call(name, functional.target, functional.args, functional.kwargs, (name,), functional.path)
        self.emit(first, result.shape, result.dtype)
        self.program.calls.append(Call(functional.name, aten.to.dtype, (Ref(name), dtype), {}, functional.outputs, functional.path))
        return functional.name


def _renorm_refusal(call: Call, parameter: str) -> ModelError:
    """Refuse lookups with ``max_norm``: they change their table, which would have to reach all that keep a part before its update."""
    number = call.args[2]
    return ModelError(
        f"a look-up with max_norm={number:g} ({call.path or call.name}) shortens rows of parameter {parameter!r} in the forward pass; "
        f"expected that training alone changes parameters: leave max_norm out, and shorten what was looked up, rows * ({number:g} / "
        f"rows.norm(dim=-1, keepdim=True).clamp_min({number:g})), or the table itself between steps"
    )


def plain(nest: Any) -> Any:
    """fx's immutable lists and dicts as ordinary ones."""
    if isinstance(nest, (list, tuple)):
        return [plain(item) for item in nest] if isinstance(nest, list) else tuple(plain(item) for item in nest)
    if isinstance(nest, dict):
        return {key: plain(item) for key, item in nest.items()}
    return nest


def _counterpart(dtype: torch.dtype, like: torch.dtype) -> torch.dtype:
    """The real or complex type of the same precision, whichever ``like`` is."""
    if dtype.is_complex == like.is_complex:
        return dtype
    return dtype.to_complex() if like.is_complex else dtype.to_real()
