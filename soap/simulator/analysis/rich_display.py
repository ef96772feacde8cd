"""What notebooks show of a simulated iteration, as HTML: what it takes, and how busy devices and links are."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from soap.strategy.rich_display import bars, table
from soap.units import format_bytes

if TYPE_CHECKING:
    from soap.simulator.simulate import Simulation

MOST_BUSY = 8
"""Devices and links in the picture: those that are busiest."""


def simulation_html(simulation: Simulation) -> str:
    """The iteration's time, memory and traffic, and bars of what is busy for how long."""
    graph, topology = simulation.plan.graph, simulation.topology
    peaks, limits = simulation.peak_bytes, topology.memory_limits
    fullest = max(range(len(peaks)), key=lambda device: peaks[device] / max(1, limits[device]))
    per_second = simulation.throughput.samples_per_second
    rows = [
        ("model", f"{graph.name}, {len(graph.operators):,} operators"),
        ("cluster", f"{topology.name}, {topology.device_count:,} devices"),
        ("predicted", milliseconds(simulation.makespan_ns) + " an iteration"),
        *([("throughput", f"{per_second:,.4g} samples per second")] if per_second is not None else []),
        ("memory", "fits" if simulation.fits else f"does NOT fit: {format_bytes(simulation.overflow_bytes)} missing in all"),
        ("fullest device", f"{topology.devices[fullest].name}: {format_bytes(peaks[fullest])} of {format_bytes(limits[fullest])}"),
        ("moved", f"{format_bytes(simulation.bytes_moved)} in {simulation.messages:,} messages"),
    ]
    busiest = sorted(simulation.busy_ns.items(), key=lambda own: -own[1])[:MOST_BUSY]
    drawn = zip(busiest, bars([busy_ns for _, busy_ns in busiest]), strict=True)
    busy = [[escape(name), bar, f"{busy_ns / max(1, simulation.makespan_ns):.0%}"] for (name, busy_ns), bar in drawn]
    return table(("", ""), [tuple(map(escape, row)) for row in rows]) + table(("busiest", "", "of the iteration"), busy)


def milliseconds(time_ns: int) -> str:
    """A time as people read it."""
    return f"{time_ns / 1e6:,.3f} ms"
