"""Constant folding and dead-call removal on a ``Program``.

Constants are held without copies: along dimensions in which all elements are the same they have strides of zero while they are folded.
Those that only broadcasting calls read lose these dimensions in the end: a mask of 128 equal samples is held once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch

from soap.errors import ModelError, first_line
from soap.model.graph import KEEP_STATE, NEXT_STATE
from soap.tracing.calls import Call, Program, argument, is_random, needed, results_of, with_argument
from soap.tracing.rules.notation import broadcast_shape, is_pointwise
from soap.tracing.without_values import REMEDY

LARGEST_BYTES = 2**28
"""Results up to this size are evaluated early, but for pointwise ones, of which parts can be evaluated."""
LARGEST_ELEMENTS = 2**22
"""The same for pointwise results and triangles."""
ATTENTION = "scaled_dot_product_attention"
TRIANGLES = ("tril", "triu")
_VIEWS = ("expand", "permute", "select", "slice", "squeeze", "transpose", "unsqueeze")
_FREE = (*_VIEWS, "full")


def fold(program: Program, *, plan_only: bool) -> None:
    """Evaluate calls that depend on nothing but constants (masks, position ids); drop calls that neither loss nor state needs. With
    ``plan_only`` the values are not computed: a plan needs their shapes only."""
    _replace(program, lambda call: _without_values(call, program) if plan_only else evaluate(call, program))
    readers: dict[str, list[Call]] = {}
    for call in program.calls:
        for name in call.operands:
            readers.setdefault(name, []).append(call)
    for name, tensor in program.constants.items():
        least = once(tensor)
        if least.shape != tensor.shape:
            fits = name in readers and all(_broadcasts(call, name, least.shape, program) for call in readers[name])
            program.constants[name] = (least if fits else tensor).clone(memory_format=torch.contiguous_format)
            program.values[name] = replace(program.values[name], shape=tuple(program.constants[name].shape))


def fold_small(program: Program) -> None:
    """Evaluate what takes little memory, also for plans, and leave what cannot be evaluated."""

    def made(call: Call) -> list[torch.Tensor] | None:
        sizes = [prod(program.values[name].shape) * program.values[name].dtype.itemsize for name in call.outputs]
        if is_pointwise(call):
            large = prod(broadcast_shape([once(program.constants[name]).shape for name in call.operands])) > LARGEST_ELEMENTS
        else:
            large = call.kind not in _FREE and max(sizes) > (LARGEST_ELEMENTS if call.kind in TRIANGLES else LARGEST_BYTES)
        if large or any(has_no_values(program.constants[name]) for name in call.operands):
            return None
        try:
            return [found if is_pointwise(call) else _without_copies(found) for found in _results(call, program)]
        except RuntimeError:  # ``fold`` says which call it is
            return None

    _replace(program, made)


def once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with one element for each dimension along which memory is read again and again."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if size > 1 and stride == 0 else tensor
    return tensor


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without values, with the same dimensions of copies."""
    return torch.empty(once(tensor).shape, dtype=tensor.dtype, device="meta").expand(tensor.shape)


@torch.no_grad()
def _replace(program: Program, made: Callable[[Call], Sequence[torch.Tensor] | None]) -> None:
    """Replace constant calls by their results, where there are any, and drop what nothing needs then."""
    kept, given = list[Call](), set(program.constants)
    for call in program.calls:
        constant = is_computable(call) and all(name in program.constants for name in call.operands)
        results = made(call) if constant else None
        if results is None:
            kept.append(call)
        else:
            program.constants.update(zip(call.outputs, results, strict=True))
    program.calls = needed(kept, {program.loss, *program.kept})
    used = {name for call in program.calls for name in call.operands} | {program.loss}
    program.constants = {n: tensor if n in given else _in_own_memory(tensor) for n, tensor in program.constants.items() if n in used}


def _in_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it would keep more memory than it shows."""
    least = once(tensor)
    return least.clone().expand(tensor.shape) if least.untyped_storage().nbytes() > least.nbytes else tensor


def is_computable(call: Call) -> bool:
    """Whether a call is the same in every step if its operands are."""
    return not is_random(call) and call.kind not in (NEXT_STATE, KEEP_STATE)


def evaluate(call: Call, program: Program) -> list[torch.Tensor]:
    """The outputs of a call whose operands are constants."""
    if lacking := next((name for name in call.operands if program.constants[name].is_meta), None):
        raise ModelError(f"the program was exported without the values of {lacking!r}, a constant; {REMEDY}")
    try:
        return _results(call, program)
    except RuntimeError as error:  # the constant has no input behind it: in most cases it is a number that its type cannot hold
        dtype = str(program.values[call.outputs[0]].dtype).removeprefix("torch.")
        said = first_line(error).removesuffix(".")
        message = f"call {call.name!r} of {call.kind} cannot be computed in {dtype}: {said}: expected another constant or type"
        raise ModelError(message) from None


def _results(call: Call, program: Program) -> list[torch.Tensor]:
    """The outputs of a call by its constants. Pointwise calls compute copies once."""
    shapes = [program.values[name].shape for name in call.outputs]
    if call.kind == "full":
        call = with_argument(call, "size", [min(2, size) for size in shapes[0]])  # torch fills one element with infinity, where two end it
    elif not is_pointwise(call):
        found = results_of(call, program.constants)
        return found if call.kind in _VIEWS else [t.clone(memory_format=torch.contiguous_format) for t in found]
    found = results_of(call, {name: once(program.constants[name]) for name in call.operands})
    if call.kind == "full":
        found = [t[(slice(0, 1),) * t.dim()] for t in found]
    return [t.clone().expand(shape) for t, shape in zip(found, shapes, strict=True)]


def _without_values(call: Call, program: Program) -> list[torch.Tensor]:
    """The outputs of a call whose operands are constants, on the meta device, with the dimensions of copies that ``_results`` finds."""
    values = [program.values[name] for name in call.outputs]
    if call.kind in _VIEWS:
        return results_of(call, {name: empty_like(program.constants[name]) for name in call.operands})
    shape: Sequence[int] | None = [min(1, size) for size in values[0].shape] if call.kind == "full" else None
    if is_pointwise(call):
        shape = broadcast_shape([once(program.constants[name]).shape for name in call.operands])
    return [torch.empty(value.shape if shape is None else shape, dtype=value.dtype, device="meta").expand(value.shape) for value in values]


def _without_copies(tensor: torch.Tensor) -> torch.Tensor:
    """Whole numbers and truth values with strides of zero where all elements along a dimension are the same."""
    for dim, size in enumerate(tensor.shape if not (tensor.is_floating_point() or tensor.is_complex()) else ()):
        if size > 1 and torch.equal(tensor, tensor.narrow(dim, 0, 1).expand_as(tensor)):
            tensor = tensor.narrow(dim, 0, 1).expand_as(tensor)
    return tensor


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a constant has a shape alone: a program's that was exported without values, or a plan's."""
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)


def _broadcasts(call: Call, name: str, shape: Sequence[int], program: Program) -> bool:
    """Whether a call makes the same of a constant that has this shape instead, with dimensions of 1."""
    if call.kind == ATTENTION:
        return name not in (argument(call, other).name for other in ("query", "key", "value"))
    shapes = [tuple(shape) if operand == name else program.values[operand].shape for operand in call.operands]
    return is_pointwise(call) and broadcast_shape(shapes) == program.values[call.outputs[0]].shape
