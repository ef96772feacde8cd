"""JSON from outside, read strictly, and dataclasses as JSON: their schema, what is written of them, what is read back and what is told.

All of that follows from a dataclass's fields: a field that is added to one needs its line there alone. ``Annotated`` adds what a type does
not say: ``Schema``, and ``Form`` where files have the value in another form than Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import repeat
from operator import eq, ge, gt, le
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from soap.errors import SoapError, one_of

TYPES: Mapping[Any, tuple[str, str]] = {
    str: ("string", "text"), int: ("integer", "a whole number"), float: ("number", "a number"), bool: ("boolean", "true or false"),
    NoneType: ("null", "nothing"),
}  # fmt: skip
"""Plain types in schemas and in messages."""


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


@dataclass(frozen=True, eq=False)
class Record:
    """An object with just these keys, of these types; stands where types do. ``optional``: keys that may be missing."""

    kinds: Mapping[str, Any]
    optional: Collection[str]


def record(optional: Collection[str] = (), /, **kinds: Any) -> Any:
    """A ``Record``."""
    return Record(kinds, optional)


def _record_of(kind: type) -> Record:
    """A dataclass as a record."""
    optional = [own.name for own in fields(kind) if own.default is not MISSING or own.default_factory is not MISSING]
    hints = get_type_hints(kind, include_extras=True)
    return Record({own.name: hints[own.name] for own in fields(kind)}, optional)


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type: a dataclass is an object with its fields, of which those with defaults may be missing, and nothing else;
    ``Annotated`` adds the rest of a schema to that of its type."""
    origin, args = get_origin(kind), get_args(kind)
    if (form := form_of(kind)) is not None and form.schema is not None:
        return dict(form.schema())
    if origin is Annotated:
        shape, limits = _annotated(args)
        return schema_of(shape) | limits
    if isinstance(kind, Record):
        required = [name for name in kind.kinds if name not in kind.optional]
        known = {name: schema_of(own) for name, own in kind.kinds.items()}
        return {"type": "object", "properties": known, "required": required, "additionalProperties": False}
    if is_dataclass(kind) and isinstance(kind, type):
        return schema_of(_record_of(kind))
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(one) for one in args]}
    if origin is tuple and args[-1] is not Ellipsis:
        return {"type": "array", "prefixItems": [schema_of(one) for one in args], "minItems": len(args), "maxItems": len(args)}
    if origin in (tuple, frozenset):
        return {"type": "array", "items": schema_of(args[0])}
    if origin is Mapping:
        names = schema_of(args[0])
        own = {} if names == {"type": "string"} else {"propertyNames": names}
        return {"type": "object", **own, "additionalProperties": schema_of(args[1])}
    if origin is Literal:
        return {"enum": list(args)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [one.value for one in kind]}
    return {} if kind is Any else {"type": TYPES[kind][0]}


