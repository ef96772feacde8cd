"""The optional fields of strategy files: one entry for each field of a configuration that has a default.

A file contains only what differs from the default, and a reader refuses fields that are not listed here. So a later version of this program
can add a field without a new version of the format: files that do not use the field stay as they are and keep their ``strategy_hash``.
The schema, ``soap-diff`` and reports read this list as well, so that a new field needs nothing but its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from soap.errors import StrategyError
from soap.model.batch import MAX_MICROBATCHES
from soap.schedules.table import MOST_CHUNKS
from soap.strategy import workers
from soap.strategy.compression import read_settings, said_settings, settings_schema, written_settings
from soap.strategy.recomputation import WRITTEN, read_level, said_level
from soap.strategy.shares import read_shares, said_shares, schema, written_shares
from soap.strategy.sync_contracts import MAX_PARTITIONS, MAX_PREFETCH, METHODS, OWNERS, RESIDENCES, WITHIN

MAX_NUMBER = 2**31
"""Upper limit of degrees, replicas and sizes: above any real value, and small enough to compute with."""


@dataclass(frozen=True, slots=True)
class OptionalField:
    """A field of a configuration and of its entry in a file. ``schema``: makes its JSON schema. ``read``: converts its value. ``mark``:
    stands between its name and its value in text. ``write``: the reverse of ``read``. ``say``: its written value for people."""

    name: str
    schema: Callable[[], Mapping[str, Any]]
    read: Callable[[Any], Any]
    mark: str = " "
    write: Callable[[Any], Any] = lambda value: value
    say: Callable[[Any], Any] = lambda value: value


def _one_of(names: Callable[[], Sequence[str]]) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"enum": list(names())}


def _count(most: int, least: int = 1) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"type": "integer", "minimum": least, "maximum": most}


def _stages() -> Mapping[str, Any]:
    named = {"type": "string", "minLength": 1, "maxLength": 1000}
    return {"type": "object", "propertyNames": named, "additionalProperties": {"type": "integer", "minimum": 0, "maximum": MOST_CHUNKS - 1}}


def _read_stages(entry: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(chunk) for name, chunk in entry.items()}


def _say_stages(entry: Mapping[str, int]) -> str:
    return ", ".join(f"{chunk} from {name}" for name, chunk in entry.items())


PARAMETER_FIELDS = (
    OptionalField("owner", _one_of(lambda: OWNERS), str),
    OptionalField("payload", _one_of(lambda: list(dict.fromkeys(contract.payload for contract in METHODS))), str),
    OptionalField("residence", _one_of(lambda: RESIDENCES), str),
    OptionalField("within", _one_of(lambda: WITHIN), str),
    OptionalField("partitions", _count(MAX_PARTITIONS), int),
    OptionalField("compression", settings_schema, read_settings, write=written_settings, say=said_settings),
    OptionalField("offload", lambda: {"type": "boolean"}, bool, say=lambda value: "yes" if value else "no"),
)
"""Of ``SyncConfig``."""

WORDED = ("owner", "payload", "residence", "within", "partitions")
"""Those of ``SyncConfig`` that people are told in words (``parameter_server in 4 partitions with local aggregation``)."""

OPERATOR_FIELDS = (
    OptionalField("replicas", _count(MAX_NUMBER), int, mark=":"),
    OptionalField("recompute", lambda: {"enum": list(WRITTEN.values())}, read_level, mark=":", write=WRITTEN.__getitem__, say=said_level),
    OptionalField("offload", lambda: {"type": "boolean"}, bool, mark=":", say=lambda value: "yes" if value else "no"),
    OptionalField("shares", schema, read_shares, write=written_shares, say=said_shares),
)
"""Of ``OpConfig``, beside its degrees and devices."""

STRATEGY_FIELDS: tuple[OptionalField, ...] = (
    OptionalField("prefetch", _count(MAX_PREFETCH, 0), int),
    OptionalField("microbatches", _count(MAX_MICROBATCHES), int),
    OptionalField("stages", _stages, _read_stages, write=dict, say=_say_stages),
    OptionalField("schedule", lambda: {"type": "string", "minLength": 1, "maxLength": 40}, str),
    OptionalField("consistency", lambda: {"type": "string", "minLength": 1, "maxLength": 40}, str),
    OptionalField("workers", workers.schema, workers.read, write=workers.written, say=workers.said),
)
"""Of ``Strategy``, beside its operators and parameters."""


def properties(known: Sequence[OptionalField]) -> dict[str, Any]:
    """Their schemas by name."""
    return {field.name: dict(field.schema()) for field in known}


def written(config: Any, known: Sequence[OptionalField], beside: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a configuration that differ from their defaults, except those in ``beside``, which the caller writes itself.

    StrategyError if such a field is not in ``known``.
    """
    names, found = [field.name for field in known], {}
    for own in fields(config):
        if own.name in beside:
            continue
        value = getattr(config, own.name)
        if value == _default(own):
            continue
        if own.name not in names:
            raise StrategyError(
                f"{own.name} {value!r} of {type(config).__name__} cannot be written to a strategy file; expected one of "
                f"{', '.join(names)}: list it in soap.strategy.fields"
            )
        found[own.name] = next(field for field in known if field.name == own.name).write(value)
    return {name: found[name] for name in names if name in found}


def read(entry: Mapping[str, Any], known: Sequence[OptionalField]) -> dict[str, Any]:
    """The reverse of ``written``: the values of these fields in an entry, as keyword arguments."""
    return {field.name: field.read(entry[field.name]) for field in known if field.name in entry}


def texts(values: Mapping[str, Any], known: Sequence[OptionalField]) -> list[str]:
    """What people are told of the fields in ``values``, such as ``replicas:2``, in the order of ``known``."""
    return [f"{field.name}{field.mark}{field.say(values[field.name])}" for field in known if field.name in values]


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else MISSING
