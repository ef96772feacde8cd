"""Mixtures of experts without sorting: what programs compute on rows sorted by expert is computed on the rows where they are, so that tiles
of samples route their own, as data parallelism does. Products get each row's expert (``rules.experts``).

Calls told otherwise: bags of equally many rows, which torch writes with offsets even if their indices had two dimensions, as calls of
our own; and grouped-query attention by ``enable_gqa``, without copies of keys and values for the queries' heads. Losses of class labels
read samples and positions as two dimensions where these had become one, so that both may be split.

Masks of attention that follow from positions alone: attention that is given one is told the band of keys instead, as
docs/internals/tracing.md says. Masks that depend on inputs (padding) stay; their picks at all positions become views, which are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from soap.model.graph import DimMap
from soap.model.regions import Interval
from soap.tracing.calls import Call, Program, Ref, Value, argument, is_random, needed, parameters_of, renamed, results_of, with_argument
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
from soap.tracing.rules import tiled
from soap.tracing.rules.attention import Band, in_band, scaled_dot_product_attention
from soap.tracing.rules.experts import expert_mm
from soap.tracing.rules.index import MODES, equal_bags
from soap.tracing.rules.loss import BY_POSITION, MEAN
from soap.tracing.rules.notation import is_pointwise

aten = torch.ops.aten

_SAME_ELEMENTS = {"reshape", "view", "flatten", "ravel", "to", "clone", "detach", "squeeze", "unsqueeze"}
_ROW_BY_ROW = _SAME_ELEMENTS | {
    "slice", "select", "expand", "cat", "linear", "layer_norm", "rms_norm", "softmax", "glu", "sum", "mean", "hardswish",
}  # fmt: skip
"""Calls beside pointwise ones that treat all rows alike, if their rules say that rows are independent."""


def unsort_experts(program: Program) -> None:
    """Replace rows that were sorted by expert and brought back by unsorted rows, in place, unless that would enlarge the products."""
    for name in [call.name for call in program.calls if call.kind in ("sort", "argsort")]:
        call = next((call for call in program.calls if call.name == name), None)
        choices = 0 if call is None else _choices(program, call)
        changed = _Unsorting(program, call, choices).run() if call is not None and choices else None
        if changed is not None:
            program.calls = changed


def _choices(program: Program, call: Call) -> int:
    """From how many experts ``topk`` picked the indices that are sorted here, in ascending order; 0 if this is no such sort."""
    value = program.values[call.operands[0]]
    if len(value.shape) != 1 or value.dtype.is_floating_point or argument(call, "descending"):
        return 0
    makers = {name: made for made in program.calls for name in made.outputs}
    name = value.name
    while (maker := makers.get(name)) is not None and maker.kind in _SAME_ELEMENTS:
        name = maker.operands[0]
    if maker is None or maker.kind not in ("topk", "argmax") or name != maker.outputs[-1]:
        return 0
    scores = program.values[maker.operands[0]].shape
    dim = argument(maker, "dim", -1)
    return scores[dim] if scores and dim is not None else 0


@dataclass
class _Unsorting:
    """Follows one sort through the calls behind it. ``plain``: value with sorted rows -> the same value with unsorted rows."""

    program: Program
    sort: Call
    choices: int
    plain: dict[str, str] = field(default_factory=dict)
    counts: set[str] = field(default_factory=set)
    """How many rows each expert has; ``ends``: where these end; ``groups``: the expert of each sorted row."""
    ends: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    inverse: set[str] = field(default_factory=set)
    """The place of each row among the sorted ones."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Number of the sample of which a sorted row is a copy -> how many copies there are of each."""
    names: dict[str, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)

    def run(self) -> list[Call] | None:
        """The program's new calls; None if they stay as they are."""
        self.makers = {name: call for call in self.program.calls for name in call.outputs}
        self.ids, self.perm = self.sort.operands[0], self.sort.outputs[-1]
        self.rows = self.program.values[self.ids].shape[0]
        if len(self.sort.outputs) > 1:
            self.plain[self.sort.outputs[0]] = self.ids
        self.tokens[self.perm] = 1
        begun = False
        for call in self.program.calls:
            call = renamed(call, self.names)
            self.calls.append(call)
            begun = begun or call.name == self.sort.name
            if begun and call.name != self.sort.name:
                self._follow(call)
        kept = self.program.kept
        result = needed(self.calls, {self.names.get(self.program.loss, self.program.loss), *kept})
        if _products(result) > _products(needed(self.program.calls, {self.program.loss, *kept})) or not self.names:
            return None
        self.program.values.update(self.values)
        return result

    def _follow(self, call: Call) -> None:
        """Note what a call makes of sorted rows, with its counterpart of unsorted rows."""
        out = call.outputs[0]
        if call.operands and self._counts(call):
            self.counts.add(out)
        elif (call.kind == "cumsum" and call.operands[0] in self.counts) or (call.kind in _SAME_ELEMENTS and call.operands[0] in self.ends):
            self.ends.add(out)
        elif call.kind == "searchsorted" and call.operands[0] in self.ends and argument(call, "right") and self._is_range(call.operands[1]):
            self.groups.add(out)
        elif call.kind == "floor_divide" and call.operands == (self.perm,) and isinstance(call.args[1], int):
            self.tokens[out] = call.args[1]
        elif self._puts_back(call):
            self.inverse.add(out)
        elif call.kind == "index" and len(argument(call, "indices")) == 1:
            self._index(call)
        elif call.kind == "index_add" and self._adds_copies(call):
            self._add_copies(call)
        elif call.target is expert_mm:
            self._product(call)
        elif any(name in self.plain for name in call.operands) and self._row_by_row(call):
            self._twin(call)

    # what calls are

    def _is_ids(self, name: str) -> bool:
        """Whether a value holds the indices, sorted or not, in any shape."""
        root = self._same_elements(name)
        return self._same_elements(self.ids) in (root, self._same_elements(self.plain.get(root, root)))

    def _same_elements(self, name: str) -> str:
        while (maker := self.makers.get(name)) is not None and maker.kind in _SAME_ELEMENTS:
            name = maker.operands[0]
        return name

    def _is_range(self, name: str) -> bool:
        """Whether the call counts the rows of each expert."""
        maker = self.makers.get(self._same_elements(name))
        return maker is not None and maker.kind == "arange" and maker.args in ((self.rows,), (0, self.rows), (0, self.rows, 1))

    def _counts(self, call: Call) -> bool:
        """Whether every expert's rows are counted separately; the indices are below ``choices``."""
        source = self._same_elements(call.operands[0])
        if call.kind == "histc":
            least, most, bins = (argument(call, name) for name in ("min", "max", "bins"))
            apart = least == 0 and (most == bins - 1 or most == bins == self.choices)
            return bool(apart and self._is_ids(source))
        marks = self.makers.get(source)
        if call.kind != "sum" or marks is None or marks.kind != "one_hot" or not self._is_ids(marks.operands[0]):
            return False
        return self.program.values[call.outputs[0]].shape == self.program.values[marks.outputs[0]].shape[-1:]

    def _puts_back(self, call: Call) -> bool:
        if call.kind == "argsort":
            return call.operands == (self.perm,) and not argument(call, "descending")
        if call.kind != "index_put" or argument(call, "accumulate"):
            return False
        every = self.program.values[call.outputs[0]].shape == (self.rows,)
        return every and argument(call, "indices") == [Ref(self.perm)] and self._is_range(call.operands[-1])

    def _row_by_row(self, call: Call) -> bool:
        """Whether a call treats all rows alike, each by itself."""
        if is_random(call) or not (call.kind in _ROW_BY_ROW or torch.Tag.pointwise in getattr(call.target, "tags", ())):
            return False
        rule = tiled(call, {**self.program.values, **self.values})
        outs = {maps[0] if maps else None for maps in rule.outputs}
        if not rule.known or len(outs) != 1:
            return False
        row = outs.pop()
        if row is None or row.factor is None or row != DimMap(row.factor) or rule.factors[row.factor][1] != self.rows:
            return False
        for name, maps in zip(call.operands, rule.operands, strict=True):
            follows = [place for place, dim in enumerate(maps) if dim.factor == row.factor]
            if follows != ([0] if name in self.plain else []) or (follows and maps[0] != row):
                return False
        return True

    # Twins

    def _emit(self, call: Call, shape: Sequence[int], dtype: torch.dtype) -> str:
        self.calls.append(call)
        self.values[call.outputs[0]] = Value(call.outputs[0], tuple(shape), dtype)
        return call.outputs[0]

    def _twin(self, call: Call, like: Call | None = None) -> None:
        outputs = tuple(f"{name}:unsorted" for name in call.outputs)
        made = renamed(like or call, self.plain)
        self.calls.append(replace(made, name=f"{call.name}:unsorted", outputs=outputs))
        for name, twin in zip(call.outputs, outputs, strict=True):
            self.values[twin] = replace(self.program.values[name], name=twin)
            self.plain[name] = twin

    def _product(self, call: Call) -> None:
        rows, matrices, ids = call.operands
        if rows in self.plain and matrices not in self.plain and (ids in self.groups or (ids in self.plain and self._is_ids(ids))):
            self._twin(call, replace(call, args=(Ref(rows), Ref(matrices), Ref(self.ids)), kwargs={}))

    def _index(self, call: Call) -> None:
        source, place = call.operands
        shape, out = self.program.values[source].shape if source in self.program.values else self.values[source].shape, call.outputs[0]
        if place in self.inverse and source in self.plain:
            self.names[out] = self.plain[source]
        elif source in self.plain:
            return  # rows by their number among sorted ones
        elif place in self.tokens and shape[0] * self.tokens[place] == self.rows:
            self.plain[out] = self._copies(call, source, shape, self.tokens[place])
        elif place in self.plain and self.program.values[place].shape == (self.rows,):
            self._twin(call)

    def _copies(self, call: Call, source: str, shape: tuple[int, ...], times: int) -> str:
        """Each row so many times, one after another."""
        if times == 1:
            return source
        dtype, name = self.program.values[call.outputs[0]].dtype, call.name
        steps: list[tuple[str, Any, Any, tuple[int, ...]]] = [
            ("apart", aten.unsqueeze.default, 1, (shape[0], 1, *shape[1:])),
            ("copies", aten.expand.default, [shape[0], times, *shape[1:]], (shape[0], times, *shape[1:])),
            ("unsorted", aten.reshape.default, [self.rows, *shape[1:]], (self.rows, *shape[1:])),
        ]
        for suffix, target, how, made in steps:
            outputs = (f"{name}:{suffix}",)
            source = self._emit(Call(outputs[0], target, (Ref(source), how), {}, outputs, call.path, call.origin), made, dtype)
        return source

    def _adds_copies(self, call: Call) -> bool:
        _, place, source = call.operands
        times = self.tokens.get(place, 0)
        fits = times > 0 and argument(call, "dim") == 0 and self.program.values[call.outputs[0]].shape[0] * times == self.rows
        return fits and source in self.plain and argument(call, "alpha", 1) == 1

    def _add_copies(self, call: Call) -> None:
        """``index_add`` to the samples of which rows are copies: a sum over these copies."""
        base, place, source = call.operands
        value = self.program.values[call.outputs[0]]
        apart = (value.shape[0], self.tokens[place], *value.shape[1:])
        assert prod(apart) == prod(self.program.values[source].shape)
        names = [f"{call.name}:{suffix}" for suffix in ("apart", "sum", "unsorted")]
        view = Call(names[0], aten.reshape.default, (Ref(self.plain[source]), list(apart)), {}, (names[0],), call.path, call.origin)
        total = Call(names[1], aten.sum.dim_IntList, (Ref(names[0]), [1]), {}, (names[1],), call.path, call.origin)
        added = Call(names[2], aten.add.Tensor, (Ref(base), Ref(names[1])), {}, (names[2],), call.path, call.origin)
        self._emit(view, apart, value.dtype)
        self._emit(total, value.shape, value.dtype)
        self.names[call.outputs[0]] = self._emit(added, value.shape, value.dtype)


