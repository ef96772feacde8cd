"""Figures of this machine that nobody has measured: what ``local:N`` costs in tests. Measuring takes some seconds of all cores for each
number of processes, and tests ask not how fast the machine is. ``profiles/test_compute_rates`` and ``runtime/test_link_timing`` measure."""

from __future__ import annotations

from dataclasses import replace

from soap.cluster.presets import local_topology
from soap.cluster.topology import MEASURED
from soap.measure import machine_cache
from soap.measure.link_probe import LinkRates
from soap.measure.link_probes import LinkTiming, Operation, quick_probes
from soap.measure.this_machine import _key, cpu_model, memory_bytes

COUNTS = (1, 2, 3, 4, 6, 8)
SECONDS = {Operation.STEP_MESSAGE: (7e-5, 6e-5), Operation.STEP_SUM: (3e-4, 1e-4)}
"""(duration, the processor's part of it) of these in training."""


def timings(count: int) -> tuple[LinkTiming, ...]:
    """What messages and sums take among so many processes."""
    found = []
    for probe in quick_probes(local_topology(count)):
        usual = 5e-5 + probe.size_bytes * 1e-9, 4e-5
        seconds, busy_seconds = SECONDS.get(probe.operation, usual)
        found.append(LinkTiming(probe, (seconds,), busy_seconds))
    return tuple(found)


def keep() -> None:
    """In the user's cache folder, which is the tests' own."""
    for count in COUNTS:
        usual = local_topology(count).devices[0].type
        source = f"{MEASURED} on this machine by soap.measure.this_machine"
        device = replace(usual, name=f"{cpu_model()} / {count}", memory_bytes=memory_bytes() // count, source=source)
        link, own = (LinkRates(1e9, 5e-5), timings(count)) if count > 1 else (None, None)
        machine_cache.save(_key("cpu", count), machine_cache.Measurement(device, link, own))
