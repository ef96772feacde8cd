"""Buffers that a program changes: the value of each when the forward pass ends, and which of them are simple enough to be changed after
the step."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from soap.errors import ModelError
from soap.tracing.calls import BufferRef, Call, Program
from soap.tracing.naming import canonical_names


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
