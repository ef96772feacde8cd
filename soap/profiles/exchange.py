"""Measurements as a JSON file, to take them to another machine or to keep them beside a result. Files from outside are not trusted.
Some such files come with this package, each with its origin (``provenance``), which is for people and never read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from soap.errors import ProfileError
from soap.files import read_text, write_text_atomically
from soap.measure.link_probes import LinkTiming
from soap.model.json_text import Schema, Unfit, plain, read_as
from soap.profiles import keys, link_places
from soap.profiles.corrections import Correction
from soap.profiles.entries import Entry
from soap.profiles.keys import Environment
from soap.profiles.link_places import LinkPlace
from soap.profiles.store import Store

FORMAT = "soap-profile"
VERSION = 1
SHIPPED = "profile-"


@dataclass(frozen=True)
class Profile:
    """What was measured in one environment."""

    environment: Environment
    entries: tuple[Entry, ...]
    corrections: tuple[Correction, ...] = ()


@dataclass(frozen=True)
class Links:
    """What was measured of one place's links."""

    place: LinkPlace
    timings: tuple[LinkTiming, ...]


@dataclass(frozen=True)
class Document:
    """A file. Those that were written before links were measured have none."""

    format: Annotated[str, Schema(const=FORMAT)]
    version: Annotated[int, Schema(const=VERSION)]
    profiles: tuple[Profile, ...]
    links: tuple[Links, ...] = ()
    provenance: Mapping[str, str] | None = None


def shipped_profiles() -> dict[str, Path]:
    """Name -> file of the measurements that come with this package."""
    folder = Path(str(files("soap").joinpath("profiles", "data")))
    return {path.stem.removeprefix(SHIPPED): path for path in sorted(folder.glob(f"{SHIPPED}*.json"))}


def export_profiles(store: Store, path: str | Path) -> int:
    """Write all that the store holds. Returns the numbers of measurements and corrections. Equal stores write equal bytes."""
    profiles = [Profile(own, tuple(store.entries(own)), tuple(store.corrections(own))) for own in store.environments()]
    links = [Links(place, tuple(store.links(place))) for place in store.link_places()]
    document = plain(Document(FORMAT, VERSION, tuple(profiles), tuple(links)))
    del document["provenance"]
    write_text_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n", error=ProfileError)
    return _count(profiles, links)


def _count(profiles: Sequence[Profile], links: Sequence[Links]) -> int:
    return sum(len(own.entries) + len(own.corrections) for own in profiles) + sum(len(own.timings) for own in links)


def import_profiles(store: Store, path: str | Path) -> int:
    """Put what a file holds into the store; it replaces entries of the same keys. Returns the numbers of both. Bad input changes
    nothing. If the file has measurements of an environment, the file's corrections replace that environment's."""
    document = _checked(read_text(path, what="profile", error=ProfileError), path)
    for own in document.profiles:
        store.put(own.environment, own.entries)
        store.put_corrections(own.environment, own.corrections)
    for links in document.links:
        store.put_links(links.place, links.timings)
    return _count(document.profiles, document.links)


def _checked(text: str, path: str | Path) -> Document:
    try:
        document = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as cause:
        raise ProfileError(f"profile {str(path)!r} is no JSON ({cause}); expected what soap-profile export wrote") from None
    if isinstance(document, dict) and document.get("format") == FORMAT and document.get("version") != VERSION:
        raise ProfileError(f"profile {str(path)!r} has version {document.get('version')!r}; expected {VERSION}: export it again")
    try:
        whole: Document = read_as(Document, document)
    except Unfit as fault:
        said = f"{fault.place or 'the document'}: {fault}; expected what soap-profile export wrote"
        raise ProfileError(f"profile {str(path)!r}: {said}") from None
    environments = enumerate(own["environment"] for own in document["profiles"])
    places = enumerate(own["place"] for own in document.get("links", []))
    measured = [("profiles", number, place, keys.VERSIONS[place["kind"]]) for number, place in environments]
    measured += [("links", number, place, link_places.VERSION) for number, place in places]
    for part, number, place, expected in measured:
        if place.get("version") != expected:
            said = f"[{number}] measured in version {place.get('version')}; expected {expected}: measure again"
            raise ProfileError(f"profile {str(path)!r}: {part}{said}")
    return whole


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
