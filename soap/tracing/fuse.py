"""Groups of calls that become one operator: an anchor (or a chain of light calls) with the light calls around it.

A light call joins the operator that produces its operand (epilogue) or the only one that consumes its result (prologue), if the factors of both can be
identified dimension by dimension. Nothing is fused that would take a way of splitting from an anchor: then the light call stays an operator of its own. Calls
that depend only on inputs, constants and parameters are repeated in every consumer instead, because recomputing them moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from soap.graph import WHOLE, DimMap
from soap.tracing.calls import Call, Program
from soap.tracing.rules.notation import Maps, Tiled
from soap.tracing.rules import tiled


@dataclass
class Step:
    """A call inside a group, with its maps over the group's factors."""

    call: Call
    rule: Tiled
    operands: list[Maps]
    outputs: list[Maps]


@dataclass
class Group:
    """An operator in the making. ``sizes`` and ``names`` are indexed by factor number; dropped factors leave gaps."""

    steps: list[Step]
    names: dict[int, str]
    sizes: dict[int, int]
    summed: set[int]
    light: bool
    made: dict[str, Maps] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, rule: Tiled) -> Group:
        """A group of one call."""
        step = Step(call, rule, list(rule.operands), list(rule.outputs))
        return cls(
            [step],
            {i: name for i, (name, _) in enumerate(rule.factors)},
            {i: size for i, (_, size) in enumerate(rule.factors)},
            set(rule.summed),
            rule.light,
            dict(zip(call.outputs, rule.outputs, strict=True)),
        )

    def reads(self) -> dict[str, list[Maps]]:
        """External values with the maps of every read."""
        result: dict[str, list[Maps]] = {}
        for step in self.steps:
            for name, maps in zip(step.call.operands, step.operands, strict=True):
                if name not in self.made:
                    result.setdefault(name, []).append(maps)
        return result

    def rewrite(self, change: Mapping[int, DimMap]) -> None:
        """Replace factors in all maps: factor f's tile becomes the interval that ``change[f]`` gives."""
        for step in self.steps:
            step.operands = [compose_all(maps, change) for maps in step.operands]
            step.outputs = [compose_all(maps, change) for maps in step.outputs]
        self.made = {name: compose_all(maps, change) for name, maps in self.made.items()}


def compose(inner: DimMap, change: Mapping[int, DimMap]) -> DimMap:
    """``inner`` over a factor whose tile is itself an interval map of another factor."""
    if inner.factor is None or inner.factor not in change:
        return inner
    outer = change[inner.factor]
    if outer.factor is None:
        if outer.scale:
            return WHOLE
        return DimMap(None, 0, outer.lo * inner.scale + inner.lo, (outer.hi - 1) * inner.scale + inner.hi)
    return DimMap(
        outer.factor,
        outer.scale * inner.scale,
        outer.lo * inner.scale + inner.lo,
        (outer.hi - 1) * inner.scale + inner.hi,
    )


def unsplit(size: int) -> DimMap:
    """What a factor of this size becomes when it is no longer split: its whole range."""
    return DimMap(None, 0, 0, size)


def simplified(maps: Maps, shape: Sequence[int]) -> Maps:
    """The same maps with constant intervals that cover a whole dimension written as such."""
    return tuple(
        WHOLE if dim.factor is None and (dim.scale or (dim.lo <= 0 and dim.hi >= size)) else dim for dim, size in zip(maps, shape, strict=True)
    )


def compose_all(maps: Maps, change: Mapping[int, DimMap]) -> Maps:
    """``compose`` for every dimension."""
    return tuple(compose(dim, change) for dim in maps)


@dataclass
class Match:
    """How to identify the factors of a producer and a consumer along one tensor, or why not.

    ``coarsen_*``: factor -> how many of its elements become one. ``same``: consumer factor -> producer factor.
    ``drop_*``: factors that can no longer be split.
    """

    coarsen_producer: dict[int, int] = field(default_factory=dict)
    coarsen_consumer: dict[int, int] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)
    drop_producer: set[int] = field(default_factory=set)
    drop_consumer: set[int] = field(default_factory=set)