def _products(calls: Sequence[Call]) -> int:
    return sum(call.target is expert_mm for call in calls)


def find_equal_bags(program: Program) -> None:
    """Replace ``embedding_bag(table, ids.flatten(), arange(0, bags * each, each))`` by ``equal_bags(table, ids)``, in place. If the
    other results of ``embedding_bag`` are read, the call stays. Padding indices are made to count from the front in all of them."""
    makers = {name: call for call in program.calls for name in call.outputs}
    read = {name for call in program.calls for name in call.operands}
    for position, call in enumerate(program.calls):
        if call.kind == "embedding_bag":
            call = _padded_from_the_front(program, call)
            equal = None if read.intersection(call.outputs[1:]) else _equal(program, makers, call)
            program.calls[position] = equal or call


def _padded_from_the_front(program: Program, call: Call) -> Call:
    padding, rows = argument(call, "padding_idx"), program.values[argument(call, "weight").name].shape[0]
    if padding is None or padding >= 0:
        return call
    place, _ = parameters_of(call.target)["padding_idx"]
    if place < len(call.args):
        return replace(call, args=(*call.args[:place], padding + rows, *call.args[place + 1 :]))
    return replace(call, kwargs={**call.kwargs, "padding_idx": padding + rows})


def _equal(program: Program, makers: dict[str, Call], call: Call) -> Call | None:
    table, bags = argument(call, "weight"), program.values[call.outputs[0]].shape[0]
    indices = _rows(program, makers, argument(call, "indices"), bags)
    scale, given = None, argument(call, "per_sample_weights")
    if isinstance(given, Ref):
        scale = _rows(program, makers, given, bags)
    if indices is None or (given is not None and scale is None) or argument(call, "scale_grad_by_freq"):
        return None
    offsets = makers.get(argument(call, "offsets").name)
    count, each = program.values[indices].shape
    evenly = offsets is not None and offsets.kind == "arange" and list(offsets.args[:3]) == [0, count * each, each]
    if not evenly or argument(call, "include_last_offset"):
        return None
    options = {"mode": MODES[int(argument(call, "mode") or 0)], "padding_idx": argument(call, "padding_idx")}
    operands = (table, Ref(indices), *([] if scale is None else [Ref(scale)]))
    return Call(call.name, equal_bags, operands, options, call.outputs[:1], call.path, call.origin)


