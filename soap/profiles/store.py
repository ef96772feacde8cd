"""The store of measurements: one SQLite file in the user's cache folder. Several processes may write to it at once.

Entries are found by the environment that they were measured in (``keys.Environment``) and their key; what was measured elsewhere stays in
the file, and is never an answer. A file that cannot be read is an error in one line: it may hold hours of measuring, and is not replaced.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jsonschema import Draft202012Validator

from soap.errors import ProfileError
from soap.profiles.entries import SCHEMA, Entry, decode, encode
from soap.profiles.keys import Environment
from soap.profiles.machine_cache import cache_folder

FILE = "profile.sqlite"
LAYOUT = 1
"""Version of the tables, in SQLite's ``user_version``."""
PATIENCE_S = 60.0
"""How long a process waits for another one that writes."""
_TABLES = """
CREATE TABLE IF NOT EXISTS environments (hash TEXT PRIMARY KEY, description TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
    environment TEXT NOT NULL REFERENCES environments (hash),
    key TEXT NOT NULL,
    entry TEXT NOT NULL,
    PRIMARY KEY (environment, key)
) WITHOUT ROWID;
"""
_VALIDATOR = Draft202012Validator(SCHEMA)


def default_path() -> Path:
    """Where the user's store is; ProfileError if the user has no cache folder."""
    folder = cache_folder()
    if folder is None:
        raise ProfileError("no place for measurements: this user has no home folder; set XDG_CACHE_HOME to a folder of yours")
    return folder / FILE


class Store:
    """Measurements in a file, which is made when something is first put in. ProfileError if it cannot be read or written."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_path() if path is None else path

    def put(self, environment: Environment, entries: Iterable[Entry]) -> None:
        """Keep entries, in place of earlier ones of the same keys; all or none."""
        rows = [(environment.hash, entry.key.text, json.dumps(encode(entry))) for entry in entries]
        with self._open(writing=True) as base, base:
            base.execute("BEGIN IMMEDIATE")  # a transaction that began with reading is refused at once where another one writes
            described = (environment.hash, json.dumps(asdict(environment), sort_keys=True))
            base.execute("INSERT OR IGNORE INTO environments VALUES (?, ?)", described)
            base.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows)

    def entries(self, environment: Environment) -> list[Entry]:
        """All that was measured there, in the order of their keys."""
        rows = self._rows("SELECT entry FROM entries WHERE environment = ? ORDER BY key", environment.hash)
        return [self._decoded(text) for (text,) in rows]

    def environments(self) -> dict[Environment, int]:
        """Where something was measured, and how much, in the order of their texts."""
        count = "(SELECT count(*) FROM entries WHERE environment = hash)"
        rows = self._rows(f"SELECT description, {count} FROM environments ORDER BY description")
        try:
            return {Environment(**json.loads(text)): number for text, number in rows}
        except (ValueError, TypeError):
            raise self._damaged("it names a place in another way") from None

    def _rows(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        """What a query finds; nothing in a store that nobody has put anything into."""
        if not self.path.exists():
            return []
        with self._open() as base:
            return base.execute(query, values).fetchall() if self._layout(base) else []

    def _decoded(self, text: str) -> Entry:
        try:
            record = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise self._damaged("an entry is no JSON") from None
        if not _VALIDATOR.is_valid(record):
            raise self._damaged("an entry is not as it should be")
        return decode(record)

    @contextmanager
    def _open(self, *, writing: bool = False) -> Iterator[sqlite3.Connection]:
        try:
            if writing:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            # A reader may have to undo what a killed writer left half done, so it opens to write as well; nothing is made by reading.
            # The journal stays SQLite's usual one: nobody waits for a process that switches to another (it is refused at once).
            address = f"file:{quote(str(self.path))}?mode={'rwc' if writing else 'rw'}"
            with closing(sqlite3.connect(address, timeout=PATIENCE_S, uri=True)) as base:
                if self._layout(base) == 0 and writing:
                    base.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {LAYOUT}; COMMIT;")
                yield base
        except sqlite3.DatabaseError as cause:
            if getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise ProfileError(f"the store of measurements {str(self.path)!r} is in use: {cause}; try again") from None
            raise self._damaged(str(cause)) from None
        except OSError as cause:
            raise ProfileError(f"measurements cannot be kept in {str(self.path)!r}: {cause.strerror}; set XDG_CACHE_HOME") from None

    def _layout(self, base: sqlite3.Connection) -> int:
        """The version of the tables; 0 if there are none."""
        layout = int(base.execute("PRAGMA user_version").fetchone()[0])
        if layout not in (0, LAYOUT):
            raise ProfileError(
                f"the store of measurements {str(self.path)!r} has layout {layout}; expected {LAYOUT}: another version of this program "
                "wrote it; move it away to begin a new one"
            )
        return layout

    def _damaged(self, what: str) -> ProfileError:
        return ProfileError(f"the store of measurements {str(self.path)!r} cannot be used: {what}; move it away to begin a new one")
