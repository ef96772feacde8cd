"""Which whole-number inputs can be drawn element by element from other samples.

This is known of indices of lookups and of class labels. Offsets of bags, lengths, sorted ids, permutations, masks and other inputs may
have a structure that elements of different samples do not have together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from soap.tracing.calls import Call, Program, Ref, argument

_LOOK_UPS = {"embedding", "embedding_bag"}
_LABELS = {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}
_MOVING = {
    "alias", "cat", "clone", "constant_pad_nd", "contiguous", "expand", "flatten", "pad", "permute", "repeat", "reshape", "roll", "select",
    "slice", "slice_scatter", "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip
_ELEMENTWISE = {"masked_fill", "to", "where"}


def element_inputs(program: Program) -> frozenset[str]:
    """The integer inputs that are only used as indices of lookups, or as class labels of which none is ignored."""
    inputs = {name for name in program.inputs if not _is_inexact(program.values[name].dtype) and program.values[name].dtype != torch.bool}
    origins: dict[str, frozenset[str]] = {name: frozenset([name]) for name in inputs}
    places = {name: name for name in inputs}  # value -> where its elements are used: calls that move them make places of their own
    used: set[str] = set()
    structured: set[str] = set()
    for call in program.calls:
        known = [name for name in call.operands if name in origins]
        if not known:
            continue
        own = frozenset[str]().union(*(origins[name] for name in known))
        read = _read_by_element(call)
        if read in known:
            used |= origins[read]
            structured = structured.union(*(origins[name] for name in known if name != read))
        elif len(call.outputs) != 1 or _is_inexact(program.values[call.outputs[0]].dtype):
            structured |= own
        elif call.kind in _MOVING:
            origins[call.outputs[0]], places[call.outputs[0]] = own, call.outputs[0]
        elif _is_elementwise(call, program) and len({places[name] for name in known}) == 1:
            origins[call.outputs[0]], places[call.outputs[0]] = own, places[known[0]]
        else:
            structured |= own
    return frozenset(used - structured)


def _read_by_element(call: Call) -> str:
    """The operand of which a call takes each element by itself, as an index or a label; "" if there is none."""
    if call.kind == "equal_bags":
        return call.operands[1]
    if call.kind in _LABELS and argument(call, "ignore_index", -100) >= 0:
        return ""  # a batch of ignored labels only would have no mean
    name = "target" if call.kind in _LABELS else "indices" if call.kind in _LOOK_UPS else ""
    found = argument(call, name)
    return found.name if isinstance(found, Ref) else ""


def _is_elementwise(call: Call, program: Program) -> bool:
    """Whether the call makes each element from one element and constants that are the same for all samples."""
    if call.kind not in _ELEMENTWISE and torch.Tag.pointwise not in getattr(call.target, "tags", ()):
        return False
    rank = len(program.values[call.outputs[0]].shape)
    shapes: Mapping[str, Any] = {name: program.values[name].shape for name in call.operands if name in program.constants}
    return all(len(shape) < rank or shape[0] == 1 for shape in shapes.values())


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