def _annotated(args: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """What ``Annotated`` has: a type, or the record that stands beside it, and the rest of its schema."""
    shape = next((own for own in args[1:] if isinstance(own, Record)), args[0])
    return shape, {name: value for own in args[1:] if isinstance(own, Schema) for name, value in own.items()}


class Unfit(ValueError):
    """A value that is none of its type: what was found, and what was expected. ``path``: keys and positions that lead to it."""

    def __init__(self, said: str, *path: str | int) -> None:
        super().__init__(said)
        self.path = path

    @property
    def place(self) -> str:
        """The path in one line; empty for the whole."""
        return "/".join(one_line(str(part), 60) for part in self.path)


def read_as(kind: Any, value: Any) -> Any:
    """The value of a type from plain JSON values, as ``plain`` writes them; a key that is left out has its default. ``Unfit`` unless it is
    valid by ``schema_of`` the type."""
    return reader_of(kind)(value)


Reader = Callable[[Any], Any]


@cache
def reader_of(kind: Any) -> Reader:
    """``read_as`` of one type."""
    origin, args = get_origin(kind), get_args(kind)
    if (form := form_of(kind)) is not None and form.read is not None:
        return form.read
    if origin is Annotated:
        return _limited(*_annotated(args))
    if isinstance(kind, Record) or (is_dataclass(kind) and isinstance(kind, type)):
        return _object_reader(kind)
    if origin in (Union, UnionType):
        return _union_reader(args)
    if origin is tuple and args[-1] is not Ellipsis:
        return _row_reader(args, len(args))
    if origin in (tuple, frozenset):
        each = reader_of(args[0])
        return lambda value: origin(_each(repeat(each), _list(value)))
    if origin is Mapping:
        return _mapping_reader(args[0], *map(reader_of, args))
    if kind is Any:
        return lambda value: value
    known = {own: own for own in args} if origin is Literal else {own.value: own for own in kind} if issubclass(kind, Enum) else None
    return (lambda value: _scalar(kind, value)) if known is None else lambda value: _one_of(known, value)


def _row_reader(kinds: Sequence[Any], least: int) -> Reader:
    """The reader of a list of so many values at least, of these types in turn."""
    readers = [reader_of(own) for own in kinds]

    def read(value: Any) -> Any:
        if not least <= len(_list(value)) <= len(readers):
            raise unfit(value, f"a list of {least}" + f" to {len(readers)}" * (least < len(readers)))
        return tuple(_each(readers, value))

    return read


def _each(readers: Iterable[Reader], values: Sequence[Any]) -> list[Any]:
    """What the readers make of the values, one each."""
    try:
        return [read(own) for read, own in zip(readers, values, strict=False)]
    except Unfit:
        pairs = [(place, read, own) for place, (read, own) in enumerate(zip(readers, values, strict=False))]
    return [located(place, read, own) for place, read, own in pairs]


def located(name: str | int, read: Reader, value: Any) -> Any:
    """What the reader makes of the value at this key or position."""
    try:
        return read(value)
    except Unfit as fault:
        raise Unfit(str(fault), name, *fault.path) from None
    except SoapError as cause:
        raise Unfit(str(cause), name) from None


def _object_reader(kind: Any) -> Reader:
    readers, optional = dict[str, Reader](), set[str]()

    def read(value: Any) -> Any:
        if not readers:  # not before, as it may be one of its own fields
            own = kind if isinstance(kind, Record) else _record_of(kind)
            readers.update({name: reader_of(one) for name, one in own.kinds.items()})
            optional.update(own.optional)
        if isinstance(kind, Record):
            return read_each(readers, value, optional)
        if isinstance(value, list):
            return kind(*_each(readers.values(), _list(value, len(readers))))
        return kind(**read_each(readers, value, optional))

    return read


def read_each(readers: Mapping[str, Reader], entry: Any, optional: Collection[str] = ()) -> dict[str, Any]:
    """What readers make of the values of an object with just these keys."""
    if not isinstance(entry, dict):
        raise unfit(entry, "an object")
    for name in entry:
        if name not in readers:
            raise Unfit(f"unknown key {short(name)}; expected {one_of(str(name), readers)}")
    for name in readers:
        if name not in entry and name not in optional:
            raise Unfit(f"key {name!r} is missing; expected it")
    return {name: located(name, readers[name], own) for name, own in entry.items()}


def _mapping_reader(kind: Any, names: Reader, values: Reader) -> Reader:
    """``kind``: of the keys."""
    texts = kind is str or (get_origin(kind) is Annotated and get_args(kind)[0] is str)

    def read(value: Any) -> Any:
        if not texts and value != {}:  # other keys stand in pairs
            return dict(_each(repeat(lambda pair: (names(pair[0]), values(pair[1]))), [_list(pair, 2) for pair in _list(value)]))
        if not isinstance(value, dict):
            raise unfit(value, "an object")
        return {located(key, names, key): located(key, values, own) for key, own in value.items()}

    return read


def _union_reader(kinds: Sequence[Any]) -> Reader:
    readers = [reader_of(one) for one in kinds if one is not NoneType]

    def read(value: Any) -> Any:
        if value is None and NoneType in kinds:
            return None
        if len(readers) == 1:
            return readers[0](value)
        said = []
        for one in readers:
            try:
                return one(value)
            except Unfit as fault:
                said.append(str(fault).partition("; expected ")[2])
        raise unfit(value, " or ".join(said))

    return read


def unfit(value: Any, expected: str) -> Unfit:
    """The error for a value of which something else was expected."""
    return Unfit(f"{short(value)}; expected {expected}")


def _list(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise unfit(value, "a list" if length is None else f"a list of {length}")
    return value


def _scalar(kind: type, value: Any) -> Any:
    if kind is int and isinstance(value, float) and value.is_integer():  # JSON's 1.0 counts as a whole number
        return int(value)
    if type(value) not in ((int, float) if kind is float else (kind,)):
        raise unfit(value, TYPES[kind][1])
    return value


def _one_of(known: Mapping[Any, Any], value: Any) -> Any:
    if not isinstance(value, str) or value not in known:
        raise unfit(value, one_of(value if isinstance(value, str) else "", known))
    return known[value]


CHECKS: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": ge, "maximum": le, "exclusiveMinimum": gt, "const": eq, "enum": lambda value, known: value in known,
    "pattern": lambda value, pattern: re.search(pattern, value) is not None,
    "uniqueItems": lambda value, unique: not unique or len({*value}) == len(value),
}  # fmt: skip
"""Words of schemas that say more than a type -> whether a value is within that limit."""
LENGTHS: Mapping[str, Callable[[int, int], bool]] = {"minLength": ge, "maxLength": le, "minItems": ge, "maxItems": le}
"""Those of lengths, which are looked at before anything is read."""


def _limited(kind: Any, limits: Mapping[str, Any]) -> Reader:
    """A type's reader, within the limits of a schema."""
    args, expected = get_args(kind), _expected(kind, limits)
    row = get_origin(kind) is tuple and args[-1] is not Ellipsis and "minItems" in limits
    own = _row_reader(args, limits["minItems"]) if row else reader_of(kind)
    checks = [(CHECKS[name], limits[name]) for name in limits if name in CHECKS]

    lengths = [(LENGTHS[name], limits[name]) for name in limits if name in LENGTHS]

    def read(value: Any) -> Any:
        if isinstance(value, (str, list)) and not all(check(len(value), limit) for check, limit in lengths):
            raise Unfit(f"{len(value)} entries; expected {expected}") if isinstance(value, list) else unfit(value, expected)
        try:
            found = own(value)
        except Unfit as fault:
            raise fault if fault.path or kind is Any else unfit(value, expected) from None
        if not all(check(found, limit) for check, limit in checks):
            raise unfit(value, expected)
        return found

    return read if checks or lengths else own


def _expected(kind: Any, limits: Mapping[str, Any]) -> str:
    """The limits in words: ``description``, if there is one."""
    if "description" in limits:
        return str(limits["description"])
    if "enum" in limits or "const" in limits:
        return f"one of {', '.join(map(str, limits.get('enum', [limits.get('const')])))}"
    said = [TYPES[kind][1] if kind in TYPES else "an object" if get_origin(kind) is Mapping else "a list"]
    said += ["above"] * ("exclusiveMinimum" in limits)
    for words, names in (("from", "minimum exclusiveMinimum"), ("to", "maximum"), ("of at most", "maxLength maxItems")):
        said += [f"{words} {limits[name]}" for name in names.split() if name in limits]
    return " ".join(said).replace("above from", "above") + " characters" * ("maxLength" in limits)


def plain(value: Any, *, rows: bool = False) -> Any:
    """The reverse of ``read_as``. ``rows``: shorter, as a dataclass is the list of its fields' values. Mappings whose keys are
    no text are lists of pairs."""
    if is_dataclass(value) and not isinstance(value, type):
        if (form := form_of(type(value))) is not None and form.write is not None:
            return form.write(value)
        own = {field.name: plain(getattr(value, field.name), rows=rows) for field in fields(value)}
        return list(own.values()) if rows else own
    if isinstance(value, Mapping):
        pairs = [[plain(name, rows=rows), plain(own, rows=rows)] for name, own in value.items()]
        return dict(pairs) if all(isinstance(name, str) for name, _ in pairs) else pairs
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list, frozenset)):
        return [plain(own, rows=rows) for own in (sorted(value) if isinstance(value, frozenset) else value)]
    return value


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
    hints, found = get_type_hints(kind, include_extras=True), []
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


def given_options(kind: type, entry: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Those of ``options_of`` a dataclass that an entry has, as keyword arguments; the entry was read and may have more."""
    return {own.name: entry[own.name] for own in options_of(kind) if own.name in entry and own.name not in without}


def option_texts(kind: type, values: Mapping[str, Any], mark: str = " ", without: Collection[str] = ()) -> list[str]:
    """What people are told of written options, such as ``replicas:2``, in the order of the fields. ``mark``: between name and value."""
    told = [(own.name, own.form.say(values[own.name])) for own in options_of(kind) if own.name in values and own.name not in without]
    return [f"{name}{' ' if ':' in said or ' ' in said else mark}{said}" for name, said in told]
