"""Groups of calls that become one operator: an anchor (or a chain of light calls) with the light calls around it, unless that would take a
way of splitting from the anchor (docs/internals/tracing.md, *Fusion*).

Groups of calls in the making, and joining two of them along a tensor: which factors of one are which of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from soap.model.graph import WHOLE, DimMap
from soap.tracing.calls import Call, Program
from soap.tracing.rules import tiled
from soap.tracing.rules.notation import Maps, Tiled


@dataclass
class Step:
    """A call inside a group, with its maps over the group's factors. ``factors``: factor of its rule -> which part of it a tile has."""

    call: Call
    rule: Tiled
    factors: dict[int, DimMap]
    operands: list[Maps]
    outputs: list[Maps]

    def rewrite(self, change: Mapping[int, DimMap]) -> None:
        """See ``Group.rewrite``."""
        self.factors = {factor: compose(dim, change) for factor, dim in self.factors.items()}
        self.operands = [compose_all(maps, change) for maps in self.operands]
        self.outputs = [compose_all(maps, change) for maps in self.outputs]

    def widen(self, factors: Iterable[int]) -> None:
        """Split these factors of the rule no longer: a tile has all of them."""
        self.factors |= {factor: unsplit(self.rule.factors[factor][1]) for factor in factors}
        self.operands = [compose_all(maps, self.factors) for maps in self.rule.operands]
        self.outputs = [compose_all(maps, self.factors) for maps in self.rule.outputs]


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
        step = Step(call, rule, {i: DimMap(i) for i in range(len(rule.factors))}, list(rule.operands), list(rule.outputs))
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
        return {name: maps for name, maps in self.uses().items() if name not in self.made}

    def uses(self) -> dict[str, list[Maps]]:
        """Values that the calls read, external or not, with the maps of every read."""
        result: dict[str, list[Maps]] = {}
        for step in self.steps:
            for name, maps in zip(step.call.operands, step.operands, strict=True):
                result.setdefault(name, []).append(maps)
        return result

    def rewrite(self, change: Mapping[int, DimMap]) -> None:
        """Replace factors in all maps: factor f's tile becomes the interval that ``change[f]`` gives."""
        for step in self.steps:
            step.rewrite(change)
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
    """The map of a factor of this size that is no longer split: its whole range."""
    return DimMap(None, 0, 0, size)


def simplified(maps: Maps, shape: Sequence[int]) -> Maps:
    """The same maps with constant intervals that cover a whole dimension written as such."""
    return tuple(
        WHOLE if dim.factor is None and (dim.scale or (dim.lo <= 0 and dim.hi >= size)) else dim
        for dim, size in zip(maps, shape, strict=True)
    )


def compose_all(maps: Maps, change: Mapping[int, DimMap]) -> Maps:
    """``compose`` for every dimension."""
    return tuple(compose(dim, change) for dim in maps)


@dataclass
class Match:
    """How to identify the factors of a producer and a consumer along one tensor, or why that is impossible. ``coarsen_*``: factor ->
    how many of its elements become one. ``same``: consumer factor -> producer factor. ``drop_*``: factors that can no longer be split."""

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


def cover(producer: Group, consumer: Group, made: Maps, reads: Sequence[Maps], shape: Sequence[int]) -> Match:
    """As ``match``, for a producer that computes more than ``consumer`` reads: all of each dimension in which they do not agree."""
    result = Match()
    for wanted in reads:
        for mine, theirs, size in zip(simplified(made, shape), simplified(wanted, shape), shape, strict=True):
            if mine.factor is None:
                continue
            agree = size > 1 and theirs.factor is not None and _identify(result, producer, consumer, mine, theirs)
            if not agree or result.coarsen_consumer[theirs.factor] > 1:  # type: ignore[index]
                result.drop_producer.add(mine.factor)
    for c, p in list(result.same.items()):
        if p in result.drop_producer:
            del result.same[c], result.coarsen_consumer[c]
            result.coarsen_producer.pop(p, None)
    return result


def _identify(result: Match, producer: Group, consumer: Group, mine: DimMap, theirs: DimMap) -> bool:
    assert mine.factor is not None and theirs.factor is not None
    if not mine.exact or not theirs.exact:
        return False
    p, c = mine.factor, theirs.factor
    if c in result.same or p in result.same.values():
        return (
            result.same.get(c) == p and result.coarsen_producer.get(p, 1) * mine.scale == result.coarsen_consumer.get(c, 1) * theirs.scale
        )
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
    steps = [replace(step) for step in group.steps]
    return Group(steps, dict(group.names), dict(group.sizes), set(group.summed), group.light, dict(group.made))


