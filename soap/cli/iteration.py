"""What ``soap-simulate`` says about one iteration besides its time: what decides it, and what devices and links do meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soap.cli.tables import aligned, milliseconds
from soap.simulator.simulate import Simulation
from soap.simulator.timeline import busy_time_ns, critical_path_ns, link_bytes
from soap.units import format_bytes

MOST_ROWS = 16
"""Rows of devices and of links in the text; the JSON document has all."""


def document(simulation: Simulation) -> dict[str, Any]:
    """Plain JSON values. ``critical_path_ns``: by kind of task, adding up to the iteration. ``peak_bytes``: over the simulated time."""
    topology, busy = simulation.tasks.topology, busy_time_ns(simulation.tasks)
    peaks = [curve.peak_bytes for curve in simulation.memory_over_time]
    return {
        "iteration_ns": simulation.makespan_ns,
        "critical_path_ns": {kind.value: duration for kind, duration in critical_path_ns(simulation.tasks, simulation.schedule).items()},
        "devices": [
            {"name": device.name, "busy_ns": busy[device.name], "peak_bytes": peak, "available_bytes": device.type.memory_bytes}
            for device, peak in zip(topology.devices, peaks, strict=True)
        ],
        "links": [{"name": name, "busy_ns": busy[name], "bytes": size} for name, size in link_bytes(simulation.tasks).items()],
    }


def text(iteration: Mapping[str, Any]) -> str:
    """The document as tables for people."""
    whole_ns = max(1, iteration["iteration_ns"])
    path = [(kind, *_time(ns, whole_ns)) for kind, ns in _largest_first(iteration["critical_path_ns"])]
    devices = [(d["name"], *_time(d["busy_ns"], whole_ns), format_bytes(d["peak_bytes"])) for d in iteration["devices"]]
    used = sorted((link for link in iteration["links"] if link["bytes"]), key=lambda link: (-link["bytes"], link["name"]))
    links = [(link["name"], *_time(link["busy_ns"], whole_ns), format_bytes(link["bytes"])) for link in used]
    sections = ["the iteration takes as long as these, one after the other:\n" + aligned(path)]
    sections.append(_table(("device", "busy", "", "peak memory"), devices))
    if links:
        sections.append(_table(("link", "held", "", "carries"), links))
    return "\n\n".join(sections)


def _time(duration_ns: int, whole_ns: int) -> tuple[str, str]:
    """A time, and which part of the iteration it is."""
    return milliseconds(duration_ns), f"{duration_ns / whole_ns:.0%}"


def _largest_first(durations: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(durations.items(), key=lambda entry: -entry[1])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    more = len(rows) - MOST_ROWS
    lines = aligned([head, *rows[:MOST_ROWS]])
    return lines + (f"\n  and {more} more; --json has all" if more > 0 else "")
