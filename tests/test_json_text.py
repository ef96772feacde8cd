"""What JSON from outside may not hold, and dataclasses as schemas of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from soap.model.json_text import Schema, parse_json, read_as, record, schema_of


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
    with pytest.raises(ValidationError):
        Draft202012Validator(schema_of(Outer)).validate({**FULL, **change})
    with pytest.raises(ValidationError):
        Draft202012Validator(schema_of(Outer)).validate({"parts": []})
