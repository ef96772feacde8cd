"""Rows of mixtures of experts, brought to their experts: products, and what is computed row by row between them, on *routed* rows.

A routed value stands for rows that lie one expert after another, in the order of the samples inside each. In the graph it has dimensions
(experts, rows of one expert if all have equally many, ...), so that samples and experts are split like any other dimensions: what devices
send each other is then an all-to-all of those rows for which the receiver's experts were chosen. Tensors have as many rows as were chosen,
in one dimension (``rules.experts``). Calls of ``unsort_experts`` come in, with a row at the place of its sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from soap.model.graph import DimMap
from soap.tracing.calls import Call, Program, Ref, Target, Value, argument, is_random, needed, renamed, with_argument
from soap.tracing.rules import tiled
from soap.tracing.rules.experts import combine, dispatch, expert_mm, expert_product, expert_rows, hand_over

_ALONG = {"slice", "select", "softmax", "glu", "sum", "mean"}
"""Calls that treat rows alike, along the dimension ``dim`` of each."""
_BY_FEATURES = {"to", "clone", "layer_norm", "rms_norm", "linear", "hardswish"}
"""Calls that treat rows alike, and name no dimension."""


def route_experts(program: Program, samples: int | None) -> None:
    """Bring rows to their experts where programs multiply them, in place, if the rows of each sample divide evenly among the experts.
    ``samples``: of the batch."""
    for ids in dict.fromkeys(call.operands[2] for call in program.calls if call.target is expert_mm):
        _Routing(program, ids).run(samples or 1)


@dataclass
class _Routing:
    """The products by one value's expert numbers. ``inside``: values between two products. ``routed``: a value -> its rows, routed."""

    program: Program
    ids: str
    inside: set[str] = field(default_factory=set)
    routed: dict[str, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def run(self, samples: int) -> None:
        """Change the program, or leave it as it is."""
        program = self.program
        products = [call for call in program.calls if call.target is expert_mm and call.operands[2] == self.ids]
        counts = {program.values[call.operands[1]].shape[0] for call in products}
        self.rows, self.experts = program.values[self.ids].shape[0], counts.pop()
        self.makers = {name: call for call in program.calls for name in call.outputs}
        copies = max(self._copies(call.operands[0]) for call in products)
        self.unit = math.lcm(self.experts, copies)
        if counts or self.rows % (samples * self.unit):
            return
        self._find_inside(products)
        read = {name for call in program.calls if not self._is_inside(call) for name in call.operands} | {program.loss, *program.kept}
        for call in program.calls:
            if not self._is_inside(call):
                self.calls.append(call)
                continue
            made = self._over_routed(call)
            if call.target is expert_mm:
                made = replace(made, target=expert_product, kwargs={"unit": self.unit})
            for name in call.outputs:
                self.routed[name] = f"{name}:routed"
                shape = self.program.values[name].shape
                self._note(self.routed[name], (self.experts, self.rows // self.experts, *shape[1:]), program.values[name].dtype)
            self.calls.append(replace(made, name=f"{call.name}:routed", outputs=tuple(self.routed[name] for name in call.outputs)))
            for name in call.outputs:
                if name in read:
                    given = (Ref(self._handed_over(self.routed[name], call.path)), Ref(self.ids))
                    self.calls.append(Call(name, combine, given, {"unit": self.unit}, (name,), call.path, call.origin))
        program.calls = needed(self.calls, {program.loss, *program.kept})

    def _copies(self, rows: str) -> int:
        """How often each sample's row is among these."""
        maker = self.makers.get(rows)
        source = self.program.values[maker.operands[0]].shape if maker is not None and maker.kind in ("reshape", "view", "flatten") else ()
        return source[1] if len(source) > 2 and source[0] * source[1] == self.rows else 1

    def _find_inside(self, products: list[Call]) -> None:
        """Values that follow from a product row by row, and that a product reads."""
        after = {name for call in products for name in call.outputs}
        for call in self.program.calls:
            if not after.isdisjoint(call.operands) and self._is_row_by_row(call):
                after.update(call.outputs)
        before = {call.operands[0] for call in products}
        for call in reversed(self.program.calls):
            if not before.isdisjoint(call.outputs) and after.issuperset(call.outputs) and call.target is not expert_mm:
                before.update(call.operands)
                self.inside.update(call.outputs)

    def _is_inside(self, call: Call) -> bool:
        product = call.target is expert_mm and call.operands[2] == self.ids
        return product or not self.inside.isdisjoint(call.outputs)

    def _is_row_by_row(self, call: Call) -> bool:
        """Whether a call treats all rows alike, each by itself, and would do so in other dimensions."""
        pointwise = torch.Tag.pointwise in getattr(call.target, "tags", ())
        if is_random(call) or not (pointwise or call.kind in _ALONG | _BY_FEATURES):
            return False
        values = self.program.values
        rule = tiled(call, values)
        firsts = {maps[0] if len(maps) > 1 else None for maps in rule.outputs}
        row = None if len(firsts) != 1 or (first := firsts.pop()) is None else first.factor
        if not rule.known or row is None or first != DimMap(row) or rule.factors[row][1] != self.rows:
            return False
        for name, maps in zip(call.operands, rule.operands, strict=True):
            follows = [place for place, dim in enumerate(maps) if dim.factor == row]
            if follows and (follows != [0] or maps[0] != DimMap(row) or len(values[name].shape) < 2):
                return False
        return True

    def _over_routed(self, call: Call) -> Call:
        """The call on routed rows: dimensions count from the last one, and operands with a row for each are routed."""
        values = self.program.values
        rows = [name for name in call.operands if len(values[name].shape) > 1 and values[name].shape[0] == self.rows]
        if call.kind in _ALONG:
            rank, dim = len(values[call.operands[0]].shape), argument(call, "dim", -1)
            last = [d % rank - rank for d in dim] if isinstance(dim, (list, tuple)) else dim % rank - rank
            call = with_argument(call, "dim", last)
        return renamed(call, {name: self._routed(name, call.path) for name in rows})

    def _routed(self, name: str, path: str) -> str:
        """The routed rows of a value."""
        if name not in self.routed:
            maker, value = self.makers.get(name), self.program.values[name]
            target: Target = dispatch
            source, own = name, {"experts": self.experts, "unit": self.unit}
            by_ids = maker is not None and maker.kind == "index" and argument(maker, "indices") == [Ref(self.ids)]
            if maker is not None and by_ids and len(self.program.values[maker.operands[0]].shape) == 2:
                target, source, own = expert_rows, maker.operands[0], {"unit": self.unit}
            out = f"{name}:routed"
            self._note(out, (self.experts, self.rows // self.experts, *value.shape[1:]), value.dtype)
            self.calls.append(Call(out, target, (Ref(source), Ref(self.ids)), own, (out,), path))
            self.routed[name] = self._handed_over(out, path) if target is dispatch else out
        return self.routed[name]

    def _handed_over(self, name: str, path: str) -> str:
        """Routed rows between the devices that have their samples and those that have their experts."""
        out, value = f"{name}:handed", self.program.values[name]
        self._note(out, value.shape, value.dtype)
        self.calls.append(Call(out, hand_over, (Ref(name), Ref(self.ids)), {"unit": self.unit}, (out,), path))
        return out

    def _note(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.program.values[name] = Value(name, shape, dtype, self.ids)
