"""What kernels on GPUs neither write nor read of the values that an operator's calls pass to each other; and in which type a call computes.

``Operator.saved_bytes`` is a bound of memory: every value counts, and every copy that a kernel may need. A view is no kernel, though, and
products of matrices take operands that lie in any order of rows and columns. Copies are left that are really made: of values whose elements
do not lie in order (``scattered``), where a call asks for another shape, or ``torch.matmul`` for a batch of matrices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import mul

import torch

from soap.model.dtypes import TF32, is_differentiable, name_of
from soap.model.graph import PRODUCT_KINDS, is_rounded_by_default
from soap.tracing.autocast import Autocast
from soap.tracing.calls import Call, Program, Value
from soap.tracing.compiled import ProgramStep

_RESHAPING = frozenset({"reshape", "view", "flatten", "unflatten", "ravel", "_unsafe_view"})
"""Views of values that lie in order; of others, too, if no dimensions become one. Else copies."""
_PERMUTING = frozenset({"transpose", "permute", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "mT", "mH", "numpy_T", "matrix_H"})
_SAME_ORDER = frozenset({"squeeze", "unsqueeze", "alias", "detach", "lift_fresh"})
_PARTS = frozenset({"expand", "select", "slice", "narrow", "unbind", "split", "split_with_sizes", "chunk", "diagonal", "unfold"})
"""Views, whose gradients are no views: they are written as a whole."""
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
    return call.kind in _PERMUTING | _SAME_ORDER


def _merges(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether dimensions become one: else every position in ``before`` where a dimension begins is one in ``after``, too."""
    steps = [set(accumulate((size for size in shape if size > 1), mul, initial=1)) for shape in (before, after)]
    return not steps[0] <= steps[1]


def unwritten_bytes(steps: Sequence[ProgramStep], outputs: Collection[str], program: Program, out_of_order: Collection[str]) -> int:
    """Of an operator's ``saved_bytes``: views, what views show of it outside, and copies that products do not need."""
    memory: dict[str, str] = {}  # value -> the one that shares its memory and was written
    made = [name for step in steps for name in step.call.outputs]
    for step in steps:
        viewed = is_view(step.call, program, out_of_order)
        memory.update((name, memory.get(step.call.operands[0], step.call.operands[0]) if viewed else name) for name in step.call.outputs)
    shown = {memory[name] for name in outputs if name in memory}
    between = {name for name in made if name not in outputs}
    written = {memory[name] for name in between} & set(made) - shown
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
