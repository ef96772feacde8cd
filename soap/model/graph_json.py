"""Operator graphs as plain JSON values and back: for files that this program itself writes and reads again (``api.kept_graphs``).

A dataclass is the list of its fields' values, a mapping the list of its pairs. What is read is checked against the fields' types, so a file
that holds something else is an error rather than a wrong graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from soap.model.graph import OperatorGraph


def graph_values(graph: OperatorGraph) -> Any:
    """The graph as JSON values; looks into all of it, its footprints too."""
    return _written(graph)


def graph_from(values: Any) -> OperatorGraph:
    """The graph of ``graph_values``. ValueError if these are the values of something else; ModelError if the graph is not sound."""
    graph: OperatorGraph = _reader(OperatorGraph)(values)
    return graph


def _written(value: Any) -> Any:
    if is_dataclass(value):
        return [_written(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, Mapping):
        return [[_written(key), _written(own)] for key, own in value.items()]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, frozenset)):
        return [_written(own) for own in (sorted(value) if isinstance(value, frozenset) else value)]
    return value


Reader = Callable[[Any], Any]


@cache
def _reader(kind: Any) -> Reader:
    """What reads a value of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin is UnionType:
        (some,) = (own for own in arguments if own is not NoneType)
        return lambda value: None if value is None else _reader(some)(value)
    if origin is tuple and arguments[-1] is Ellipsis:
        return lambda value: tuple(map(_reader(arguments[0]), _list(value)))
    if origin is tuple:
        return lambda value: tuple(_reader(own)(one) for own, one in zip(arguments, _list(value), strict=True))
    if origin is frozenset:
        return lambda value: frozenset(map(_reader(arguments[0]), _list(value)))
    if origin is Mapping:
        return lambda value: {_reader(arguments[0])(key): _reader(arguments[1])(own) for key, own in map(_list, _list(value))}
    if issubclass(kind, Enum):
        return lambda value: kind(value)
    return lambda value: _scalar(kind, value)


def _dataclass_reader(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    kinds = [hints[field.name] for field in fields(kind)]
    return lambda value: kind(*(_reader(own)(one) for own, one in zip(kinds, _list(value), strict=True)))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{str(value)[:80]!r}: expected a list")
    return value


def _scalar(kind: type, value: Any) -> Any:
    allowed = (int, float) if kind is float else (kind,)
    if type(value) not in allowed:
        raise ValueError(f"{str(value)[:80]!r}: expected {kind.__name__}")
    return value
