"""A mean over labels whose tiles are given only their own labels, and are told by which number to divide.

The rule of such a call (``rules.loss``) has two ways to read: all labels, and those that belong to the tile's scores. The operator may
compute labels from inputs before (views, slices, padding). What a tile then needs of the inputs follows from the call backwards, factor by
factor of each rule; where a call cannot be followed, all of its operand is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from soap.model.graph import DimMap
from soap.tracing.calls import Call, Value
from soap.tracing.compiled import OperatorProgram, ProgramStep
from soap.tracing.match import compose_all, simplified, unsplit
from soap.tracing.rules.notation import Maps


def own_labels(
    program: OperatorProgram, mean: Call, factors: Mapping[int, DimMap], values: Mapping[str, Value], given: Collection[str], count: int
) -> OperatorProgram | None:
    """An operator's calls as tiles run them that are told what ``mean`` divides by; None if they have no labels of their own.

    ``factors``: factor of the mean's rule -> which part of it a tile of the operator has. ``given``: values that every device has, of
    which labels must be made. ``count``: number of the operator's factors; the tiles of all of them together must have each label once.
    """
    place = next(number for number, step in enumerate(program.steps) if step.call is mean)
    needed = [
        simplified(compose_all(maps, factors), values[name].shape)
        for name, maps in zip(mean.operands, program.steps[place].rule.own_operands, strict=True)
    ]
    if len(program.outputs) != 1 or not _each_once(needed[1], count):
        return None
    steps = [*program.steps]
    steps[place] = replace(steps[place], operands=(steps[place].operands[0], *needed[1:]))
    readers = Counter(value for step in steps for value in step.call.operands)
    wanted: dict[str, list[Maps]] = {}
    _want(wanted, mean.operands[1:], needed[1:])
    for number in range(place - 1, -1, -1):
        if wanted.keys().isdisjoint(made := steps[number].call.outputs):
            continue
        regions = wanted.pop(made[0], [])
        if len(made) > 1 or len({*regions}) > 1 or len(regions) < readers[made[0]]:  # one region cannot serve all readers
            return None
        steps[number] = found = _reading(steps[number], regions[0], values)
        _want(wanted, found.call.operands, found.operands)
    if not wanted.keys() <= {*given}:
        return None
    inputs = _inputs(program, steps)
    return None if inputs is None else replace(program, steps=tuple(steps), inputs=inputs)


def _want(wanted: dict[str, list[Maps]], names: Sequence[str], maps: Sequence[Maps]) -> None:
    for name, own in zip(names, maps, strict=True):
        wanted.setdefault(name, []).append(own)


def _each_once(labels: Maps, count: int) -> bool:
    """Whether tiles of these factors share labels out: each factor cuts one dimension, exactly."""
    cutting = [dim for dim in labels if dim.factor is not None]
    return all(dim.exact for dim in cutting) and sorted(dim.factor or 0 for dim in cutting) == [*range(count)]


def _reading(step: ProgramStep, needed: Maps, values: Mapping[str, Value]) -> ProgramStep:
    """The call as it makes a region of its only output that holds what is needed, and little more."""
    rule = step.rule
    parts = dict[int, DimMap]()
    for own, wanted in zip(rule.outputs[0], needed, strict=True):
        if own.factor is not None:
            size = rule.factors[own.factor][1]
            found = _part(own, wanted, size)
            parts[own.factor] = found if parts.get(own.factor, found) == found else unsplit(size)
    change = {factor: parts.get(factor, unsplit(size)) for factor, (_, size) in enumerate(rule.factors)}

    def over(names: Sequence[str], maps: Sequence[Maps]) -> tuple[Maps, ...]:
        return tuple(simplified(compose_all(own, change), values[name].shape) for name, own in zip(names, maps, strict=True))

    return replace(step, operands=over(step.call.operands, rule.operands), outputs=over(step.call.outputs, rule.outputs))


def _part(made: DimMap, needed: DimMap, size: int) -> DimMap:
    """Which part of a factor of a rule has to be computed, so that the dimension that it makes holds what is needed of it."""
    if not made.exact or (needed.factor is None and needed.scale) or needed.scale % made.scale:
        return unsplit(size)
    return DimMap(needed.factor, needed.scale // made.scale, needed.lo // made.scale, -(-needed.hi // made.scale))


def _inputs(program: OperatorProgram, steps: Sequence[ProgramStep]) -> tuple[tuple[str, Maps], ...] | None:
    """The inputs as changed calls read them, in the order of the operator's; None if two calls that have read one region now read two, or
    if a parameter is read otherwise."""
    changed: dict[tuple[str, Maps], Maps] = {}
    for before, after in zip(program.steps, steps, strict=True):
        for name, old, new in zip(before.call.operands, before.operands, after.operands, strict=True):
            if changed.setdefault((name, old), new) != new:
                return None
    if any(changed[key] != key[1] for key in program.parameters):
        return None
    return tuple([(name, changed[name, maps]) for name, maps in program.inputs])
