"""What ``soap-simulate`` reports of one iteration besides its time: what decides it, and how busy devices and links are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soap.cli.plain_text import aligned, milliseconds
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation
from soap.units import format_bytes

MOST_ROWS = 16
"""Rows of devices and of links in the text; the JSON document has all."""


def document(simulation: Simulation | FoldedSimulation) -> dict[str, Any]:
    """Plain JSON values. ``critical_path_ns``: by kind of task, adding up to the iteration. ``peak_bytes``: over the simulated time."""
    busy, topology = simulation.busy_ns, simulation.topology
    return {
        "iteration_ns": simulation.makespan_ns,
        "critical_path_ns": {kind.value: duration for kind, duration in simulation.critical_path_ns.items()},
        "devices": [
            {"name": device.name, "busy_ns": busy[device.name], "peak_bytes": peak, "available_bytes": limit}
            for device, peak, limit in zip(topology.devices, simulation.peak_bytes, topology.memory_limits, strict=True)
        ],
        "links": [{"name": name, "busy_ns": busy[name], "bytes": size} for name, size in simulation.link_bytes.items()],
    }


def text(iteration: Mapping[str, Any]) -> str:
    """The document as tables."""
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
    """A time, and its share of the iteration."""
    return milliseconds(duration_ns), f"{duration_ns / whole_ns:.0%}"


def _largest_first(durations: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(durations.items(), key=lambda entry: -entry[1])


def _table(head: Sequence[str], everything: Sequence[Sequence[str]]) -> str:
    """Rows that differ in their first cell alone are one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in everything:
        alike.setdefault(tuple(cells), []).append(name)
    rows = [(names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), *cells) for cells, names in alike.items()]
    more = len(rows) - MOST_ROWS
    lines = aligned([head, *rows[:MOST_ROWS]])
    return lines + (f"\n  and {more} further rows; --json has all" if more > 0 else "")
