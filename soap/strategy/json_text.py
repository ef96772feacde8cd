"""Strict reading of JSON from outside: parsing, and dataclasses as schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from soap.strategy.mismatch import short

WORDS: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
"""Plain types in schemas."""


def parse_json(text: str) -> Any:
    """The value. ValueError if the text is not JSON, has a key twice, or has NaN or infinity; RecursionError if nested too deeply."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {short(twice)} occurs twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


class Schema(dict[str, Any]):
    """What ``Annotated`` adds to a type's schema."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type: a dataclass is an object with its fields, of which those with defaults may be missing, and nothing else;
    ``Annotated`` adds the rest of a schema to that of its type."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return {**schema_of(args[0]), **args[1]}
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        required = [own.name for own in fields(kind) if own.default is MISSING and own.default_factory is MISSING]
        return {**record(**{own.name: hints[own.name] for own in fields(kind)}), "required": required}
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(one) for one in args]}
    if origin is tuple and args[-1] is Ellipsis:
        return {"type": "array", "items": schema_of(args[0])}
    if origin is tuple:
        return {"type": "array", "prefixItems": [schema_of(one) for one in args], "minItems": len(args), "maxItems": len(args)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": schema_of(args[1])}
    return {} if kind is Any else {"type": WORDS[kind]}


def record(**kinds: Any) -> Schema:
    """The schema of an object with just these keys, of these types."""
    properties = {name: schema_of(kind) for name, kind in kinds.items()}
    return Schema(type="object", properties=properties, required=list(kinds), additionalProperties=False)


def read_as(kind: Any, value: Any) -> Any:
    """The value of a type from plain JSON values that are valid by ``schema_of`` it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return read_as(args[0], value)
    if origin in (Union, UnionType):
        return None if value is None else read_as(next(one for one in args if one is not NoneType), value)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind, include_extras=True)
        return kind(**{name: read_as(hints[name], own) for name, own in value.items()})
    if origin is tuple:
        kinds = (args[0],) * len(value) if args[-1] is Ellipsis else args
        return tuple(map(read_as, kinds, value))
    if origin is Mapping:
        return {name: read_as(args[1], own) for name, own in value.items()}
    return int(value) if kind is int else value
