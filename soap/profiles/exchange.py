"""Measurements as a JSON file, to take them to another machine or to keep them beside a result. What comes from outside is not trusted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from soap.errors import ProfileError
from soap.files import read_text, write_text_atomically
from soap.profiles import entries, keys
from soap.profiles.entries import decode, encode
from soap.profiles.keys import Environment
from soap.profiles.store import Store

FORMAT = "soap-profile"
VERSION = 1
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 10**6}
_WORD: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 200}
_ENVIRONMENT: dict[str, Any] = {
    "device": _WORD,
    "kind": {"enum": ["cpu", "cuda"]},
    "torch": _WORD,
    "threads": _COUNT,
    "neighbours": _COUNT,
    "version": _COUNT,
}


def _record(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "SOAP measurements",
    **_record(
        {
            "format": {"const": FORMAT},
            "version": {"const": VERSION},
            "profiles": {
                "type": "array",
                "items": _record({"environment": _record(_ENVIRONMENT), "entries": {"type": "array", "items": entries.SCHEMA}}),
            },
        }
    ),
}


def export_profiles(store: Store, path: str | Path) -> int:
    """Write all that the store holds; how many entries. Equal stores write equal bytes."""
    profiles = []
    for environment in store.environments():
        profiles.append({"environment": asdict(environment), "entries": [encode(entry) for entry in store.entries(environment)]})
    document = {"format": FORMAT, "version": VERSION, "profiles": profiles}
    write_text_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n", error=ProfileError)
    return sum(len(profile["entries"]) for profile in profiles)


def import_profiles(store: Store, path: str | Path) -> int:
    """Put what a file holds into the store, in place of what it has of the same; how many entries. All or, on bad input, nothing."""
    document = _checked(read_text(path, what="profile", error=ProfileError), path)
    found = [(Environment(**p["environment"]), [decode(entry) for entry in p["entries"]]) for p in document["profiles"]]
    for environment, measured in found:
        store.put(environment, measured)
    return sum(len(measured) for _, measured in found)


def _checked(text: str, path: str | Path) -> dict[str, Any]:
    try:
        document = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as cause:
        raise ProfileError(f"profile {str(path)!r} is no JSON ({cause}); expected what soap-profile export wrote") from None
    if isinstance(document, dict) and document.get("format") == FORMAT and document.get("version") != VERSION:
        raise ProfileError(f"profile {str(path)!r} has version {document.get('version')!r}; expected {VERSION}: export it again")
    error = best_match(Draft202012Validator(SCHEMA).iter_errors(document))
    if error is not None:
        where = "".join(f"[{part!r}]" for part in error.absolute_path) or "the document"
        raise ProfileError(f"profile {str(path)!r}: {where}: {error.message[:200]}; expected what soap-profile export wrote")
    for number, profile in enumerate(document["profiles"]):
        if profile["environment"]["version"] != keys.VERSION:
            found = profile["environment"]["version"]
            raise ProfileError(f"profile {str(path)!r}: [{number}] measured in version {found}; expected {keys.VERSION}: measure again")
    return dict(document)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