def _rows(program: Program, makers: dict[str, Call], flat: Ref, bags: int) -> str | None:
    """The value (bags, each) that this one flattens; None if it is something else."""
    maker = makers.get(flat.name)
    if maker is None or maker.kind not in ("reshape", "view", "flatten") or len(program.values[flat.name].shape) != 1:
        return None
    shape = program.values[maker.operands[0]].shape
    return maker.operands[0] if len(shape) == 2 and shape[0] == bags else None


def find_grouped_queries(program: Program) -> None:
    """Let attention without a mask read keys and values as they were before each head of them was repeated, in place."""
    makers = {name: call for call in program.calls for name in call.outputs}
    changed = False
    for position, call in enumerate(program.calls):
        if call.kind != "scaled_dot_product_attention" or argument(call, "attn_mask") is not None or argument(call, "enable_gqa"):
            continue
        key, value = (_before_repeating(program, makers, argument(call, name).name) for name in ("key", "value"))
        if key is None or value is None or key[1] != value[1]:
            continue
        grouped = with_argument(with_argument(call, "key", Ref(key[0])), "value", Ref(value[0]))
        program.calls[position] = with_argument(grouped, "enable_gqa", True)
        changed = True
    if changed:
        program.calls = needed(program.calls, {program.loss, *program.kept})


