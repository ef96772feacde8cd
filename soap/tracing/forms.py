"""Plain forms of calls: several ATen calls that mean the same become one, so that the rules need to know fewer of them.

Splits become slices, stacks concatenations, other names for permutations permutations, tensors that depend on a shape alone factories,
casts and copies plain casts (or nothing), training batch norm statistics and application.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import torch

from soap.errors import ModelError
from soap.model.dtypes import has_complex, name_of
from soap.tracing.calls import BufferRef, Call, Ref, Value, argument
from soap.tracing.rules.experts import expert_mm
from soap.tracing.rules.norm import batch_norm_apply, batch_norm_local, batch_norm_statistics

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Fake:
    """Shape and dtype of a call's result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Writer(Protocol):
    """What a form uses of the reader: the values so far, and a way to write calls."""

    local_statistics: bool
    """Whether training batch norm normalises each tile by its own statistics."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a value."""

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a value."""

    def emit(self, call: Call, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Write a call with one output, named as the call, and return that name."""

    def updated_buffer(self, leaf: Any) -> BufferRef | None:
        """The buffer behind an argument, which the program changes; None for None."""


Form = Callable[[Writer, Call, Any], Any]
"""A function from (writer, call, fake result) to the names of the call's result values: a string, or a list of them."""

FORMS: dict[str, Form] = {}


def form(*kinds: str) -> Callable[[Form], Form]:
    """Register the decorated function for calls of these kinds."""

    def decorate(function: Form) -> Form:
        FORMS.update(dict.fromkeys(kinds, function))
        return function

    return decorate


@form("split", "split_with_sizes", "chunk", "tensor_split")
def split(writer: Writer, call: Call, fakes: Sequence[Fake]) -> list[str]:
    """Each part becomes a slice of its own, so that parts are planned separately."""
    source = call.operands[0]
    dim = int(argument(call, "dim", 0) or 0) % len(writer.shape(source))
    stops = list(accumulate(fake.shape[dim] for fake in fakes))
    return [
        _view(writer, call, i, aten.slice.Tensor, (Ref(source), dim, stop - fake.shape[dim], stop), fake.shape)
        for i, (fake, stop) in enumerate(zip(fakes, stops, strict=True))
    ]


@form("unbind")
def unbind(writer: Writer, call: Call, fakes: Sequence[Fake]) -> list[str]:
    """Each part becomes a select."""
    source = call.operands[0]
    dim = int(argument(call, "dim", 0) or 0) % len(writer.shape(source))
    return [_view(writer, call, i, aten.select.int, (Ref(source), dim, i), fake.shape) for i, fake in enumerate(fakes)]


@form("broadcast_tensors")
def broadcast_tensors(writer: Writer, call: Call, fakes: Sequence[Fake]) -> list[str]:
    """Each tensor is expanded."""
    return [
        _view(writer, call, i, aten.expand.default, (Ref(source), list(fake.shape)), fake.shape)
        for i, (source, fake) in enumerate(zip(call.operands, fakes, strict=True))
    ]


def _view(writer: Writer, call: Call, number: int, target: Any, args: tuple[Any, ...], shape: Sequence[int]) -> str:
    """Write a call that makes output ``number`` from the value that its first argument names."""
    name = f"{call.name}:{number}"
    return writer.emit(Call(name, target, args, {}, (name,), call.path), tuple(shape), writer.dtype(args[0].name))


@form("cat", "concat", "concatenate")
def cat(writer: Writer, call: Call, fake: Fake) -> str:
    """A concatenation without empty operands (a key-value cache begins with one). A single one that is left is the result itself."""
    parts = [source for source in call.operands if prod(writer.shape(source)) > 0]
    if len(parts) == 1 and writer.shape(parts[0]) == fake.shape and writer.dtype(parts[0]) == fake.dtype:
        return parts[0]
    if len(parts) == len(call.operands) or len(parts) < 2:
        return writer.emit(call, fake.shape, fake.dtype)
    return _cat(writer, call, parts, int(argument(call, "dim", 0) or 0), fake)


@form("stack")
def stack(writer: Writer, call: Call, fake: Fake) -> str:
    """Operands get the new dimension, then follow one another along it."""
    dim = int(argument(call, "dim", 0) or 0) % len(fake.shape)
    parts = [_unsqueezed(writer, call, i, source, dim) for i, source in enumerate(call.operands)]
    return _cat(writer, call, parts, dim, fake)


