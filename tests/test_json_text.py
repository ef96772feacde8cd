"""What JSON from outside may not hold."""

from __future__ import annotations

import pytest

from soap.strategy.json_text import parse_json


def test_plain_values() -> None:
    assert parse_json('{"a": [1, 2.5, null], "b": {"a": "x"}}') == {"a": [1, 2.5, None], "b": {"a": "x"}}


@pytest.mark.parametrize(
    ("text", "words"), [('{"a": 1, "a": 2}', "key 'a' occurs twice"), ("[NaN]", "NaN is not a JSON number"), ("{", "Expecting")]
)
def test_surprises_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(text)
