"""The measured links of a cluster, from the store."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

from soap.cluster.topology import Topology
from soap.errors import ProfileError, SoapError, SoapWarning
from soap.files import cache_folder, read_text, write_text_atomically
from soap.measure.link_probes import LinkTiming, is_enough, probes_for, scales_of, with_measured_links
from soap.profiles.link_places import LinkPlace, link_places
from soap.profiles.store import Store

FILE = "told.json"
KEPT_S = 30 * 86_400.0
"""After so long it may be told again."""

_here: set[str] = set()


def is_news(text: str, clock: Callable[[], float] = time.time) -> bool:
    """Whether this was not told yet; from now on it was. In this process it is told once even if nothing can be kept."""
    name, now_s, folder = hashlib.sha256(text.encode()).hexdigest()[:16], clock(), cache_folder()
    place = f"{folder} {name}"
    if place in _here:
        return False
    _here.add(place)
    if folder is None:
        return True
    path, known = folder / FILE, dict[str, float]()
    with suppress(SoapError, ValueError, AttributeError, TypeError, RecursionError):  # a file of something else counts as absent
        known = {str(key): float(told_s) for key, told_s in json.loads(read_text(path)).items() if 0 <= now_s - float(told_s) < KEPT_S}
    if name in known:
        return False
    with suppress(OSError, SoapError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps({**known, name: now_s}, indent=1) + "\n")
    return True


def known_links(topology: Topology, place: LinkPlace, store: Store) -> list[LinkTiming]:
    """The stored timings of the cluster's probes at this place, in the order of the probes."""
    found = {timing.probe: timing for timing in store.links(place)}
    return [found[probe] for probe in (probes_for(topology) if found else ()) if probe in found]


def with_stored_links(topology: Topology, store: Store) -> Topology:
    """The same cluster: with the links' measured figures if all the measurements that they need exist, otherwise unchanged.
    Measurements that are incomplete or cannot be right are not used, and a SoapWarning says so, once on a machine. ProfileError if the
    store cannot be read."""
    problem = ""
    for place in link_places(topology):
        timings = known_links(topology, place, store)
        if timings and is_enough(topology, timings):
            try:
                return with_measured_links(topology, timings, f"measured by soap-profile links ({place.text})")
            except ProfileError as cause:
                problem = problem or str(cause)
        elif timings:
            problem = problem or _what_is_missing(topology, timings)
    text = f"measured links of cluster {topology.name!r} are not used: {problem}"
    if problem and is_news(f"{store.path}: {text}"):
        warnings.warn(text, SoapWarning, stacklevel=2)
    return topology


def _what_is_missing(topology: Topology, timings: Sequence[LinkTiming]) -> str:
    scales = scales_of(timings)
    if len(scales) > 1:
        return f"they were measured at different scales ({', '.join(f'{one:g}' for one in scales)}); soap-profile links goes on at one"
    return f"only {len(timings)} of {len(probes_for(topology))} probes were measured; soap-profile links goes on"
