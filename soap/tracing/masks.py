"""Masks of attention that follow from positions alone: attention that is given one is told the band of keys instead, as
docs/internals/tracing.md says. Masks that depend on inputs (padding) stay; their picks at all positions become views, which are split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from soap.model.regions import Interval
from soap.tracing.calls import Call, Program, Ref, argument, needed, results_of, with_argument
from soap.tracing.fold import (
    ATTENTION,
    LARGEST_ELEMENTS,
    TRIANGLES,
    empty_like,
    fold_small,
    has_no_values,
    is_computable,
    once,
)
from soap.tracing.rules.attention import Band, in_band, scaled_dot_product_attention
from soap.tracing.rules.notation import is_pointwise

LONGEST = 2**15
"""Most queries and keys of which all pairs are compared, where more than their distance may matter: some seconds."""
_COMPARING = ("eq", "ge", "gt", "le", "lt", "ne", "sub")


@torch.no_grad()
def find_masks(program: Program, *, plan_only: bool) -> None:
    """Replace masks of attention that are bands, and calls that only bring a mask into shape, in place. ``plan_only``: as for ``fold``."""
    given = set(program.constants)
    fold_small(program)
    program.calls = [_shortened(program, call) for call in program.calls]
    makers = {name: call for call in program.calls for name in call.outputs}
    bands = _Bands(program)
    for position, call in enumerate(program.calls):
        mask = argument(call, "attn_mask") if call.kind == ATTENTION else None
        if isinstance(mask, Ref):
            program.calls[position] = bands.told(call, _before_expanding(program, makers, mask.name))
    program.calls = needed(program.calls, {program.loss, *program.kept})
    if plan_only:
        program.constants = {name: value if name in given else empty_like(value) for name, value in program.constants.items()}


def _shortened(program: Program, call: Call) -> Call:
    """The call, or one that says more plainly what it does: an operand in another shape."""
    shape = list(program.values[call.outputs[0]].shape) if call.outputs else []
    if call.kind == "index" and _picks_all(program, call, shape):
        return replace(call, target=torch.ops.aten.view.default, args=(Ref(call.operands[0]), shape), kwargs={})
    if call.kind in ("__and__", "bitwise_and", "logical_and") and len(call.operands) == 2:
        for one, other in (call.operands, call.operands[::-1]):
            mask, dtypes = program.constants.get(one), {program.values[name].dtype for name in (one, other)}
            if mask is not None and not has_no_values(mask) and dtypes == {torch.bool} and bool(once(mask).all()):
                return replace(call, target=torch.ops.aten.expand.default, args=(Ref(other), shape), kwargs={})
    return call


def _picks_all(program: Program, call: Call, shape: list[int]) -> bool:
    """Whether ``x[i, j]`` has all elements of x in their order: i and j count up, each along a later dimension of the result."""
    sizes, picks = program.values[call.operands[0]].shape, argument(call, "indices")
    taken = [dim for dim, size in enumerate(shape) if size > 1]
    if len(picks) != len(sizes) or [shape[dim] for dim in taken] != [size for size in sizes if size > 1]:
        return False
    along = iter(taken)
    for size, pick in zip(sizes, picks, strict=True):
        index = program.constants.get(pick.name) if isinstance(pick, Ref) else None
        if index is None or has_no_values(index) or index.dtype is torch.bool:
            return False
        view = [1] * len(shape)
        if size > 1:
            view[next(along)] = size
        if not torch.equal(index.expand(shape), torch.arange(size).view(view).expand(shape)):
            return False
    return True


def _before_expanding(program: Program, makers: Mapping[str, Call], name: str) -> str:
    """The value of as many dimensions of which this one has copies: attention broadcasts its mask."""
    while name in makers and makers[name].kind == "expand":
        (source,) = makers[name].operands
        if len(program.values[source].shape) != len(program.values[name].shape):
            break
        name = source
    return name


@dataclass
class _Bands:
    """The bands that masks of a program are. ``found``: by the mask's name and the numbers of queries and keys; None if it is none."""

    program: Program
    found: dict[tuple[str, int, int], Band | None] = field(default_factory=dict)

    def told(self, call: Call, mask: str) -> Call:
        """The attention with the band in place of this mask, or with the mask."""
        queries, keys = (self.program.values[argument(call, name).name].shape[-2] for name in ("query", "key"))
        if (mask, queries, keys) not in self.found:
            try:
                self.found[mask, queries, keys] = _band(_of_constants(self.program, mask, queries, keys))
            except RuntimeError:  # folding says which call cannot be computed
                self.found[mask, queries, keys] = None
        band = self.found[mask, queries, keys]
        call = with_argument(call, "attn_mask", Ref(mask) if band is None else None)
        if band is None or band == (None, None):
            return call
        if band == (None, 0):
            return with_argument(call, "is_causal", True)
        own = {name: argument(call, name) for name in ("query", "key", "value", "dropout_p", "scale", "enable_gqa")}
        return replace(call, target=scaled_dot_product_attention, args=(), kwargs={**own, "band": band})


