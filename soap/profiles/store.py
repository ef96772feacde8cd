"""The store of measurements: one SQLite file in the user's cache folder. Several processes may write to it at once.

Entries are found by the environment in which they were measured (``keys.Environment``) and their key; corrections by their environment,
kind and direction; timings of links by their place (``link_places.LinkPlace``) and probe. Measurements of other environments stay in
the file, and are never an answer. A file that cannot be read is an error in one line: it may hold hours of measuring, and is not
replaced.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from soap.errors import ProfileError
from soap.files import cache_folder
from soap.measure.link_probes import LinkTiming, probe_text
from soap.model.json_text import Unfit, plain, read_as
from soap.profiles.corrections import Correction
from soap.profiles.entries import Entry
from soap.profiles.keys import Environment
from soap.profiles.link_places import LinkPlace

FILE = "profile.sqlite"
LAYOUT = 2
"""Version of the tables, in SQLite's ``user_version``. Version 1 had no tables of links, and the first files of version 2 none of
corrections. A missing table counts as empty, and is added with the first write."""
PATIENCE_S = 60.0
"""Seconds for which a process waits for another one that writes."""
_TABLES = """
CREATE TABLE IF NOT EXISTS environments (hash TEXT PRIMARY KEY, description TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
    environment TEXT NOT NULL REFERENCES environments (hash),
    key TEXT NOT NULL,
    entry TEXT NOT NULL,
    PRIMARY KEY (environment, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS corrections (
    environment TEXT NOT NULL REFERENCES environments (hash),
    key TEXT NOT NULL,
    entry TEXT NOT NULL,
    PRIMARY KEY (environment, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS link_places (hash TEXT PRIMARY KEY, description TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS link_timings (
    place TEXT NOT NULL REFERENCES link_places (hash),
    key TEXT NOT NULL,
    entry TEXT NOT NULL,
    PRIMARY KEY (place, key)
) WITHOUT ROWID;
"""
_NAMES = frozenset(re.findall(r"EXISTS (\w+)", _TABLES))


def default_path() -> Path:
    """Path of the user's store; ProfileError if the user has no cache folder."""
    folder = cache_folder()
    if folder is None:
        raise ProfileError("no place for measurements: this user has no home folder; set XDG_CACHE_HOME to a folder of yours")
    return folder / FILE


P = TypeVar("P", Environment, LinkPlace)


class Store:
    """Measurements in a file, which is made with the first write. ProfileError if it cannot be read or written."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_path() if path is None else path

    def put(self, environment: Environment, entries: Iterable[Entry]) -> None:
        """Keep entries; they replace earlier ones of the same keys. All or none are written. The environment's corrections are deleted,
        because they correct answers that were made without these entries."""
        records = {entry.key.text: plain(entry) for entry in entries}
        self._put("environments", "entries", environment, records, outdated="corrections" if records else "")

    def entries(self, environment: Environment) -> list[Entry]:
        """All entries of an environment, in the order of their keys."""
        rows = self._rows("entries", "SELECT entry FROM entries WHERE environment = ? ORDER BY key", environment.hash)
        return [self._record(Entry, text) for (text,) in rows]

    def environments(self) -> dict[Environment, int]:
        """The environments in the store, and the number of their entries, in the order of their texts."""
        count = "(SELECT count(*) FROM entries WHERE environment = hash)"
        return self._places(Environment, self._rows("entries", f"SELECT description, {count} FROM environments ORDER BY description"))

    def put_corrections(self, environment: Environment, corrections: Iterable[Correction]) -> None:
        """Keep corrections; they replace earlier ones of the same kinds and directions. All or none are written."""
        self._put("environments", "corrections", environment, {one.name: plain(one) for one in corrections})

    def corrections(self, environment: Environment) -> list[Correction]:
        """The corrections of an environment, in the order of their names."""
        rows = self._rows("corrections", "SELECT entry FROM corrections WHERE environment = ? ORDER BY key", environment.hash)
        return [self._record(Correction, text) for (text,) in rows]

    def put_links(self, place: LinkPlace, timings: Iterable[LinkTiming]) -> None:
        """Keep timings of links; they replace earlier ones of the same probes. All or none are written."""
        self._put("link_places", "link_timings", place, {probe_text(one.probe): plain(one) for one in timings})

    def links(self, place: LinkPlace) -> list[LinkTiming]:
        """All timings of a place, in the order of their probes' texts."""
        rows = self._rows("link_timings", "SELECT entry FROM link_timings WHERE place = ? ORDER BY key", place.hash)
        return [self._record(LinkTiming, text) for (text,) in rows]

    def link_places(self) -> dict[LinkPlace, int]:
        """The places in the store, and the number of their probes, in the order of their texts."""
        count = "(SELECT count(*) FROM link_timings WHERE place = hash)"
        return self._places(LinkPlace, self._rows("link_places", f"SELECT description, {count} FROM link_places ORDER BY description"))

    def _put(
        self, places: str, rows: str, place: Environment | LinkPlace, records: Mapping[str, Any], *, outdated: str = ""
    ) -> None:
        """Write in one transaction. ``outdated``: a table from which everything of this place is deleted in the same transaction."""
        values = [(place.hash, key, json.dumps(record)) for key, record in records.items()]
        with self._open(writing=True) as base, base:
            base.execute("BEGIN IMMEDIATE")  # a transaction that began with reading is refused at once if another one writes
            described = (place.hash, json.dumps(asdict(place), sort_keys=True))
            base.execute(f"INSERT OR IGNORE INTO {places} VALUES (?, ?)", described)
            base.executemany(f"INSERT OR REPLACE INTO {rows} VALUES (?, ?, ?)", values)
            if outdated:
                base.execute(f"DELETE FROM {outdated} WHERE environment = ?", (place.hash,))

    def _places(self, kind: type[P], rows: Iterable[tuple[Any, ...]]) -> dict[P, int]:
        try:
            return {kind(**json.loads(text)): number for text, number in rows}
        except (ValueError, TypeError):
            raise self._damaged("it names a place in another way") from None

    def _rows(self, table: str, query: str, *values: str) -> list[tuple[Any, ...]]:
        """Rows that a query finds; none if nobody has written yet, or there is no such table yet."""
        if not self.path.exists():
            return []
        with self._open() as base:
            return base.execute(query, values).fetchall() if table in self._tables(base) else []

    def _record(self, kind: Any, text: str) -> Any:
        try:
            return read_as(kind, json.loads(text))
        except Unfit:
            raise self._damaged("an entry is not as it should be") from None
        except (ValueError, TypeError, RecursionError):
            raise self._damaged("an entry is no JSON") from None

    @contextmanager
    def _open(self, *, writing: bool = False) -> Iterator[sqlite3.Connection]:
        try:
            if writing:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            # A reader may have to undo what a killed writer left half done, so it opens the file for writing too; reading makes nothing.
            # The journal stays SQLite's usual one: a process that switches to another one is refused at once, nobody waits for it.
            address = f"file:{quote(str(self.path))}?mode={'rwc' if writing else 'rw'}"
            with closing(sqlite3.connect(address, timeout=PATIENCE_S, uri=True)) as base:
                self._require_layout(base)
                if writing and not self._tables(base) >= _NAMES:
                    base.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {LAYOUT}; COMMIT;")
                yield base
        except sqlite3.DatabaseError as cause:
            if getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise ProfileError(f"the store of measurements {str(self.path)!r} is in use: {cause}; try again") from None
            raise self._damaged(str(cause)) from None
        except OSError as cause:
            raise ProfileError(f"measurements cannot be kept in {str(self.path)!r}: {cause.strerror}; set XDG_CACHE_HOME") from None

    @staticmethod
    def _tables(base: sqlite3.Connection) -> set[str]:
        return {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def _require_layout(self, base: sqlite3.Connection) -> None:
        """ProfileError if the version of the tables is not known."""
        layout = int(base.execute("PRAGMA user_version").fetchone()[0])
        if not 0 <= layout <= LAYOUT:
            raise ProfileError(
                f"the store of measurements {str(self.path)!r} has layout {layout}; expected at most {LAYOUT}: another version of this "
                "program wrote it; move it away to begin a new one"
            )

    def _damaged(self, what: str) -> ProfileError:
        return ProfileError(f"the store of measurements {str(self.path)!r} cannot be used: {what}; move it away to begin a new one")
