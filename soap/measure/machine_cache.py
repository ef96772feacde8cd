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
from pathlib import Path
from typing import Any, NamedTuple

from soap.cluster.topology import DeviceType
from soap.errors import ProfileError, SoapError
from soap.files import cache_folder, read_text, write_text_atomically
from soap.measure.link_probe import LinkRates
from soap.measure.link_probes import LinkTiming, decode_timing, encode_timing

VERSION = 3
"""Version of the file format and of the measurement; part of every key. Since 2 ``kernel_seconds`` is that of a call in training; since
3 links are measured with freed memory kept (``malloc``)."""

TIMINGS_VERSION = 2
"""Version of the links' timings, the only part of a record that is measured anew if it was made otherwise."""

FAILURE_S = 86_400.0
"""For so long what has failed is not tried again: it takes long, and would mostly fail for the next command as well."""

Key = Mapping[str, str | int]


class Measurement(NamedTuple):
    """A device, its links, messages and sums in training; None if not measured. ``failed_at``: when that failed, in seconds since 1970."""

    device: DeviceType
    link: LinkRates | None = None
    timings: tuple[LinkTiming, ...] | None = None
    failed_at: float | None = None

    @property
    def tried(self) -> bool:
        """Whether measuring has failed within the last day."""
        return self.failed_at is not None and 0 <= time.time() - self.failed_at < FAILURE_S


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
        return _decode(json.loads(read_text(path, what="cache file")), key)
    except (SoapError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def save(key: Key, measurement: Measurement) -> None:
    """Store a measurement; a warning if that is not possible."""
    path = cache_path(key)
    if path is None:
        return
    try:
        if _anew is not None:
            _anew.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(_encode(key, measurement), indent=1) + "\n", error=ProfileError)
    except (OSError, ProfileError) as cause:
        warnings.warn(f"the measurement of this machine is not kept: {cause}; repeated runs will differ slightly", stacklevel=2)


def _encode(key: Key, measurement: Measurement) -> dict[str, Any]:
    device, link, timings, failed_at = measurement
    fields = ("name", "kind", "memory_bandwidth_bytes_per_second", "memory_bytes", "kernel_seconds", "source")
    record: dict[str, Any] = {name: getattr(device, name) for name in fields}
    rates = None if link is None else [link.bandwidth_bytes_per_second, link.latency_seconds]
    return {
        "version": VERSION,
        "key": dict(key),
        "device": {**record, "flops_per_second": dict(device.flops_per_second)},
        "link_bandwidth_bytes_per_second_and_latency_seconds": rates,
        "timings": None if timings is None else {"version": TIMINGS_VERSION, "of": [encode_timing(timing) for timing in timings]},
        "failed_at": failed_at,
    }


def _decode(record: dict[str, Any], key: Key) -> Measurement:
    if record["version"] != VERSION or record["key"] != dict(key):
        raise ValueError("a measurement of something else")
    fields = record["device"]
    if not all(isinstance(fields[name], str) for name in ("name", "source")) or not isinstance(fields["memory_bytes"], int):
        raise TypeError("a device type's texts and sizes have other types")
    rates = record["link_bandwidth_bytes_per_second_and_latency_seconds"]
    kept, timings = record.get("timings"), None  # records were without before
    if kept is not None and kept["version"] == TIMINGS_VERSION:
        timings = tuple(decode_timing(one) for one in kept["of"]) or None  # there were none if measuring had failed, whenever
    failed_at = record.get("failed_at")
    return Measurement(
        DeviceType(**fields), None if rates is None else LinkRates(*rates), timings, None if failed_at is None else float(failed_at)
    )
