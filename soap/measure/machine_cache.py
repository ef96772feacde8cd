"""Measurements of this machine, kept as JSON in the user's cache folder, so that a repeated search sees the same costs.

One file per key. A file that cannot be read, or does not hold what it should, counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from soap.cluster.topology import DeviceType
from soap.errors import ProfileError, SoapError
from soap.files import read_text, write_text_atomically
from soap.measure.link_probe import LinkRates
from soap.measure.link_probes import LinkTiming
from soap.measure.link_records import decode_timing, encode_timing

VERSION = 3
"""Version of the file format and of the measurement; part of every key. Since 2 ``kernel_seconds`` is that of a call in training; since
3 links are measured with freed memory kept (``malloc``)."""

TIMINGS_VERSION = 2
"""Version of the links' timings, the only part of a record that is measured anew if it was made otherwise. Since 2 there are none only if
measuring them failed."""

Key = Mapping[str, str | int]


class Measurement(NamedTuple):
    """A device and its links, None if there are none to measure; and what messages and sums take in training: None if that was not
    tried, nothing if it failed, so that it is not tried again by each command."""

    device: DeviceType
    link: LinkRates | None = None
    timings: tuple[LinkTiming, ...] | None = None



def cache_folder() -> Path | None:
    """The folder of this program below the user's cache folder (XDG_CACHE_HOME, if set); None if the user has no home."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):  # the XDG specification says to ignore relative paths
        return Path(chosen) / "soap"
    local = os.environ.get("LOCALAPPDATA", "") if sys.platform == "win32" else ""
    if local:
        return Path(local) / "soap"
    try:
        return Path.home() / ".cache" / "soap"
    except RuntimeError:
        return None


def cache_path(key: Key) -> Path | None:
    """Path of the measurement with this key."""
    folder = cache_folder()
    text = json.dumps({**key, "version": VERSION}, sort_keys=True)
    return None if folder is None else folder / f"machine-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def load(key: Key) -> Measurement | None:
    """The stored measurement, or None."""
    path = cache_path(key)
    if path is None or not path.exists():
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
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(_encode(key, measurement), indent=1) + "\n", error=ProfileError)
    except (OSError, ProfileError) as cause:
        warnings.warn(f"the measurement of this machine is not kept: {cause}; repeated runs will differ slightly", stacklevel=2)


def _encode(key: Key, measurement: Measurement) -> dict[str, Any]:
    device, link, timings = measurement
    fields = ("name", "kind", "memory_bandwidth_bytes_per_second", "memory_bytes", "kernel_seconds", "source")
    record: dict[str, Any] = {name: getattr(device, name) for name in fields}
    rates = None if link is None else [link.bandwidth_bytes_per_second, link.latency_seconds]
    return {
        "version": VERSION,
        "key": dict(key),
        "device": {**record, "flops_per_second": dict(device.flops_per_second)},
        "link_bandwidth_bytes_per_second_and_latency_seconds": rates,
        "timings": None if timings is None else {"version": TIMINGS_VERSION, "of": [encode_timing(timing) for timing in timings]},
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
        timings = tuple(decode_timing(one) for one in kept["of"])
    return Measurement(DeviceType(**fields), None if rates is None else LinkRates(*rates), timings)
