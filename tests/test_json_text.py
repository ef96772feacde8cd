"""What JSON from outside may not hold, and dataclasses as schemas of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from soap.model.json_text import Schema, Unfit, parse_json, plain, read_as, record, schema_of


def test_plain_values() -> None:
    assert parse_json('{"a": [1, 2.5, null], "b": {"a": "x"}}') == {"a": [1, 2.5, None], "b": {"a": "x"}}


@pytest.mark.parametrize(
    ("text", "words"), [('{"a": 1, "a": 2}', "key 'a' occurs twice"), ("[NaN]", "NaN is not a JSON number"), ("{", "Expecting")]
)
def test_surprises_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(text)


@dataclass(frozen=True)
class Inner:
    at: tuple[int, float]
    kind: Annotated[str, Schema(enum=["a", "b"])]


@dataclass(frozen=True)
class Outer:
    parts: tuple[Inner, ...]
    least: Annotated[int, Schema(minimum=1)] | None
    named: Mapping[str, Inner] = field(default_factory=dict)
    free: Annotated[Mapping[str, Any], record(x=int)] | None = None


FULL: dict[str, Any] = {"parts": [{"at": [1, 0.5], "kind": "a"}], "least": 2, "named": {"n": {"at": [0, 1], "kind": "b"}}, "free": {"x": 1}}


def test_a_dataclass_is_read_as_its_schema_says() -> None:
    assert read_as(Outer, FULL) == Outer((Inner((1, 0.5), "a"),), 2, {"n": Inner((0, 1), "b")}, {"x": 1})
    assert asdict(read_as(Outer, {"parts": [], "least": None})) == {"parts": (), "least": None, "named": {}, "free": None}
    for document in (FULL, {"parts": [], "least": None}):
        Draft202012Validator(schema_of(Outer)).validate(document)


@pytest.mark.parametrize(
    "change",
    [{"more": 1}, {"least": 0}, {"least": "1"}, {"parts": [{"at": [1], "kind": "a"}]}, {"parts": [{"at": [1, 2], "kind": "c"}]},
     {"named": {"n": {"at": [1, 2]}}}, {"free": {"x": 1, "y": 2}}, {"free": {"x": "1"}}, {"parts": {}}],
)  # fmt: skip
def test_what_a_schema_refuses(change: dict[str, Any]) -> None:
    for document in ({**FULL, **change}, {"parts": []}):
        with pytest.raises(ValidationError):
            Draft202012Validator(schema_of(Outer)).validate(document)
        with pytest.raises(Unfit):
            read_as(Outer, document)


@pytest.mark.parametrize(
    ("document", "place", "said"),
    [
        ({**FULL, "parts": [{"at": [1, "x"], "kind": "a"}]}, "parts/0/at/1", "'x'; expected a number"),
        ({**FULL, "least": 0}, "least", "0; expected a whole number from 1"),
        ({**FULL, "parts": [{"at": [1, 2], "kind": "c"}]}, "parts/0/kind", "'c'; expected one of a, b"),
        ({**FULL, "named": {"n": {"at": [0, 1]}}}, "named/n", "key 'kind' is missing; expected it"),
        ({**FULL, "mor": 1}, "", "unknown key 'mor'; expected one of parts, least, named, free"),
        ([1], "", "a list; expected a list of 4"),
    ],
)
def test_messages_say_where_and_what(document: Any, place: str, said: str) -> None:
    with pytest.raises(Unfit) as fault:
        read_as(Outer, document)
    assert (fault.value.place, str(fault.value)) == (place, said)


def test_rows_are_read_as_well() -> None:
    outer = read_as(Outer, FULL)
    assert read_as(Outer, plain(outer, rows=True)) == read_as(Outer, plain(outer)) == outer