def _before_repeating(program: Program, makers: Mapping[str, Call], name: str) -> tuple[str, int] | None:
    """(the value (samples, heads, words, size) of which this one has each head several times, one after another; how often)."""
    joined = _step(program, makers, name, ("reshape", "view", "flatten"))
    repeating = None if joined is None else _step(program, makers, joined.operands[0], ("expand",))
    wide = None if repeating is None else _step(program, makers, repeating.operands[0], ("unsqueeze",))
    if joined is None or repeating is None or wide is None or argument(wide, "dim") not in (2, -3):
        return None
    apart = wide.operands[0]
    before, repeated, after = (program.values[own].shape for own in (apart, repeating.outputs[0], name))
    if len(before) != 4:
        return None
    samples, heads, words, size = before
    times = repeated[2]
    fits = repeated == (samples, heads, times, words, size) and after == (samples, heads * times, words, size)
    return (apart, times) if fits and times > 1 else None


def _step(program: Program, makers: Mapping[str, Call], name: str, kinds: tuple[str, ...]) -> Call | None:
    """The call of one of these kinds that made this value, copies and slices of all of it aside."""
    while (maker := makers.get(name)) is not None:
        if maker.kind in kinds:
            return maker
        source = maker.operands[0] if maker.operands else ""
        same = maker.kind == "clone" or (maker.kind == "slice" and program.values[source].shape == program.values[name].shape)
        if not same:
            return None
        name = source
    return None


