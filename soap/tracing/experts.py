"""Mixtures of experts without sorting: what programs compute on rows sorted by expert is computed on the rows where they are, so that tiles
of samples route their own, as data parallelism does. Products get each row's expert (``rules.experts``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from soap.model.graph import DimMap
from soap.tracing.calls import Call, Program, Ref, Value, argument, is_random, needed, renamed
from soap.tracing.rules import tiled
from soap.tracing.rules.experts import expert_mm

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