def without_repeats(group: Group) -> Group:
    """Keep derived calls that came in along several ways once. Where the ways need different regions, a dimension is computed whole."""
    kept: dict[str, Step] = {}
    wider: list[Step] = []
    for step in group.steps:
        first = kept.setdefault(step.call.name, step)
        if differ := [factor for factor, dim in first.factors.items() if dim != step.factors[factor]]:
            first.widen(differ)
            wider.append(first)
    group.steps = list(kept.values())
    makers = {value: (step, place) for step in group.steps for place, value in enumerate(step.call.outputs)}
    while wider:  # what is computed in a larger region needs more of its operands
        step = wider.pop()
        group.made.update(zip(step.call.outputs, step.outputs, strict=True))
        for value, needed in zip(step.call.operands, step.operands, strict=True):
            maker, place = makers.get(value, (None, 0))
            if maker is None:
                continue
            dims = zip(maker.rule.outputs[place], maker.outputs[place], needed, strict=True)
            if lacking := [own.factor for own, made, need in dims if own.factor is not None and made.factor is not None and made != need]:
                maker.widen(lacking)
                wider.append(maker)
    return group


class Fuser:
    """Fuses a program's calls into groups; ``groups`` come out in topological order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.groups: dict[int, Group] = {}
        self.maker: dict[str, int] = {}  # value -> group
        self.derived: dict[str, Group] = {}  # value -> the calls that make it from inputs, constants and parameters
        self.makers: dict[int, set[int]] = {}  # group -> those that make what it reads
        self.takers: dict[int, set[int]] = {}  # the other way round
        self.depth: dict[int, int] = {}  # group -> at least one more than that of each of its makers
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
            self._place(number, group)

    def _place(self, number: int, group: Group) -> None:
        """Note a group that is new, or another one than before."""
        self.groups[number] = group
        self.maker.update((name, number) for name in group.made if name not in self.derived)
        self.makers[number] = {maker for name in group.reads() if (maker := self.maker.get(name)) is not None}
        for maker in self.makers[number]:
            self.takers.setdefault(maker, set()).add(number)
        self.depth[number] = max([self.depth.get(number, 0), *(self.depth[maker] + 1 for maker in self.makers[number])])
        deeper = [number]
        while deeper:
            maker = deeper.pop()
            for taker in self.takers.get(maker, ()):
                if self.depth[taker] <= self.depth[maker]:
                    self.depth[taker] = self.depth[maker] + 1
                    deeper.append(taker)

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
            reads = group.uses()[name]  # one derived value may have come in with another already
            found = match(source, group, source.made[name], reads, shape)
            if found is None or found.drop_consumer:
                halo = None if group.light or name not in group.reads() else self._halo(source, group, name)
                if halo is not None:  # a window: compute its region, halo included
                    group = without_repeats(halo)
                    continue
                found = cover(source, group, source.made[name], reads, shape)
            group = without_repeats(merge(source, group, found))
        return group

    def _producer_for(self, call: Call, group: Group) -> tuple[int, Group] | None:
        for name in call.operands:
            number = self.maker.get(name)
            if number is None or self.readers[name] != call.operands.count(name):
                continue
            producer = self.groups[number]
            if producer.summed and not group.steps[-1].rule.linear:
                continue
            if any(self._needs(other, number) for o in group.reads() if (other := self.maker.get(o)) is not None and other != number):
                continue
            found = match(producer, group, producer.made[name], group.reads()[name], self.program.values[name].shape)
            if found is None or found.drop_producer:
                continue
            if any(o != name and self.maker.get(o) == number for o in call.operands):
                continue
            return number, without_repeats(merge(producer, group, found))
        return None

    def _needs(self, number: int, ancestor: int) -> bool:
        """Whether a group must run after another one. Only groups deeper than that one are looked at."""
        seen, open_groups = set[int](), [number]
        while open_groups:
            current = open_groups.pop()
            if current == ancestor:
                return True
            if current not in seen and self.depth[current] > self.depth[ancestor]:
                seen.add(current)
                open_groups += self.makers[current]
        return False

    def prologues(self) -> None:
        """Move light groups that only one group reads into that group, from the end backwards."""
        reading = _Reading(self.groups)
        for number in sorted(self.groups, reverse=True):
            group = self.groups[number]
            if not group.light or self.program.loss in group.made:
                continue
            outputs = {name for name in group.made if self.maker.get(name) == number and reading.others(name, number)}
            readers = {reader for name in outputs for reader in reading.others(name, number)}
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
            self.groups[reader] = without_repeats(merged)
            del self.groups[number]
            reading.forget(number)
            reading.note(reader, self.groups[reader])
            for made in group.made:
                if made in self.maker:
                    self.maker[made] = reader

    def _halo(self, group: Group, consumer: Group, name: str) -> Group | None:
        """Move pointwise calls before a window into it: they are computed on the window's region, halo included."""
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


class _Reading:
    """Which groups read each value."""

    def __init__(self, groups: Mapping[int, Group]) -> None:
        self._readers: dict[str, set[int]] = {}
        self._read: dict[int, list[str]] = {}
        for number, group in groups.items():
            self.note(number, group)

    def note(self, number: int, group: Group) -> None:
        """A group is new, or another one than before."""
        self.forget(number)
        self._read[number] = [*group.reads()]
        for name in self._read[number]:
            self._readers.setdefault(name, set()).add(number)

    def forget(self, number: int) -> None:
        """A group is no more."""
        for name in self._read.pop(number, ()):
            self._readers[name].discard(number)

    def others(self, name: str, number: int) -> set[int]:
        """Groups that read a value, but this one."""
        return self._readers.get(name, set()) - {number}
