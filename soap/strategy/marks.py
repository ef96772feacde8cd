"""Marks of operators: fields of ``OpConfig`` that add tasks and memory to an operator's tiles. An operator has one mark at most.

Such a field is an entry of ``FEATURES``, and has a module of its name in ``soap.plan.marks``, which says what it adds, and if ranks do
something for it one in ``soap.runtime.marks``. Files, the search, the simulator and ranks take it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from soap.errors import StrategyError
from soap.model.graph import KEEP_STATE, NEXT_STATE, Operator, OperatorGraph
from soap.strategy import offloading, recomputation

if TYPE_CHECKING:
    from soap.strategy.config import OpConfig, Strategy

C = TypeVar("C", bound="OpConfig")


@dataclass(frozen=True, slots=True)
class Feature:
    """``field``: of ``OpConfig``. ``values``: of it, the default first. ``said``: what operators are with each of the others. ``wanted``:
    what an operator is marked to do or be; ``do``: what several do. ``refusal``: why an operator must not have it; None if it may.
    ``repeats``: whether operators that run once for all micro-batches, or need several, must not have it."""

    field: str
    values: tuple[Any, ...]
    said: tuple[str, ...]
    wanted: str
    do: str
    refusal: Callable[[OperatorGraph, Operator], str | None]
    repeats: bool = False


FEATURES = (
    Feature(
        "recompute", recomputation.ALL_LEVELS,
        ("recomputed", "recomputed but for products", *recomputation.GATHERING_SAID), "be recomputed", "are recomputed",
        recomputation.refusal, repeats=True,
    ),
    Feature("offload", (False, True), ("offloaded",), "offload what it keeps", "offload what they keep", offloading.refusal),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mark:
    """A value of a feature's field, or of none the lack of a mark."""

    feature: Feature | None = None
    value: Any = None

    @property
    def field(self) -> str:
        """Its field's name."""
        return "" if self.feature is None else self.feature.field

    @property
    def said(self) -> str:
        """What operators are that have it."""
        return "" if self.feature is None else self.feature.said[self.feature.values.index(self.value) - 1]


MARKS: tuple[Mark, ...] = (Mark(), *(Mark(feature, value) for feature in FEATURES for value in feature.values[1:]))
"""All of them; their places are their numbers."""
_NUMBERS = {(mark.field, mark.value): number for number, mark in enumerate(MARKS)}
_VALUES = attrgetter(*(feature.field for feature in FEATURES))
_UNMARKED = tuple(feature.values[0] for feature in FEATURES)


def marks_of(field: str) -> tuple[int, ...]:
    """The marks of a field, one for each of its values but the default."""
    return tuple(number for number, mark in enumerate(MARKS) if mark.field == field)


OFFLOADED = marks_of("offload")[0]


def are_marked(strategy: Strategy, field: str) -> list[str]:
    """The names of the operators that have a mark of this field."""
    own = marks_of(field)
    return [name for name, config in strategy.operators.items() if mark_of(config) in own]


def _given(config: OpConfig) -> Iterator[tuple[Feature, Any]]:
    """The features of which a configuration has more than the default, with the values."""
    own = ((feature, getattr(config, feature.field)) for feature in FEATURES)
    return ((feature, value) for feature, value in own if value != feature.values[0])


def mark_of(config: OpConfig) -> int:
    """The mark of a configuration; 0 if it has none."""
    number = _BY_VALUES.get(_VALUES(config))
    return next(_NUMBERS[feature.field, value] for feature, value in _given(config)) if number is None else number


def fields_of(mark: int) -> dict[str, Any]:
    """The values of all features' fields with a mark."""
    return {feature.field: MARKS[mark].value if MARKS[mark].feature is feature else feature.values[0] for feature in FEATURES}


_BY_VALUES = {tuple(fields_of(number).values()): number for number in range(len(MARKS))}


def with_mark(config: C, mark: int) -> C:
    """The configuration with this mark; itself if it has it already."""
    return config if mark_of(config) == mark else replace(config, **fields_of(mark))


def with_value(config: C, field: str, value: object) -> C:
    """The configuration with this value of a feature's field; if that is not the default, without any other mark."""
    changes: dict[str, Any] = {field: value}
    number = _NUMBERS.get((field, value), 0)
    return with_mark(config, number) if number else replace(config, **changes)


def with_each_mark(strategy: Strategy, marks: Mapping[str, int]) -> Strategy:
    """The strategy in which these operators have these marks."""
    return strategy.with_changes({name: with_mark(strategy.operators[name], mark) for name, mark in marks.items()})


def require_one(config: OpConfig) -> None:
    """StrategyError if a field has no value that it may have, or several have more than their default."""
    found = []
    for feature, value in () if _VALUES(config) == _UNMARKED else _given(config):
        if value not in feature.values:
            raise StrategyError(f"{feature.field} {value!r}: expected one of {', '.join(map(str, feature.values))}")
        found.append(feature.field)
    if len(found) > 1:
        raise StrategyError(f"{' with '.join(found)}: an operator has one mark at most; expected one of these")


def require_allowed(graph: OperatorGraph, op: Operator, config: OpConfig) -> None:
    """StrategyError if an operator must not have its mark."""
    feature = MARKS[mark_of(config)].feature
    why = None if feature is None else feature.refusal(graph, op)
    if feature is not None and why is not None:
        raise StrategyError(f"operator {op.name!r} is marked to {feature.wanted}, but {why}; expected {feature.field} false")


def require_unmarked(graph: OperatorGraph, strategy: Strategy, why_no_state: str) -> None:
    """StrategyError if an operator has a mark, or keeps a state from step to step, neither of which workers beside servers do."""
    for op in graph.operators:
        if op.kind in (NEXT_STATE, KEEP_STATE):
            raise StrategyError(
                f"operator {op.name!r} keeps buffers from step to step (batch norm?); expected a model without: {why_no_state}"
            )
        if (feature := MARKS[mark_of(strategy.operators[op.name])].feature) is not None:
            raise StrategyError(f"operator {op.name!r} is marked to {feature.wanted}; expected no mark on workers")