@form("hstack", "vstack")
def hstack(writer: Writer, call: Call, fake: Fake) -> str:
    """Concatenation along dimension 1 or 0 of at least two; vectors are one row, or follow one another."""
    ranks = {len(writer.shape(source)) for source in call.operands}
    if ranks & {0}:
        return writer.emit(call, fake.shape, fake.dtype)
    parts = list(call.operands)
    if call.kind == "vstack":
        parts = [s if len(writer.shape(s)) > 1 else _unsqueezed(writer, call, i, s, 0) for i, s in enumerate(parts)]
    return _cat(writer, call, parts, 0 if call.kind == "vstack" or ranks == {1} else 1, fake)


def _unsqueezed(writer: Writer, call: Call, number: int, source: str, dim: int) -> str:
    shape = writer.shape(source)
    return _view(writer, call, number, aten.unsqueeze.default, (Ref(source), dim), (*shape[:dim], 1, *shape[dim:]))


def _cat(writer: Writer, call: Call, parts: Sequence[str], dim: int, fake: Fake) -> str:
    refs = [Ref(part) for part in parts]
    return writer.emit(Call(call.name, aten.cat.default, (refs, dim), {}, (call.name,), call.path), fake.shape, fake.dtype)


@form("zeros_like", "new_zeros", "ones_like", "new_ones", "full_like", "new_full", "empty_like", "new_empty")
def filled(writer: Writer, call: Call, fake: Fake) -> str:
    """A constant: only the shape and dtype of the operand count. Memory that nobody has written to is taken as zero."""
    value = {"zeros": 0, "ones": 1, "empty": 0}.get(call.kind.removesuffix("_like").removeprefix("new_"))
    value = argument(call, "fill_value") if value is None else value
    options = {"dtype": fake.dtype}
    full = Call(call.name, aten.full.default, (list(fake.shape), value), options, (call.name,), call.path)
    return writer.emit(full, fake.shape, fake.dtype)


@form("movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T", "mT", "adjoint", "mH", "matrix_H")
def permuted(writer: Writer, call: Call, fake: Fake) -> str:
    """A permutation, found by moving dimensions of different sizes. Adjoints are conjugated as well."""
    source = call.operands[0]
    marks = torch.empty(tuple(range(2, 2 + len(writer.shape(source)))), device="meta")
    order = [size - 2 for size in call.target(marks, *call.args[1:], **call.kwargs).shape]
    conjugated = call.kind in ("adjoint", "mH", "matrix_H") and fake.dtype.is_complex
    name = f"{call.name}:permuted" if conjugated else call.name
    plain = Call(name, aten.permute.default, (Ref(source), order), {}, (name,), call.path)
    result = writer.emit(plain, fake.shape, fake.dtype)
    return _written_out(writer, call, result, aten.conj_physical.default) if conjugated else result


@form("_conj", "conj", "conj_physical")
def conjugate(writer: Writer, call: Call, fake: Fake) -> str:
    """The numbers written out: torch only marks a tensor as conjugated."""
    source = call.operands[0]
    return _written_out(writer, call, source, aten.conj_physical.default) if fake.dtype.is_complex else source


@form("complex", "polar", "view_as_complex")
def put_together(writer: Writer, call: Call, fake: Fake) -> str:
    """Complex numbers made of real ones. Refused for types with which torch does not compute; autocast may have made them."""
    parts = next((writer.dtype(source) for source in call.operands if not has_complex(writer.dtype(source))), None)
    if parts is not None:
        raise ModelError(
            f"call {call.name!r} of {call.kind} makes complex numbers of {name_of(parts)}, with which torch does not compute; "
            "expected float32 or float64: cast before it"
        )
    return writer.emit(call, fake.shape, fake.dtype)


@form("_neg_view")
def negated(writer: Writer, call: Call, fake: Fake) -> str:
    """The numbers written out: torch only marks a tensor as negated."""
    return _written_out(writer, call, call.operands[0], aten.neg.default)


def _written_out(writer: Writer, call: Call, source: str, target: Any) -> str:
    plain = Call(call.name, target, (Ref(source),), {}, (call.name,), call.path)
    return writer.emit(plain, writer.shape(source), writer.dtype(source))


@form("resolve_conj", "resolve_neg", "real")
def unmarked(writer: Writer, call: Call, fake: Fake) -> str:
    """The operand, or a cast of it: marks do not matter here, and real numbers are their own real part."""
    source = call.operands[0]
    return writer.emit(call, fake.shape, fake.dtype) if writer.dtype(source) != fake.dtype else source


@form("contiguous", "alias", "lift_fresh", "lift_fresh_copy", "to", "_to_copy", "type_as")
def cast(writer: Writer, call: Call, fake: Fake) -> str:
    """A cast, or nothing if the dtype is there already. The device and memory layout of the export are not kept."""
    source = call.operands[0]
    if writer.dtype(source) == fake.dtype:
        return source
    plain = Call(call.name, aten.to.dtype, (Ref(source), fake.dtype), {}, (call.name,), call.path)
    return writer.emit(plain, fake.shape, fake.dtype)


