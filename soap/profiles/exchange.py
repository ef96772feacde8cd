"""Measurements as a JSON file, to take them to another machine or to keep them beside a result. Files from outside are not trusted.
Some such files come with this package, each with its origin (``provenance``), which is for people and never read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from soap.errors import ProfileError
from soap.files import read_text, write_text_atomically
from soap.measure.link_probes import TIMING_SCHEMA, decode_timing, encode_timing
from soap.model.json_text import Schema, record
from soap.profiles import entries, keys, link_places
from soap.profiles.corrections import Correction
from soap.profiles.entries import Word, decode, encode
from soap.profiles.keys import Environment
from soap.profiles.link_places import LinkPlace
from soap.profiles.store import Store

FORMAT = "soap-profile"
VERSION = 1
SHIPPED = "profile-"
_Count = Annotated[int, Schema(minimum=0, maximum=10**6)]
_Kind = Annotated[Any, Schema(enum=["cpu", "cuda"])]
_Environment = Annotated[Any, record(device=Word, kind=_Kind, torch=Word, threads=_Count, neighbours=_Count, version=_Count)]
_Place = Annotated[
    Any,
    record(
        cluster=Word,
        name=Annotated[str, Schema(maxLength=1000)],
        devices=Annotated[str, Schema(maxLength=10**4)],
        machine=Annotated[str, Schema(maxLength=200)],
        backend=Word,
        emulated=bool,
        torch=Word,
        version=_Count,
    ),
]
_Entries = tuple[Annotated[Any, entries.SCHEMA], ...]
_Profile = record(environment=_Environment, entries=_Entries, corrections=tuple[Correction, ...])
_Profile["required"].remove("corrections")  # and no corrections
SCHEMA = record(
    format=Annotated[Any, Schema(const=FORMAT)],
    version=Annotated[Any, Schema(const=VERSION)],
    profiles=tuple[Annotated[Any, _Profile], ...],
    links=tuple[Annotated[Any, record(place=_Place, timings=tuple[Annotated[Any, TIMING_SCHEMA], ...])], ...],
    provenance=Mapping[str, str],
)
SCHEMA.update({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "SOAP measurements"})
SCHEMA["required"] = ["format", "version", "profiles"]  # files written before links were measured have none


def shipped_profiles() -> dict[str, Path]:
    """Name -> file of the measurements that come with this package."""
    folder = Path(str(files("soap").joinpath("profiles", "data")))
    return {path.stem.removeprefix(SHIPPED): path for path in sorted(folder.glob(f"{SHIPPED}*.json"))}


def export_profiles(store: Store, path: str | Path) -> int:
    """Write all that the store holds. Returns the numbers of measurements and corrections. Equal stores write equal bytes."""
    profiles = [
        {
            "environment": asdict(environment),
            "entries": [encode(entry) for entry in store.entries(environment)],
            "corrections": [asdict(one) for one in store.corrections(environment)],
        }
        for environment in store.environments()
    ]
    links = [
        {"place": asdict(place), "timings": [encode_timing(timing) for timing in store.links(place)]} for place in store.link_places()
    ]
    document = {"format": FORMAT, "version": VERSION, "profiles": profiles, "links": links}
    write_text_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n", error=ProfileError)
    kept = sum(len(profile["entries"]) + len(profile["corrections"]) for profile in profiles)
    return kept + sum(len(own["timings"]) for own in links)


def import_profiles(store: Store, path: str | Path) -> int:
    """Put what a file holds into the store; it replaces entries of the same keys. Returns the numbers of both. Bad input changes
    nothing. If the file has measurements of an environment, the file's corrections replace that environment's."""
    document = _checked(read_text(path, what="profile", error=ProfileError), path)
    found = [
        (Environment(**own["environment"]), [*map(decode, own["entries"])], [Correction(**one) for one in own.get("corrections", [])])
        for own in document["profiles"]
    ]
    links = [(LinkPlace(**own["place"]), [decode_timing(timing) for timing in own["timings"]]) for own in document.get("links", [])]
    for environment, measured, corrections in found:
        store.put(environment, measured)
        store.put_corrections(environment, corrections)
    for place, timings in links:
        store.put_links(place, timings)
    return sum(len(measured) + len(corrections) for _, measured, corrections in found) + sum(len(timings) for _, timings in links)


def _checked(text: str, path: str | Path) -> dict[str, Any]:
    from jsonschema import Draft202012Validator  # slow to import, and needed for files only
    from jsonschema.exceptions import best_match

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
    environments = enumerate(own["environment"] for own in document["profiles"])
    places = enumerate(own["place"] for own in document.get("links", []))
    measured = [("profiles", number, place, keys.VERSIONS[place["kind"]]) for number, place in environments]
    measured += [("links", number, place, link_places.VERSION) for number, place in places]
    for part, number, place, expected in measured:
        if place["version"] != expected:
            found = f"[{number}] measured in version {place['version']}; expected {expected}: measure again"
            raise ProfileError(f"profile {str(path)!r}: {part}{found}")
    return dict(document)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
