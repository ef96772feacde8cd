"""Measurements of this machine, kept as JSON in the user's cache folder, so that a repeated search sees the same costs.

One file per key. A file that cannot be read, or does not hold what it should, counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from soap.cluster.topology import DeviceType
from soap.errors import ProfileError, SoapError
from soap.files import cache_folder, read_text, write_text_atomically
from soap.measure.link_probe import LinkRates
from soap.measure.link_probes import LinkTiming
from soap.model.json_text import plain, read_as

VERSION = 3
"""Version of the file format and of the measurement; part of every key. Since 2 ``kernel_seconds`` is that of a call in training; since
3 links are measured with freed memory kept (``malloc``)."""

TIMINGS_VERSION = 2
"""Version of the links' timings, the only part of a record that is measured anew if it was made otherwise."""

FAILURE_S = 86_400.0
"""For so long what has failed is not tried again: it takes long, and would mostly fail for the next command as well."""

Key = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A device, its links, messages and sums in training; None if not measured. ``failed_at``: when that failed, in seconds since 1970."""

    device: DeviceType
    link: LinkRates | None = None
    timings: tuple[LinkTiming, ...] | None = None
    failed_at: float | None = None

    @property
    def tried(self) -> bool:
        """Whether measuring has failed within the last day."""
        return self.failed_at is not None and 0 <= time.time() - self.failed_at < FAILURE_S


@dataclass(frozen=True, slots=True)
class _Record:
    """A file."""

    version: int
    timings_version: int
    key: Key
    measurement: Measurement


_anew: set[Path] | None = None
"""Files that were written since ``measuring_again``; None: all that are there count."""


@contextmanager
def measuring_again() -> Iterator[None]:
    """Within this context what was measured before counts as absent; it stays until it is replaced."""
    global _anew
    before, _anew = _anew, set[Path]()
    try:
        yield
    finally:
        _anew = before



def cache_path(key: Key) -> Path | None:
    """Path of the measurement with this key."""
    folder = cache_folder()
    text = json.dumps({**key, "version": VERSION}, sort_keys=True)
    return None if folder is None else folder / f"machine-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def load(key: Key) -> Measurement | None:
    """The stored measurement, or None."""
    path = cache_path(key)
    if path is None or not path.exists() or (_anew is not None and path not in _anew):
        return None
    try:
        found: _Record = read_as(_Record, json.loads(read_text(path, what="cache file")))
    except (SoapError, ValueError, RecursionError):
        return None
    if (found.version, found.key) != (VERSION, key):
        return None
    return found.measurement if found.timings_version == TIMINGS_VERSION else replace(found.measurement, timings=None)


def save(key: Key, measurement: Measurement) -> None:
    """Store a measurement; a warning if that is not possible."""
    path = cache_path(key)
    if path is None:
        return
    try:
        if _anew is not None:
            _anew.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain(_Record(VERSION, TIMINGS_VERSION, key, measurement)), indent=1)
        write_text_atomically(path, text + "\n", error=ProfileError)
    except (OSError, ProfileError) as cause:
        warnings.warn(f"the measurement of this machine is not kept: {cause}; repeated runs will differ slightly", stacklevel=2)
