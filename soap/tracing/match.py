"""Groups of calls in the making, and joining two of them along a tensor: which factors of one are which of the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from soap.model.graph import WHOLE, DimMap
from soap.tracing.calls import Call
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
