"""JSON from outside, read strictly, and dataclasses as JSON: their schema, what is written of them, what is read back and what is told.

All of that follows from a dataclass's fields: a field that is added to one needs its line there alone. ``Annotated`` adds what a type does
not say: ``Schema``, and ``Form`` where files have the value in another form than Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

WORDS: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
"""Plain types in schemas."""


def one_line(text: str, most: int = 160) -> str:
    """Text from outside, made safe for a message: no line breaks or control characters, at most ``most`` characters."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text[: 4 * most].split()))
    return line if len(line) <= most else line[: most - 1] + "…"


def short(value: object) -> str:
    """A value from outside, as messages show it: short, and of a list or object only the type."""
    return f"a {type(value).__name__}" if isinstance(value, (dict, list)) else one_line(repr(value), 60)


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


def _as_told(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Form:
    """How files have a value in another form than Python. ``schema``: the whole JSON schema; None: the type's. ``read``, ``write``: from
    and to plain JSON values; None: as the type says. ``say``: the written value for people."""

    schema: Callable[[], Mapping[str, Any]] | None = None
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None
    say: Callable[[Any], str] = _as_told


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields by name, with what ``Annotated`` adds."""
    return get_type_hints(kind, include_extras=True)


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type: a dataclass is an object with its fields, of which those with defaults may be missing, and nothing else;
    ``Annotated`` adds the rest of a schema to that of its type."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        whole = next((own.schema for own in args[1:] if isinstance(own, Form) and own.schema is not None), None)
        found = schema_of(args[0]) if whole is None else dict(whole())
        return found | {name: value for own in args[1:] if isinstance(own, Schema) for name, value in own.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        hints = hints_of(kind)
        optional = [own.name for own in fields(kind) if own.default is not MISSING or own.default_factory is not MISSING]
        return record(optional, **{own.name: hints[own.name] for own in fields(kind)})
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(one) for one in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple and args[-1] is Ellipsis:
        return {"type": "array", "items": schema_of(args[0])}
    if origin is tuple:
        return {"type": "array", "prefixItems": [schema_of(one) for one in args], "minItems": len(args), "maxItems": len(args)}
    if origin is Mapping:
        names = schema_of(args[0])
        own = {} if names == {"type": "string"} else {"propertyNames": names}
        return {"type": "object", **own, "additionalProperties": schema_of(args[1])}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [one.value for one in kind]}
    return {} if kind is Any else {"type": WORDS[kind]}


def record(optional: Collection[str] = (), /, **kinds: Any) -> Schema:
    """The schema of an object with just these keys, of these types. ``optional``: keys that may be missing."""
    properties = {name: schema_of(kind) for name, kind in kinds.items()}
    required = [name for name in kinds if name not in optional]
    return Schema(type="object", properties=properties, required=required, additionalProperties=False)


def read_as(kind: Any, value: Any) -> Any:
    """The value of a type from plain JSON values that are valid by ``schema_of`` it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        read = next((own.read for own in args[1:] if isinstance(own, Form) and own.read is not None), None)
        return read_as(args[0], value) if read is None else read(value)
    if origin in (Union, UnionType):
        return None if value is None else read_as(next(one for one in args if one is not NoneType), value)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = hints_of(kind)
        return kind(**{name: read_as(hints[name], own) for name, own in value.items()})
    if origin is tuple:
        kinds = (args[0],) * len(value) if args[-1] is Ellipsis else args
        return tuple(map(read_as, kinds, value))
    if origin is Mapping:
        return {name: read_as(args[1], own) for name, own in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return int(value) if kind is int else value


def plain(value: Any) -> Any:
    """The reverse of ``read_as``: the plain JSON values of dataclasses, tuples and mappings."""
    if is_dataclass(value):
        return {own.name: plain(getattr(value, own.name)) for own in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(own) for name, own in value.items()}
    return [plain(own) for own in value] if isinstance(value, (tuple, list)) else value


def fault(schema: Mapping[str, Any], document: Any) -> tuple[str, str] | None:
    """The place and what is wrong there, each in one line, of the error that tells most; None if the document is valid."""
    from jsonschema import Draft202012Validator  # slow to import, and needed for files only
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema).iter_errors(document))
    if error is None:
        return None
    return "/".join(one_line(str(part), 60) for part in error.absolute_path), one_line(error.message)


@dataclass(frozen=True)
class Option:
    """A field of a dataclass that has a default, which files leave out. ``kind``: its type, without None where that is the default."""

    name: str
    kind: Any
    default: Any
    form: Form


@cache
def options_of(kind: type) -> tuple[Option, ...]:
    """The fields of a dataclass that have a default, in their order."""
    hints, found = hints_of(kind), []
    for own in fields(kind):
        default = own.default_factory() if own.default_factory is not MISSING else own.default
        if default is not MISSING:
            known = hints[own.name]
            if default is None and NoneType in get_args(known):
                (known,) = (one for one in get_args(known) if one is not NoneType)
            form = next((one for one in getattr(known, "__metadata__", ()) if isinstance(one, Form)), Form())
            found.append(Option(own.name, known, default, form))
    return tuple(found)


def option_kinds(kind: type, without: Collection[str] = ()) -> dict[str, Any]:
    """The types of ``options_of`` a dataclass by name."""
    return {own.name: own.kind for own in options_of(kind) if own.name not in without}


def written_options(value: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, as plain JSON values by name."""
    kind: Any = type(value)
    found = {}
    for own in options_of(kind):
        given = getattr(value, own.name)
        if own.name not in without and given != own.default:
            found[own.name] = plain(given) if own.form.write is None else own.form.write(given)
    return found


def read_options(kind: type, entry: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """The reverse of ``written_options``, as keyword arguments: the values of these fields in an entry that may have more."""
    return {own.name: read_as(own.kind, entry[own.name]) for own in options_of(kind) if own.name in entry and own.name not in without}


def option_texts(kind: type, values: Mapping[str, Any], mark: str = " ", without: Collection[str] = ()) -> list[str]:
    """What people are told of written options, such as ``replicas:2``, in the order of the fields. ``mark``: between name and value."""
    told = [(own.name, own.form.say(values[own.name])) for own in options_of(kind) if own.name in values and own.name not in without]
    return [f"{name}{' ' if ':' in said or ' ' in said else mark}{said}" for name, said in told]
