"""The user's constraints: ``--pin`` fixes how operators are split or where they run, ``--forbid`` rules something out.

A constraint is a pattern of operator names (``fnmatch``) and a specification for these operators:

- pin: ``sample:4``, ``sample:4,channel:2`` or ``replicas:2`` (factors by name or kind; factors that are not named are not split). With
  ``@0-3`` or ``@0,2`` behind it the devices are fixed as well; ``@0-3`` alone fixes only the devices. The search decides which tile runs on
  which of them.
- forbid: factors by name or kind that are never split, ``replicas``, and ``@3``: devices that are never used.
- ``recompute`` among the names: operators are recomputed (pin), or never are (forbid).

All constraints of an operator hold together. They leave an ``Allowed``, from which its ``OperatorSpace`` is made, so the proposals stay
inside. ``brought_inside`` changes strategies from elsewhere (starts, references) as little as it can.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import log2, prod

from soap.errors import StrategyError
from soap.model.graph import Operator, OperatorGraph
from soap.search.space import Grid, OperatorSpace, Space, grid_of
from soap.strategy.config import OpConfig, Strategy, settled_config
from soap.strategy.mismatch import short
from soap.strategy.recomputation import refusal

RECOMPUTE = "recompute"
"""Stands for recomputation where a factor could be named."""
REPLICAS = "replicas"
"""Name of the axis of replicas, which is no factor."""
Pairs = Sequence[tuple[str, str]]
"""(pattern of operator names, what it says of these operators)."""

_SPEC = (
    "expected FACTOR:DEGREE such as sample:4 or sample:4,replicas:2, with @0-3 behind it for the devices, or @0-3 alone; 'recompute' by "
    "itself or among the factors"
)
_FORBIDDEN = "expected names or kinds of factors, 'replicas', 'recompute', or devices as @3, such as reduction or attribute,@3"
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class Allowed:
    """What an operator may be. ``grid``: if not None, exactly this one. ``whole``: axes (0 replicas, 1 + factor) that are not split.
    ``devices``: where tiles may be, ascending. ``recompute``: whether it is recomputed; None: it may be or not."""

    grid: Grid | None
    whole: frozenset[int]
    devices: tuple[int, ...]
    recompute: bool | None = None

    def allows(self, config: OpConfig) -> bool:
        """Whether a configuration obeys."""
        grid = grid_of(config)
        if self.recompute not in (None, bool(config.recompute)):
            return False
        if self.grid is not None and grid != self.grid:
            return False
        return all(grid[axis] == 1 for axis in self.whole) and set(config.devices) <= set(self.devices)


def parse(graph: OperatorGraph, device_count: int, pins: Pairs, forbidden: Pairs) -> dict[str, Allowed]:
    """Operator name -> what it may be, for the operators with constraints. StrategyError in one line if the constraints cannot be met."""
    found: dict[str, Allowed] = {}
    everything = tuple(range(device_count))
    for option, pairs in (("--pin", pins), ("--forbid", forbidden)):
        for pattern, spec in pairs:
            where = f"{option} {pattern}={spec}"
            operators = _matching(graph, pattern, where)
            split, devices = _divided(spec, where, device_count)
            for op, more in zip(operators, _said(graph, option, operators, split, devices, device_count, where), strict=True):
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
    """The strategy with the nearest allowed configuration for each operator that does not obey. The same object if all obey."""
    changed = {}
    for i, (op, own) in enumerate(zip(space.graph.operators, space.operators, strict=True)):
        config, allowed = strategy.operators[op.name], space.allowed[i] if space.allowed else None
        if allowed is not None and allowed.recompute not in (None, bool(config.recompute)):
            config = replace(config, recompute=int(bool(allowed.recompute)))
        if not space.allows(i, config):
            config = nearest(own, config)
        if config is not strategy.operators[op.name]:
            changed[op.name] = config
    return strategy.with_changes(changed) if changed else strategy


def pairs_of(given: Mapping[str, str] | Iterable[tuple[str, str]]) -> Pairs:
    """A mapping, or pairs, as pairs."""
    return tuple(given.items()) if isinstance(given, Mapping) else tuple(given)


def _matching(graph: OperatorGraph, pattern: str, where: str) -> list[Operator]:
    found = [op for op in graph.operators if fnmatchcase(op.name, pattern)]
    choosing = [op for op in found if settled_config(op, 1) is None]
    if found and not choosing:
        raise StrategyError(f"{where}: operator {found[0].name!r} has one configuration alone; expected one that has a choice")
    if not found:
        some = ", ".join(op.name for op in graph.operators[:3])
        raise StrategyError(
            f"{where}: no operator of model {graph.name!r} matches {short(pattern)}; expected a name or a pattern such as "
            f"{some} or '*' (soap-search --explain-graph lists all)"
        )
    return choosing


def _divided(spec: str, where: str, device_count: int) -> tuple[list[str], tuple[int, ...] | None]:
    """The parts before the ``@``, and the devices behind it (None if there is no ``@``)."""
    before, found, behind = spec.partition("@")
    parts = [part.strip() for part in before.rstrip(", ").split(",")] if before.strip() else []
    expected = _SPEC if where.startswith("--pin") else _FORBIDDEN
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
    option: str,
    operators: Sequence[Operator],
    split: Sequence[str],
    devices: tuple[int, ...] | None,
    device_count: int,
    where: str,
) -> list[Allowed]:
    """What one constraint leaves to each of its operators."""
    everything = tuple(range(device_count))
    recompute = (option == "--pin") if RECOMPUTE in split else None
    split = [name for name in split if name != RECOMPUTE]
    for op in operators if recompute else ():
        why = refusal(graph, op)
        if why is not None:
            raise StrategyError(f"{where}: operator {op.name!r} must not be recomputed: {why}; name others")
    if option == "--pin":
        grids = [_pinned(op, split, where) if split else None for op in operators]
        return [Allowed(grid, frozenset(), devices or everything, recompute) for grid in grids]
    left = tuple(d for d in everything if devices is None or d not in devices)
    for name in split:
        if name != REPLICAS and not any(_axes(op, name) for op in operators):
            raise StrategyError(f"{where}: no factor {short(name)}; expected 'replicas' or one of {_factors(operators)}")
    return [Allowed(None, frozenset(axis for name in split for axis in _axes(op, name)), left, recompute) for op in operators]


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
        raise StrategyError(f"{where}: operator {op.name!r} is pinned differently by another --pin, so nothing is left; drop one")
    devices = tuple(d for d in one.devices if d in other.devices)
    if not devices:
        raise StrategyError(f"{where}: nothing is left for operator {op.name!r}: no device that it may use; allow more devices")
    if None not in (one.recompute, other.recompute) and one.recompute != other.recompute:
        raise StrategyError(f"{where}: operator {op.name!r} is to be recomputed by --pin and not by --forbid, so nothing is left; drop one")
    recompute = other.recompute if one.recompute is None else one.recompute
    return Allowed(one.grid if one.grid is not None else other.grid, one.whole | other.whole, devices, recompute)


def _check_possible(op: Operator, allowed: Allowed, device_count: int) -> None:
    if allowed.grid is None:
        return
    split = [axis for axis in allowed.whole if allowed.grid[axis] > 1]
    if split:
        name = op.factors[split[0] - 1].name if split[0] else REPLICAS
        raise StrategyError(f"nothing is left for operator {op.name!r}: --pin splits {name}, which --forbid rules out; drop one of them")
    tiles = prod(allowed.grid)
    if tiles > len(allowed.devices):
        raise StrategyError(
            f"nothing is left for operator {op.name!r}: pinned to {tiles} tiles on {len(allowed.devices)} of {device_count} devices; "
            "expected at most one tile per device: lower the degrees or allow more devices"
        )
