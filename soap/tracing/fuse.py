"""Groups of calls that become one operator: an anchor (or a chain of light calls) with the light calls around it, unless that would take a
way of splitting from the anchor (docs/internals/tracing.md, *Fusion*)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from soap.model.graph import DimMap
from soap.tracing.calls import Call, Program
from soap.tracing.match import Group, copy, cover, match, merge, without_repeats
from soap.tracing.rules import tiled


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
