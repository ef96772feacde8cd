"""The user's constraints: ``--pin`` fixes how operators are split or where they run, ``--forbid`` rules something out.

A constraint is a pattern of operator names (``fnmatch``; ``layers.0-3.*`` stands for each number) and a specification for these operators:

- pin: ``sample:4``, ``sample:4,channel:2`` or ``replicas:2`` (factors by name or kind; factors that are not named are not split). With
  ``@0-3`` or ``@0,2`` behind it the devices are fixed as well; ``@0-3`` alone fixes only the devices. The search decides which tile runs on
  which of them.
- forbid: factors by name or kind that are never split, ``replicas``, and ``@3``: devices that are never used.
- a field of a mark among the names, as ``recompute`` or ``offload``: operators have it (pin), or never do (forbid).
- ``stage:0`` among the names: operators belong to this stage of a pipeline (pin), or never do (forbid).

All constraints of an operator hold together. They leave an ``Allowed``, from which its ``OperatorSpace`` is made, so the proposals stay
inside. ``brought_inside`` changes strategies from elsewhere (starts, references) as little as it can.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import log2, prod

from soap.errors import StrategyError, asked, did_you_mean
from soap.model.graph import Operator, OperatorGraph
from soap.model.json_text import short
from soap.search.space import Grid, OperatorSpace, Space, grid_of
from soap.strategy.config import OpConfig, Strategy, settled_config
from soap.strategy.marks import FEATURES, MARKS, mark_of, marks_of, with_mark
from soap.strategy.stages import chunks_of, stages_of_chunks

_MARKS = [feature.field for feature in FEATURES]
"""Stand for marks of operators where a factor could be named."""
STAGE = "stage"
"""Stands for a stage of a pipeline where a factor could be named."""
REPLICAS = "replicas"
"""Name of the axis of replicas, which is no factor."""
Pairs = Sequence[tuple[str, str]]
"""(pattern of operator names, what it says of these operators)."""

_SPEC = (
    "expected FACTOR:DEGREE such as sample:4 or sample:4,replicas:2, with @0-3 behind it for the devices, or @0-3 alone; "
    f"{' or '.join(map(repr, _MARKS))} or stage:0 by itself or among the factors"
)
_FORBIDDEN = (
    f"expected names or kinds of factors, 'replicas', {', '.join(map(repr, _MARKS))}, stage:0, or devices as @3, such as reduction or "
    "attribute,@3"
)
_NUMBERS = re.compile(r"(?<![0-9\[])([0-9]{1,9})-([0-9]{1,9})(?![0-9\]])", re.ASCII)
MOST_PATTERNS = 4096
"""For so many patterns a pattern with ranges of numbers may stand."""
_STAGE = re.compile(rf"{STAGE}:([0-9]{{1,9}})", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class Allowed:
    """What an operator may be. ``grid``: if not None, exactly this one. ``whole``: axes (0 replicas, 1 + factor) that are not split.
    ``devices``: where tiles may be, ascending. ``mark``: the field of the mark that it has; None for any, or none, but those of
    ``unmarked``. ``stage``: the stage that it belongs to; None for any but ``other_stages``."""

    grid: Grid | None
    whole: frozenset[int]
    devices: tuple[int, ...]
    mark: str | None = None
    unmarked: frozenset[str] = frozenset()
    stage: int | None = None
    other_stages: frozenset[int] = frozenset()

    def allows_stage(self, stage: int) -> bool:
        """Whether it may belong to a stage."""
        return self.stage in (None, stage) and stage not in self.other_stages

    def kept(self, config: OpConfig) -> OpConfig:
        """The configuration with a mark that it may have; itself if that is so."""
        return config if self._allows_mark(config) else with_mark(config, 0 if self.mark is None else marks_of(self.mark)[0])

    def leaves(self, field: str) -> bool:
        """Whether it may have a mark of this field, or not."""
        return self.mark is None and field not in self.unmarked

    def _allows_mark(self, config: OpConfig) -> bool:
        field = MARKS[mark_of(config)].field
        return self.mark in (None, field) and field not in self.unmarked

    def allows(self, config: OpConfig) -> bool:
        """Whether a configuration obeys."""
        grid = grid_of(config)
        if not self._allows_mark(config):
            return False
        if self.grid is not None and grid != self.grid:
            return False
        return all(grid[axis] == 1 for axis in self.whole) and set(config.devices) <= set(self.devices)


def parse(graph: OperatorGraph, device_count: int, pins: Pairs, forbidden: Pairs) -> dict[str, Allowed]:
    """Operator name -> what it may be, for the operators with constraints. StrategyError in one line if the constraints cannot be met."""
    found: dict[str, Allowed] = {}
    everything = tuple(range(device_count))
    for field, pairs in (("pins", pins), ("forbidden", forbidden)):
        for pattern, spec in pairs:
            where = f"{asked(field)} {pattern}={spec}"
            operators = _matching(graph, pattern, where)
            split, devices = _divided(spec, field, where, device_count)
            for op, more in zip(operators, _said(graph, field, operators, split, devices, device_count, where), strict=True):
                found[op.name] = _both(found.get(op.name, Allowed(None, frozenset(), everything)), more, op, where)
    for op in graph.operators:
        if op.name in found:
            _check_possible(op, found[op.name], device_count)
    return found


def nearest(space: OperatorSpace, config: OpConfig) -> OpConfig:
    """The structured configuration of a space that is most like another one: its degrees first, then as many tiles as possible on the
    same device."""

    def distance(grid: Grid) -> tuple[float, Grid]:
        own = grid_of(config)
        return sum(abs(log2(a / b)) for a, b in zip(grid, own, strict=True)), grid

    def moved(devices: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        stay = sum(a == b for a, b in zip(devices, config.devices, strict=False))
        return -stay, -len({*devices} & {*config.devices}), devices

    grid = min(space.grids, key=distance)
    return config.placed(grid[1:], min(space.placements(grid), key=moved), grid[0])


def brought_inside(space: Space, strategy: Strategy) -> Strategy:
    """The strategy with the nearest allowed configuration for each operator that does not obey. The same object if all obey. StrategyError
    if an operator is in a stage that it may not be in."""
    wrong = out_of_stage(space, strategy)
    if wrong is not None:
        raise StrategyError(wrong)
    changed = {}
    for i, (op, own) in enumerate(zip(space.graph.operators, space.operators, strict=True)):
        config, allowed = strategy.operators[op.name], space.allowed[i] if space.allowed else None
        config = config if allowed is None else allowed.kept(config)
        if not space.allows(i, config):
            config = nearest(own, config)
        if config is not strategy.operators[op.name]:
            changed[op.name] = config
    return strategy.with_changes(changed) if changed else strategy


def out_of_stage(space: Space, strategy: Strategy) -> str | None:
    """The first operator that is in a stage which its constraints rule out, in one line; None if all obey."""
    if not any(own is not None and (own.stage is not None or own.other_stages) for own in space.allowed):
        return None
    chunks = chunks_of(space.graph, strategy.stages)
    stage_of = stages_of_chunks(max(chunks) + 1, strategy.schedule)
    for op, chunk, own in zip(space.graph.operators, chunks, space.allowed, strict=True):
        if own is not None and not own.allows_stage(stage_of[chunk]):
            wanted = f"another one than {stage_of[chunk]}" if own.stage is None else str(own.stage)
            found = f"operator {op.name!r} is in stage {stage_of[chunk]} of {max(stage_of) + 1}"
            return f"{found}; {asked('pins')} or {asked('forbidden')} wants {wanted}: start from a strategy with such stages"
    return None


def pairs_of(given: Mapping[str, str] | Iterable[tuple[str, str]]) -> Pairs:
    """A mapping, or pairs, as pairs."""
    return tuple(given.items()) if isinstance(given, Mapping) else tuple(given)


def _matching(graph: OperatorGraph, pattern: str, where: str) -> list[Operator]:
    names = {op.name for op in graph.operators if fnmatchcase(op.name, pattern)}
    if not names:
        names = {op.name for op in graph.operators if any(fnmatchcase(op.name, own) for own in _numbered(pattern, where))}
    found = [op for op in graph.operators if op.name in names]
    choosing = [op for op in found if settled_config(op, 1) is None]
    if found and not choosing:
        raise StrategyError(f"{where}: operator {found[0].name!r} has one configuration alone; expected one that has a choice")
    if not found:
        some = ", ".join(op.name for op in graph.operators[:3])
        raise StrategyError(
            f"{where}: no operator of model {graph.name!r} matches {short(pattern)}; expected a name or a pattern such as "
            f"{some} or '*' (soap-search --explain-graph lists all){did_you_mean(pattern, [op.name for op in graph.operators])}"
        )
    return choosing


def _numbered(pattern: str, where: str) -> list[str]:
    """The pattern with each number of its ranges: ``layers.0-1.*`` is ``layers.0.*`` and ``layers.1.*``."""
    texts = _NUMBERS.split(pattern)  # text, first, last, text, …
    ranges = [range(int(first), int(last) + 1) for first, last in zip(texts[1::3], texts[2::3], strict=True)]
    if prod(map(len, ranges)) > MOST_PATTERNS:
        raise StrategyError(f"{where}: {short(pattern)} stands for more than {MOST_PATTERNS} patterns; expected shorter ranges")
    found = [texts[0]]
    for own, text in zip(ranges, texts[3::3], strict=True):
        found = [f"{before}{number}{text}" for before in found for number in own]
    return found


def _divided(spec: str, field: str, where: str, device_count: int) -> tuple[list[str], tuple[int, ...] | None]:
    """The parts before the ``@``, and the devices behind it (None if there is no ``@``)."""
    before, found, behind = spec.partition("@")
    parts = [part.strip() for part in before.rstrip(", ").split(",")] if before.strip() else []
    expected = _SPEC if field == "pins" else _FORBIDDEN
    if not all(parts) or (not parts and not found):
        raise StrategyError(f"{where}: {expected}")
    if not found:
        return parts, None
    devices: set[int] = set()
    for item in behind.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise StrategyError(f"{where}: devices {short(behind)}: expected numbers and ranges such as 0-3 or 0,2,4")
        last = int(match[2] or match[1])
        if last >= device_count:
            raise StrategyError(f"{where}: device {last} does not exist; expected 0 to {device_count - 1} on this cluster")
        devices.update(range(int(match[1]), last + 1))
    return parts, tuple(sorted(devices))


def _said(
    graph: OperatorGraph,
    field: str,
    operators: Sequence[Operator],
    split: Sequence[str],
    devices: tuple[int, ...] | None,
    device_count: int,
    where: str,
) -> list[Allowed]:
    """What one constraint leaves to each of its operators."""
    everything = tuple(range(device_count))
    pins = field == "pins"
    told = [feature for feature in FEATURES if feature.field in split]
    stages = [int(match[1]) for name in split if (match := _STAGE.fullmatch(name))]
    if pins and len({*stages}) > 1:
        raise StrategyError(f"{where}: stages {stages[0]} and {stages[1]}; expected one stage")
    split = [name for name in split if name not in _MARKS and not _STAGE.fullmatch(name)]
    if pins and len(told) > 1:
        raise StrategyError(f"{where}: an operator has one mark at most; expected one of {', '.join(feature.field for feature in told)}")
    for feature in told if pins else ():
        for op in operators:
            why = feature.refusal(graph, op)
            if why is not None:
                raise StrategyError(f"{where}: operator {op.name!r} must not {feature.wanted}: {why}; name others")
    fields = [feature.field for feature in told]
    if pins:
        grids, mark = [_pinned(op, split, where) if split else None for op in operators], next(iter(fields), None)
        return [Allowed(grid, frozenset(), devices or everything, mark, stage=next(iter(stages), None)) for grid in grids]
    left = tuple(d for d in everything if devices is None or d not in devices)
    for name in split:
        if name != REPLICAS and not any(_axes(op, name) for op in operators):
            raise StrategyError(f"{where}: no factor {short(name)}; expected 'replicas' or one of {_factors(operators)}")
    axes = [frozenset(axis for name in split for axis in _axes(op, name)) for op in operators]
    return [Allowed(None, own, left, None, frozenset(fields), None, frozenset(stages)) for own in axes]


def _pinned(op: Operator, parts: Sequence[str], where: str) -> Grid:
    """The grid of ``sample:4,channel:2``."""
    degrees: dict[int, int] = {}
    for part in parts:
        name, _, number = part.partition(":")
        name, number = name.strip(), number.strip()
        if not re.fullmatch(r"[0-9]{1,9}", number, re.ASCII) or int(number) < 1:
            raise StrategyError(f"{where}: {short(part)}: {_SPEC}")
        axes = _axes(op, name)
        if len(axes) != 1:
            what = "no factor" if not axes else "several factors"
            raise StrategyError(f"{where}: operator {op.name!r} has {what} {short(name)}; expected 'replicas' or one of {_factors([op])}")
        if axes[0] in degrees:
            raise StrategyError(f"{where}: {short(name)} is given twice for operator {op.name!r}; name each factor once")
        degrees[axes[0]] = int(number)
    for axis, degree in degrees.items():
        if axis == 0:
            continue
        factor = op.factors[axis - 1]
        if degree > factor.size:
            raise StrategyError(
                f"{where}: degree {degree} of factor {factor.name!r} exceeds its size {factor.size} in {op.name!r}; lower the degree"
            )
        if degree > 1 and not op.partitionable:
            raise StrategyError(f"{where}: operator {op.name!r} has no rule and is kept whole; expected replicas only")
    return tuple(degrees.get(axis, 1) for axis in range(len(op.factors) + 1))


def _axes(op: Operator, name: str) -> list[int]:
    """Axes of this name, or of this kind if there are none: 0 for replicas, 1 + position for factors."""
    if name == REPLICAS:
        return [0]
    by_name = [1 + i for i, factor in enumerate(op.factors) if factor.name == name]
    return by_name or [1 + i for i, factor in enumerate(op.factors) if factor.kind.value == name]


def _factors(operators: Sequence[Operator]) -> str:
    """Names and kinds of factors, for error messages."""
    names = dict.fromkeys(f"{factor.name} ({factor.kind.value})" for op in operators for factor in op.factors)
    shown = list(names)[:8]
    return (", ".join(shown) + (" and others" if len(names) > len(shown) else "")) if shown else "(no factors)"


def _both(one: Allowed, other: Allowed, op: Operator, where: str) -> Allowed:
    """What two constraints leave together."""
    if one.grid is not None and other.grid is not None and one.grid != other.grid:
        raise StrategyError(f"{where}: operator {op.name!r} is pinned in two ways by {asked('pins')}, so nothing is left; drop one")
    devices = tuple(d for d in one.devices if d in other.devices)
    if not devices:
        raise StrategyError(f"{where}: nothing is left for operator {op.name!r}: no device that it may use; allow more devices")
    marks, unmarked = {one.mark, other.mark} - {None}, one.unmarked | other.unmarked
    wanted = [feature for feature in FEATURES if feature.field in marks]
    for feature in wanted:
        if feature.field in unmarked:
            both = f"{feature.wanted} by {asked('pins')} and not by {asked('forbidden')}"
            raise StrategyError(f"{where}: operator {op.name!r} is to {both}, so nothing is left; drop one")
    if len(wanted) > 1:
        both = " and to ".join(feature.wanted for feature in wanted)
        raise StrategyError(f"{where}: operator {op.name!r} is to {both}; drop one of {asked('pins')}")
    stage, forbidden = other.stage if one.stage is None else one.stage, one.other_stages | other.other_stages
    if stage in forbidden or (other.stage is not None and other.stage != stage):
        both = f"{asked('pins')} or {asked('forbidden')}"
        raise StrategyError(f"{where}: operator {op.name!r} has another stage by {both}, so nothing is left; drop one")
    grid, whole = one.grid if one.grid is not None else other.grid, one.whole | other.whole
    return Allowed(grid, whole, devices, next(iter(marks), None), unmarked, stage, forbidden)


def _check_possible(op: Operator, allowed: Allowed, device_count: int) -> None:
    if allowed.grid is None:
        return
    split = [axis for axis in allowed.whole if allowed.grid[axis] > 1]
    if split:
        name = op.factors[split[0] - 1].name if split[0] else REPLICAS
        pinned, forbidden = asked("pins"), asked("forbidden")
        raise StrategyError(
            f"nothing is left for operator {op.name!r}: {pinned} splits {name}, which {forbidden} rules out; drop one of them"
        )
    tiles = prod(allowed.grid)
    if tiles > len(allowed.devices):
        raise StrategyError(
            f"nothing is left for operator {op.name!r}: pinned to {tiles} tiles on {len(allowed.devices)} of {device_count} devices; "
            "expected at most one tile per device: lower the degrees or allow more devices"
        )
