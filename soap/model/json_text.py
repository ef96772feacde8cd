"""JSON from outside, read strictly, and dataclasses as JSON: their schema, what is written of them, what is read back and what is told.

All of that follows from a dataclass's fields: a field that is added to one needs its line there alone. ``Annotated`` adds what a type does
not say: ``Schema``, and ``Form`` where files have the value in another form than Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

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
def form_of(kind: Any) -> Form | None:
    """The form that ``Annotated`` gives a type, or its class has as ``json_form``."""
    found = next((own for own in getattr(kind, "__metadata__", ()) if isinstance(own, Form)), None)
    return found if found is not None or get_origin(kind) is Annotated else getattr(kind, "json_form", None)


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields by name, with what ``Annotated`` adds."""
    return get_type_hints(kind, include_extras=True)


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type: a dataclass is an object with its fields, of which those with defaults may be missing, and nothing else;
    ``Annotated`` adds the rest of a schema to that of its type."""
    origin, args = get_origin(kind), get_args(kind)
    if (form := form_of(kind)) is not None and form.schema is not None:
        return dict(form.schema())
    if origin is Annotated:
        return schema_of(args[0]) | {name: value for own in args[1:] if isinstance(own, Schema) for name, value in own.items()}
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
    """The value of a type from plain JSON values, as ``plain`` writes them. ValueError or TypeError if these are of something else: what
    only a schema says is not checked."""
    return reader_of(kind)(value)


@cache
def reader_of(kind: Any) -> Callable[[Any], Any]:
    """``read_as`` of one type."""
    origin, args = get_origin(kind), get_args(kind)
    if (form := form_of(kind)) is not None and form.read is not None:
        return form.read
    if origin is Annotated:
        return reader_of(args[0])
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_reader(kind)
    if origin in (Union, UnionType):
        some = reader_of(next(one for one in args if one is not NoneType))
        return lambda value: None if value is None else some(value)
    if origin is tuple and args[-1] is not Ellipsis:
        kinds = [reader_of(own) for own in args]
        return lambda value: tuple(read(own) for read, own in zip(kinds, _list(value), strict=True))
    if origin in (tuple, frozenset):
        each = reader_of(args[0])
        return lambda value: origin(map(each, _list(value)))
    if origin is Mapping:
        names, values = map(reader_of, args)
        return lambda value: {names(key): values(own) for key, own in _pairs(value)}
    if kind is Any or origin is Literal:  # which schemas check
        return lambda value: value
    return kind if isinstance(kind, type) and issubclass(kind, Enum) else lambda value: _scalar(kind, value)


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    readers: dict[str, Callable[[Any], Any]] = {}

    def read(value: Any) -> Any:
        if not readers:  # not before, as it may be one of its own fields
            readers.update({own.name: reader_of(hints_of(kind)[own.name]) for own in fields(kind)})
        if isinstance(value, dict):
            return kind(**{name: readers[name](own) for name, own in value.items()})
        return kind(*(one(own) for one, own in zip(readers.values(), _list(value), strict=True)))

    return read


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{short(value)}: expected a list")
    return value


def _pairs(value: Any) -> Iterable[Any]:
    return value.items() if isinstance(value, dict) else map(_list, _list(value))


def _scalar(kind: type, value: Any) -> Any:
    if kind is int and isinstance(value, float) and value.is_integer():  # JSON's 1.0 counts as a whole number
        return int(value)
    if type(value) not in ((int, float) if kind is float else (kind,)):
        raise ValueError(f"{short(value)}: expected {kind.__name__}")
    return value


def plain(value: Any, *, rows: bool = False) -> Any:
    """The reverse of ``read_as``. ``rows``: shorter, as a dataclass is the list of its fields' values, and a mapping that of its pairs."""
    if is_dataclass(value) and not isinstance(value, type):
        if (form := form_of(type(value))) is not None and form.write is not None:
            return form.write(value)
        own = {field.name: plain(getattr(value, field.name), rows=rows) for field in fields(value)}
        return list(own.values()) if rows else own
    if isinstance(value, Mapping):
        pairs = [[plain(name, rows=rows), plain(own, rows=rows)] for name, own in value.items()]
        return pairs if rows else dict(pairs)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list, frozenset)):
        return [plain(own, rows=rows) for own in (sorted(value) if isinstance(value, frozenset) else value)]
    return value


def validator(schema: Mapping[str, Any]) -> Draft202012Validator:
    """A validator of documents by a schema."""
    from jsonschema import Draft202012Validator  # slow to import, and needed for files only

    return Draft202012Validator(schema)


@cache
def validator_of(kind: Any) -> Draft202012Validator:
    """A validator of a type's plain values."""
    return validator(schema_of(kind))


def fault(by: Draft202012Validator, document: Any) -> tuple[str, str] | None:
    """The place and what is wrong there, each in one line, of the error that tells most; None if the document is valid."""
    from jsonschema.exceptions import best_match

    error = best_match(by.iter_errors(document))
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
            found.append(Option(own.name, known, default, form_of(known) or Form()))
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