@form("view_as", "reshape_as")
def view_as(writer: Writer, call: Call, fake: Fake) -> str:
    """The shape written out: the other operand gives nothing else."""
    return _view_named(writer, call, aten.reshape.default, fake)


@form("expand_as")
def expand_as(writer: Writer, call: Call, fake: Fake) -> str:
    """The shape written out: the other operand gives nothing else."""
    return _view_named(writer, call, aten.expand.default, fake)


def _view_named(writer: Writer, call: Call, target: Any, fake: Fake) -> str:
    plain = Call(call.name, target, (Ref(call.operands[0]), list(fake.shape)), {}, (call.name,), call.path)
    return writer.emit(plain, fake.shape, fake.dtype)


@form("batch_norm")
def batch_norm(writer: Writer, call: Call, fake: Fake) -> str:
    """In training, statistics over the whole batch and then a pointwise application, or one local call: see ``rules.norm``."""
    if not argument(call, "training"):
        return writer.emit(call, fake.shape, fake.dtype)
    x = argument(call, "input")
    shape = writer.shape(x.name)
    buffers = tuple(writer.updated_buffer(argument(call, name)) for name in ("running_mean", "running_var"))
    affine = (argument(call, "weight"), argument(call, "bias"))
    options = {
        "buffers": buffers,
        "affine": tuple(a is not None for a in affine),
        "momentum": argument(call, "momentum"),
        "eps": argument(call, "eps"),
    }
    given = [a for a in affine if a is not None]
    if writer.local_statistics:
        return writer.emit(Call(call.name, batch_norm_local, (x, *given), options, (call.name,), call.path), fake.shape, fake.dtype)
    name = f"{call.name}:sums"
    sums = writer.emit(Call(name, batch_norm_statistics, (x,), {}, (name,), call.path), (2, shape[1]), torch.float64)
    options["count"] = prod((shape[0], *shape[2:]))
    operands = (x, Ref(sums), *given)
    return writer.emit(Call(call.name, batch_norm_apply, operands, options, (call.name,), call.path), fake.shape, fake.dtype)


@form("instance_norm")
def instance_norm(writer: Writer, call: Call, fake: Fake) -> str:
    """Refused with running statistics: every sample would change them."""
    if argument(call, "running_mean") is not None or argument(call, "running_var") is not None:
        raise ModelError(f"call {call.name!r}: instance norm with running statistics; expected track_running_stats=False")
    return writer.emit(call, fake.shape, fake.dtype)


@form("_grouped_mm", "grouped_mm", "transformers.grouped_mm_fallback")
def grouped_mm(writer: Writer, call: Call, fake: Fake) -> str:
    """Rows that lie one expert after another: each gets the number of its expert. Other groups (of columns, of what is summed) stay."""
    offs, (rows, matrices) = argument(call, "offs"), call.operands[:2]
    dtypes = {writer.dtype(rows), writer.dtype(matrices), fake.dtype}
    if offs is None or argument(call, "bias") is not None or len(dtypes) > 1 or [len(writer.shape(n)) for n in (rows, matrices)] != [2, 3]:
        return writer.emit(call, fake.shape, fake.dtype)
    count, number, ids = fake.shape[0], f"{call.name}:rows", f"{call.name}:experts"
    options = {"dtype": writer.dtype(offs.name)}
    writer.emit(Call(number, aten.arange.default, (count,), options, (number,), call.path), (count,), options["dtype"])
    found = Call(ids, aten.searchsorted.Tensor, (offs, Ref(number)), {"right": True}, (ids,), call.path)
    writer.emit(found, (count,), torch.int64)
    product = Call(call.name, expert_mm, (Ref(rows), Ref(matrices), Ref(ids)), {}, (call.name,), call.path)
    return writer.emit(product, fake.shape, fake.dtype)


@form("as_strided", "as_strided_", "set_", "resize_", "_reshape_alias")
def by_memory(writer: Writer, call: Call, fake: Fake) -> str:
    """Refused: regions of tensors are laid out in memory differently from the whole tensors."""
    raise ModelError(
        f"call {call.name!r} of {call.kind} depends on how a tensor lies in memory; expected view, reshape or slices: rewrite it"
    )


def value_of(name: str, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """The value of this name; raises ModelError if its shape is not known."""
    if any(not isinstance(size, int) for size in shape):
        raise ModelError(f"{name!r} has a shape that depends on data ({tuple(shape)}); expected static shapes")
    return Value(name, tuple(shape), dtype)
