"""What every rank of ``soap-profile links`` does: measure, and keep each timing at once, so that nothing is ever lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from tqdm import tqdm

from soap.cluster.topology import DeviceKind
from soap.emulation.placement import run_evenly
from soap.measure.link_probes import LinkTiming, Probe
from soap.measure.link_timing import SECONDS_PER_PROBE, measure_links
from soap.profiles.link_places import LinkPlace
from soap.profiles.store import Store


@dataclass(frozen=True)
class LinkJob:
    """What a rank must know. ``scale``: of an emulated cluster, how many times slower it runs than the cluster that is measured.
    ``stop_at``: no probe begins after this time (``time.time()``, which processes share); the rest is left."""

    probes: Sequence[Probe]
    device_count: int
    kind: DeviceKind
    place: LinkPlace
    store: Path
    scale: float = 1.0
    seconds_per_probe: float = SECONDS_PER_PROBE
    stop_at: float = inf


def measure_and_keep(job: LinkJob) -> int:
    """Measure; the number of probes that were measured. An entry for ``launch``. Rank 0 keeps the timings and shows progress."""
    store, done = Store(job.store), 0
    with tqdm(total=len(job.probes), desc="measuring links", unit="probe", disable=None, leave=False) as bar:

        def keep(timing: LinkTiming) -> None:
            nonlocal done
            bar.set_postfix_str(f"{timing.probe.operation} of {len(timing.probe.devices)} devices", refresh=False)
            bar.update()
            now = datetime.now(UTC).isoformat(timespec="seconds")
            seconds, cpu_seconds = tuple(one * job.scale for one in timing.seconds), timing.cpu_seconds * job.scale
            store.put_links(job.place, [replace(timing, seconds=seconds, cpu_seconds=cpu_seconds, measured_at=now, scale=job.scale)])
            done += 1

        spent = lambda: time.time() >= job.stop_at  # noqa: E731
        measure_links(job.probes, job.device_count, job.kind, job.place.backend, job.seconds_per_probe, keep, run_evenly, spent)
    return done