@dataclass(frozen=True, slots=True)
class _Mask:
    """A mask that follows from constants, any rows of which can be evaluated. ``known``: those that the calls read."""

    program: Program
    name: str
    calls: list[Call]
    known: Mapping[str, torch.Tensor]
    queries: int
    keys: int

    def seen(self, rows: Interval) -> torch.Tensor | None:
        """Which keys some queries may see; None if the mask says more of them than that."""
        parts = {leaf: t[..., slice(*rows), :] if t.dim() > 1 and t.shape[-2] > 1 else t for leaf, t in self.known.items()}
        for call in self.calls:
            parts[call.outputs[0]] = _some_rows(call, parts, self.program.values[call.outputs[0]].shape, rows)
        mask = parts[self.name]
        if mask.dtype.is_floating_point:  # it is added to the scores
            seen = mask == 0.0
            if not bool((seen | (mask == float("-inf"))).all()):
                return None
            mask = seen
        return mask.expand(*mask.shape[:-2], rows[1] - rows[0], self.keys)

    def by_distance(self) -> bool:
        """Whether an element follows from its distance from the diagonal: the calls do no more than compare positions."""
        rows, columns = set[str](), set[str]()
        for leaf, tensor in self.known.items():
            if tensor.numel() == 1:
                continue
            places = tensor.numel() == max(tensor.shape[-2:]) and tensor.dtype is torch.int64
            if not places or not bool((tensor.flatten().diff() == 1).all()):
                return False
            (columns if tensor.shape[-1] > 1 else rows).add(leaf)
        for call in self.calls:
            moving = [name in rows for name in call.operands if name in rows | columns]
            if moving and (call.kind not in _COMPARING or sorted(moving) != [False, True]):
                return False
        return True


def _band(mask: _Mask | None) -> Band | None:
    """The band that a mask is: the first and the last row say which it can be; all rows are compared if more may matter."""
    ends = [] if mask is None else [seen for row in (0, mask.queries - 1) if (seen := mask.seen((row, row + 1))) is not None]
    if mask is None or len(ends) < 2:
        return None
    after, before = (int(seen.flatten(0, -2)[0].sum()) - 1 for seen in ends)
    band = (None if before == mask.keys - 1 else before, None if after == mask.keys - 1 else after)
    if min(before, after) < 0 or (mask.queries != mask.keys and band != (None, None)):
        return None
    step = max(1, LARGEST_ELEMENTS // mask.keys)
    blocks = [(first, min(first + step, mask.queries)) for first in range(0, mask.queries, step)]
    if mask.queries == mask.keys and mask.by_distance():
        blocks = [(0, 1), (mask.queries - 1, mask.queries)]
    elif max(mask.queries, mask.keys) > LONGEST:
        return None
    for rows in blocks:
        seen = mask.seen(rows)
        if seen is None or not torch.equal(seen, in_band(band, rows, (0, mask.keys)).expand_as(seen)):
            return None
    return band


def _of_constants(program: Program, name: str, queries: int, keys: int) -> _Mask | None:
    """A mask by the calls that make it; None if it depends on more than constants, or on calls that mix its rows."""
    value, calls = program.values[name], needed(program.calls, {name})
    made = {output for call in calls for output in call.outputs}
    leaves = {leaf for call in calls for leaf in call.operands if leaf not in made} | ({name} - made)
    known = {leaf: once(program.constants[leaf]) for leaf in leaves if leaf in program.constants}
    shapes = [*(tensor.shape for tensor in known.values()), *(program.values[output].shape for output in made)]
    fits = len(value.shape) > 1 and value.shape[-2] in (1, queries) and value.shape[-1] in (1, keys)
    if not fits or not (value.dtype is torch.bool or value.dtype.is_floating_point):
        return None
    if len(known) < len(leaves) or any(map(has_no_values, known.values())) or any(len(s) > 1 and s[-2] not in (1, queries) for s in shapes):
        return None
    return _Mask(program, name, calls, known, queries, keys) if all(_is_by_row(program, call) for call in calls) else None


def _is_by_row(program: Program, call: Call) -> bool:
    """Whether rows of a call's result follow from those of its operands."""
    if not is_computable(call) or len(call.outputs) != 1:
        return False
    rank = len(program.values[call.outputs[0]].shape)
    leading = call.kind == "unsqueeze" and argument(call, "dim") % max(1, rank) < rank - 2
    return leading or call.kind in ("expand", *TRIANGLES) or is_pointwise(call)


def _some_rows(call: Call, parts: dict[str, torch.Tensor], shape: tuple[int, ...], rows: Interval) -> torch.Tensor:
    """Some rows of a call's result by those of its operands; dimensions of copies may be 1."""
    if is_pointwise(call) or call.kind == "unsqueeze":
        return results_of(call, parts)[0]
    (name,) = call.operands
    part = parts[name].view((1,) * (len(shape) - parts[name].dim()) + tuple(parts[name].shape))
    if call.kind not in TRIANGLES:
        return part
    full = part.expand(*part.shape[:-2], rows[1] - rows[0], shape[-1])
    return results_of(with_argument(call, "diagonal", int(argument(call, "diagonal")) + rows[0]), {name: full})[0]