def find_positions(program: Program) -> None:
    """Let losses of class labels read scores and labels as they were before samples and positions became one dimension, in place."""
    makers = {name: call for call in program.calls for name in call.outputs}
    program.calls = [own for call in program.calls for own in _by_position(program, makers, call)]
    program.calls = needed(program.calls, {program.loss, *program.kept})


def _by_position(program: Program, makers: Mapping[str, Call], call: Call) -> list[Call]:
    """The loss over samples and positions, behind calls that do with its operands what was done to their rows. A loss of each row stays as
    it is: its result would have other dimensions."""
    if call.kind not in BY_POSITION or not argument(call, "reduction", MEAN):
        return [call]
    values, operands = program.values, call.operands[:2]
    sides = [_before_flattening(program, makers, name) for name in operands]
    (*rows, classes), own = (values[source].shape for source, _ in sides)
    if (*rows,) != own or sum(size > 1 for size in own) < 2 or values[operands[0]].shape != (prod(own), classes):
        return [call]
    made: list[Call] = []
    read: list[Ref] = []
    for source, steps in sides:
        shape = values[source].shape
        for step in steps:
            new = f"{step.name}:by_position"
            made.append(replace(renamed(step, {step.operands[0]: source}), name=new, outputs=(new,)))
            values[new] = replace(values[step.outputs[0]], name=new, shape=shape)
            source = new
        read.append(Ref(source))
    options = {name: argument(call, name) for name in ("weight", "reduction", "ignore_index", "label_smoothing")}
    given = {name: value for name, value in options.items() if value is not None}
    return [*made, replace(call, target=BY_POSITION[call.kind], args=(), kwargs={"self": read[0], "target": read[1], **given})]


def _before_flattening(program: Program, makers: Mapping[str, Call], name: str) -> tuple[str, list[Call]]:
    """The value of which this one is another shape, and what is done to each element of it afterwards; the value itself if it is none."""
    steps: list[Call] = []
    source = name
    while (maker := makers.get(source)) is not None and len(maker.operands) == 1:
        if maker.kind in ("reshape", "view", "flatten", "_unsafe_view"):
            return maker.operands[0], steps[::-1]
        if not is_pointwise(maker) or len(maker.outputs) > 1:
            break
        steps.append(maker)
        source = maker.operands[0]
    return name, []


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