def match(producer: Group, consumer: Group, made: Maps, reads: Sequence[Maps], shape: Sequence[int]) -> Match | None:
    """Identify factors along a tensor that ``producer`` makes with ``made`` and ``consumer`` reads with each of ``reads``."""
    result = Match()
    for wanted in reads:
        for mine, theirs, size in zip(simplified(made, shape), simplified(wanted, shape), shape, strict=True):
            if size == 1 or (mine.factor is None and theirs.factor is None and mine.scale and theirs.scale):
                continue
            if mine.factor is None:
                if not mine.scale or theirs.factor is None:
                    return None
                result.drop_consumer.add(theirs.factor)
            elif theirs.factor is None:
                if not theirs.scale:
                    return None
                result.drop_producer.add(mine.factor)
            elif not _identify(result, producer, consumer, mine, theirs):
                return None
    result.drop_consumer |= {c for c, p in result.same.items() if p in result.drop_producer}
    result.drop_producer |= {p for c, p in result.same.items() if c in result.drop_consumer}
    return result


def _identify(result: Match, producer: Group, consumer: Group, mine: DimMap, theirs: DimMap) -> bool:
    assert mine.factor is not None and theirs.factor is not None
    if not mine.exact or not theirs.exact:
        return False
    p, c = mine.factor, theirs.factor
    if c in result.same or p in result.same.values():
        return result.same.get(c) == p and result.coarsen_producer.get(p, 1) * mine.scale == result.coarsen_consumer.get(c, 1) * theirs.scale
    step = max(mine.scale, theirs.scale)
    if step % mine.scale or step % theirs.scale:
        return False
    by_p, by_c = step // mine.scale, step // theirs.scale
    if producer.sizes[p] % by_p or consumer.sizes[c] % by_c or producer.sizes[p] // by_p != consumer.sizes[c] // by_c:
        return False
    result.same[c] = p
    result.coarsen_producer[p], result.coarsen_consumer[c] = by_p, by_c
    return True


def merge(producer: Group, consumer: Group, found: Match) -> Group:
    """Both groups as one, with the producer's factor numbers."""
    shift: dict[int, DimMap] = {}
    numbers: dict[int, int] = {}
    free = max([-1, *producer.sizes, *(p for p in found.same.values())]) + 1
    for c in sorted(consumer.sizes):
        if c in found.drop_consumer:
            shift[c] = unsplit(consumer.sizes[c])
            continue
        if c in found.same:
            numbers[c] = found.same[c]
        else:
            numbers[c], free = free, free + 1
        by = found.coarsen_consumer.get(c, 1)
        shift[c] = DimMap(numbers[c], by, 0, by)
    change = {p: DimMap(p, by, 0, by) for p, by in found.coarsen_producer.items() if by > 1}
    change.update({p: unsplit(producer.sizes[p]) for p in found.drop_producer})
    result = copy(producer)
    other = copy(consumer)
    result.rewrite(change)
    other.rewrite(shift)
    for p, by in found.coarsen_producer.items():
        result.sizes[p] //= by
    for p in found.drop_producer:
        result.sizes.pop(p, None)
        result.names.pop(p, None)
        result.summed.discard(p)
    for c, number in numbers.items():
        if c in found.same:
            if producer.light and not consumer.light:  # the anchor's word for the factor
                result.names[number] = consumer.names[c]
        else:
            result.sizes[number] = consumer.sizes[c] // found.coarsen_consumer.get(c, 1)
            result.names[number] = consumer.names[c]
        if c in consumer.summed:
            result.summed.add(number)
    result.steps += other.steps
    result.made.update(other.made)
    result.light = producer.light and consumer.light
    return result


def copy(group: Group) -> Group:
    """A copy that can be rewritten without touching the original."""
    steps = [replace(step, operands=list(step.operands), outputs=list(step.outputs)) for step in group.steps]
    return Group(steps, dict(group.names), dict(group.sizes), set(group.summed), group.light, dict(group.made))


