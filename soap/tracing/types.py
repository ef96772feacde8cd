"""Floating-point types of a program: which type replaces each, and calls whose results have torch's default type, with the type written
out: so a program means the same whatever the default type of the process is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from soap.errors import ModelError, asked
from soap.model.dtypes import has_complex, is_differentiable, name_of, replaced
from soap.tracing.calls import Call, Ref, Value, argument, parameters_of, renamed, with_argument

aten = torch.ops.aten

LOWER_TYPES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST = {torch.finfo(dtype).max for dtype in (torch.bfloat16, torch.float32, torch.float64)}
"""The least numbers of types, of which masks are made (``torch.finfo(x.dtype).min``). Float16's, 65504, may also be a number that
somebody chose."""

def partial_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of partial results whose sum is of this type (``Tensor.partial_itemsize``)."""
    return torch.float32 if dtype in LOWER_TYPES else dtype


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a narrower type in float32; others as they are."""
    return tensor.float() if tensor.dtype in LOWER_TYPES else tensor


Emit = Callable[[Call, tuple[int, ...], torch.dtype], str]


class TypeMap:
    """The replacement of an exported program's types. ``dtype`` replaces every floating-point type; None: all stay as they are."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that is used in place of this one; raises ModelError for complex numbers of a type that torch does not have."""
        if self._dtype is not None and dtype.is_complex and not has_complex(self._dtype):
            raise ModelError(
                f"the model computes with complex numbers ({name_of(dtype)}), which torch does not have in {name_of(self._dtype)}; "
                "expected float32 or float64"
            )
        return replaced(dtype, self._dtype) if dtype.is_complex or dtype in _FLOATS else dtype

    def number(self, number: float) -> float:
        """The number in place of one that a call was given: the largest number of a type becomes that of the type in its place."""
        if self._dtype is not None and abs(number) in _LARGEST:
            largest = torch.finfo(self._dtype).max
            return largest if number > 0 else -largest
        return number

    def refuse_bits(self, call: Call, source: torch.dtype, result: torch.dtype) -> None:
        """Raise ModelError for a call that reads a tensor's memory as another type, if one of these types is replaced."""
        if call.kind == "view" and "dtype" in parameters_of(call.target) and {self.of(source), self.of(result)} != {source, result}:
            raise ModelError(
                f"call {call.name!r} takes the memory of a tensor as another type, so that the type of the model cannot be replaced: "
                f"leave {asked('dtype')} out, or take the tensor's values"
            )


def written_out(call: Call, dtype: torch.dtype, values: Mapping[str, Value], unique: Callable[[str], str], emit: Emit) -> Call:
    """The call as one whose result has this type whatever torch's default type is. ``emit`` writes calls before it, ``unique`` names."""
    if not is_differentiable(dtype):
        return call
    if not call.operands:
        return with_argument(call, "dtype", dtype) if _names_no_type(call) else call
    if dtype is torch.float32 or argument(call, "dtype") is not None or any(is_differentiable(values[n].dtype) for n in call.operands):
        return call
    if call.target is aten.where.Scalar:
        one, other = (unique(f"{call.name}:{branch}") for branch in ("self", "other"))
        for name, number in zip((one, other), (argument(call, "self"), argument(call, "other")), strict=True):
            emit(Call(name, aten.full.default, ([], number), {"dtype": dtype}, (name,), call.path), (), dtype)
        return replace(call, target=aten.where.self, args=(call.args[0], Ref(one), Ref(other)), kwargs={})
    cast: dict[str, str] = {}
    for name in dict.fromkeys(call.operands[1:] if call.kind == "where" else call.operands):
        cast[name] = unique(f"{name}:{str(dtype).removeprefix('torch.')}")
        emit(Call(cast[name], aten.to.dtype, (Ref(name), dtype), {}, (cast[name],), call.path), values[name].shape, dtype)
    return renamed(call, cast)


def _names_no_type(call: Call) -> bool:
    return "dtype" in parameters_of(call.target) and argument(call, "dtype") is None
