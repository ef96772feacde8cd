"""Why an operator cannot be split along a dimension, for ``soap-search --explain-graph``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soap.model.graph import DimMap, Unsplit
from soap.tracing.calls import Call, Program
from soap.tracing.compiled import ProgramStep
from soap.tracing.match import Group, Step
from soap.tracing.rules.notation import Maps
from soap.tracing.rules.registry import target_name

_REGROUPING = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel"}


def unsplit_dimensions(
    program: Program,
    group: Group,
    steps: Sequence[ProgramStep],
    reads: Sequence[tuple[str, Maps]],
    outputs: Sequence[str],
    tensor_names: Mapping[str, str],
) -> tuple[Unsplit, ...]:
    """The dimensions of an operator's tensors that none of its factors follows, outputs first; each size and reason once."""
    made = {value: maps for step in steps for value, maps in zip(step.call.outputs, step.outputs, strict=True)}
    result: dict[tuple[int, str], Unsplit] = {}
    for value, maps in (*((v, made[v]) for v in outputs), *reads):
        for dim, (size, follows) in enumerate(zip(program.values[value].shape, maps, strict=True)):
            if size > 1 and follows.factor is None:
                reason = _reason(program, group, value, dim)
                result.setdefault((size, reason), Unsplit(tensor_names[value], dim, size, reason))
    return tuple(result.values())


def _reason(program: Program, group: Group, value: str, dim: int) -> str:
    unknown = next((step.call for step in group.steps if not step.rule.known), None)
    if unknown is not None:
        return no_rule(program, unknown)
    if value in group.made and (factor := group.made[value][dim].factor) is not None:
        return f"only some of the operator's results follow {group.names[factor]}"
    blamed = _blamed(program, group, value, dim)
    return "the operator's calls split it differently" if blamed is None else _words(*blamed)


def _words(call: Call, own: DimMap) -> str:
    name = call.kind if not call.origin else f"{call.kind} in {call.origin}"
    if not own.scale:
        return f"{name} takes a fixed part of it"
    return f"{name} splits it by an outer dimension" if call.kind in _REGROUPING else f"{name} needs it whole"


def no_rule(program: Program, call: Call) -> str:
    """Why a call is kept whole."""
    name = target_name(call.target)
    part = program.stuck.get(call.name, name)
    return f"no rule for {name}" + (f", nor for {part} in it" if part != name else "")


def _blamed(program: Program, group: Group, value: str, dim: int) -> tuple[Call, DimMap] | None:
    """The nearest call whose rule does not split a dimension, or one that follows the same factor in the operator's other calls."""
    open_dims, seen = [(value, dim)], {(value, dim)}
    calls = [(step.call, _sides(step)) for step in group.steps]
    while open_dims:
        place = open_dims.pop(0)
        for call, sides in calls:
            for name, maps in sides:
                if name != place[0]:
                    continue
                own = maps[place[1]]
                if own.factor is None:
                    return call, own
                followers = [(n, d) for n, dims in sides for d, m in enumerate(dims) if m.factor == own.factor]
                wide = [(n, d) for n, d in followers if (n, d) not in seen and program.values[n].shape[d] > 1]
                seen.update(wide)
                open_dims += wide
    return None


def _sides(step: Step) -> list[tuple[str, Maps]]:
    """A call's values with what its own rule says of their dimensions."""
    call, rule = step.call, step.rule
    return [*zip(call.outputs, rule.outputs, strict=True), *zip(call.operands, rule.operands, strict=True)]
