"""Strict parsing of JSON from outside."""

from __future__ import annotations

import json
from typing import Any

from soap.strategy.mismatch import short


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