class Fuser:
    """Fuses a program's calls into groups; ``groups`` come out in topological order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.groups: dict[int, Group] = {}
        self.maker: dict[str, int] = {}  # value -> group
        self.derived: dict[str, Group] = {}  # value -> the calls that make it from inputs, constants and parameters
        self.readers: dict[str, int] = {}
        for call in program.calls:
            for name in call.operands:
                self.readers[name] = self.readers.get(name, 0) + 1
        self.readers[program.loss] = self.readers.get(program.loss, 0) + 1

    def run(self) -> list[Group]:
        """All groups, fused."""
        self.epilogues()
        self.prologues()
        return self.ordered()

    def epilogues(self) -> None:
        """Calls in order: derived ones aside, light ones into their producer where possible, others as new groups."""
        for number, call in enumerate(self.program.calls):
            rule = tiled(call, self.program.values)
            group = Group.of(call, rule)
            if rule.light and all(self._free(name) for name in call.operands) and call.outputs[0] != self.program.loss:
                self._derive(call, group)
                continue
            group = self._with_derived(group)
            target = self._producer_for(call, group) if rule.light and call.kind != "cat" else None
            if target is not None:
                group = target[1]
                number = target[0]
            self.groups[number] = group
            for name in group.made:
                if name not in self.derived:
                    self.maker[name] = number

    def _free(self, name: str) -> bool:
        return name not in self.maker

    def _derive(self, call: Call, group: Group) -> None:
        group = self._with_derived(group)
        for name in call.outputs:
            self.derived[name] = group

    def _with_derived(self, group: Group) -> Group:
        """The group with the derived values that it reads computed inside: a tile computes what it needs of them."""
        for name in list(group.reads()):
            if name not in self.derived:
                continue
            source = self.derived[name]
            shape = self.program.values[name].shape
            reads = group.reads()[name]
            found = match(source, group, source.made[name], reads, shape)
            if found is None or found.drop_consumer:
                found = Match(drop_producer=set(source.sizes))  # compute all of it, read the region
            group = _without_repeats(merge(source, group, found))
        return group

    def _producer_for(self, call: Call, group: Group) -> tuple[int, Group] | None:
        for name in call.operands:
            number = self.maker.get(name)
            if number is None or self.readers[name] != call.operands.count(name):
                continue
            producer = self.groups[number]
            if producer.summed and not (call and group.steps[-1].rule.linear):
                continue
            if any(number in self._ancestors(other) for o in group.reads() if (other := self.maker.get(o)) is not None and other != number):
                continue
            found = match(producer, group, producer.made[name], group.reads()[name], self.program.values[name].shape)
            if found is None or found.drop_producer:
                continue
            if any(o != name and self.maker.get(o) == number for o in call.operands):
                continue
            return number, _without_repeats(merge(producer, group, found))
        return None

    def _ancestors(self, number: int) -> set[int]:
        """Groups that must run before this one, itself included."""
        seen: set[int] = set()
        open_groups = [number]
        while open_groups:
            current = open_groups.pop()
            if current in seen:
                continue
            seen.add(current)
            open_groups += [maker for name in self.groups[current].reads() if (maker := self.maker.get(name)) is not None]
        return seen

    def prologues(self) -> None:
        """Light groups that only one group reads move into it, from the end backwards."""
        for number in sorted(self.groups, reverse=True):
            group = self.groups[number]
            if not group.light or self.program.loss in group.made:
                continue
            outputs = self._outputs(group, number)
            readers = {n for n, other in self.groups.items() if n != number and any(name in outputs for name in other.reads())}
            if len(readers) != 1 or len(outputs) != 1:
                continue
            reader, name = readers.pop(), outputs.pop()
            consumer = self.groups[reader]
            found = match(group, consumer, group.made[name], consumer.reads()[name], self.program.values[name].shape)
            if found is None or found.drop_consumer:
                halo = self._halo(group, consumer, name)
                if halo is None:
                    continue
                merged = halo
            else:
                merged = merge(group, consumer, found)
            self.groups[reader] = _without_repeats(merged)
            del self.groups[number]
            for made in group.made:
                if made in self.maker:
                    self.maker[made] = reader

    def _halo(self, group: Group, consumer: Group, name: str) -> Group | None:
        """Pointwise calls before a window: computed on the window's region, halo included."""
        made, reads = group.made[name], consumer.reads()[name]
        if len(set(reads)) != 1:
            return None
        change: dict[int, DimMap] = {}
        offset = max([-1, *group.sizes]) + 1
        for mine, theirs in zip(made, reads[0], strict=True):
            if mine.factor is None:
                if theirs.factor is not None:
                    return None
                continue
            if mine != DimMap(mine.factor):
                return None
            change[mine.factor] = replace(theirs, factor=theirs.factor + offset) if theirs.factor is not None else theirs
        if set(change) != set(group.sizes) or not self._pointwise(group):
            return None
        result, other = copy(group), copy(consumer)
        result.rewrite(change)
        other.rewrite({c: DimMap(c + offset) for c in consumer.sizes})
        result.sizes = {c + offset: size for c, size in consumer.sizes.items()}
        result.names = {c + offset: text for c, text in consumer.names.items()}
        result.summed = {c + offset for c in consumer.summed}
        result.steps += other.steps
        result.made.update(other.made)
        result.light = False
        return result

    def _pointwise(self, group: Group) -> bool:
        """Whether every dimension of every value follows a factor element by element or not at all."""
        for step in group.steps:
            names = (*step.call.operands, *step.call.outputs)
            for name, maps in zip(names, (*step.operands, *step.outputs), strict=True):
                for dim, size in zip(maps, self.program.values[name].shape, strict=True):
                    if dim.factor is not None and (dim != DimMap(dim.factor) or size != group.sizes[dim.factor]):
                        return False
        return True

    def _outputs(self, group: Group, number: int) -> set[str]:
        wanted = {name for n, other in self.groups.items() if n != number for name in other.reads()}
        return {name for name in group.made if self.maker.get(name) == number and (name in wanted or name == self.program.loss)}

    def ordered(self) -> list[Group]:
        """Topological order, by the position of each group's last call where there is a choice."""
        order: list[int] = []
        done: set[int] = set()

        def visit(number: int) -> None:
            stack = [(number, False)]
            while stack:
                current, expanded = stack.pop()
                if current in done:
                    continue
                if expanded:
                    done.add(current)
                    order.append(current)
                    continue
                stack.append((current, True))
                needs = {m for name in self.groups[current].reads() if (m := self.maker.get(name)) is not None and m != current}
                stack += [(need, False) for need in sorted(needs, reverse=True) if need not in done]

        position = {call.name: i for i, call in enumerate(self.program.calls)}
        for number in sorted(self.groups, key=lambda n: max(position[s.call.name] for s in self.groups[n].steps)):
            visit(number)
        for number in order:
            self.groups[number].steps.sort(key=lambda s: position[s.call.name])
        return [self.groups[number] for number in order]


def _without_repeats(group: Group) -> Group:
    """Derived calls that came in along several ways are kept once, computing the union that all reads need."""
    seen: dict[str, Step] = {}
    kept: list[Step] = []
    for step in group.steps:
        first = seen.get(step.call.name)
        if first is None:
            seen[step.call.name] = step
            kept.append(step)
            continue
        if first.outputs != step.outputs or first.operands != step.operands:
            # Two different regions of one derived value: compute it whole, every reader takes its part.
            first.operands = [tuple(WHOLE for _ in maps) for maps in first.operands]
            first.outputs = [tuple(WHOLE for _ in maps) for maps in first.outputs]
            for name, maps in zip(first.call.outputs, first.outputs, strict=True):
                group.made[name] = maps
    group.steps = kept
    return group
