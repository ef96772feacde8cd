"""Memory over the iteration, of each device, by what it is held for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from soap.report.figures import INK, MEMORY_COLOURS, byte_unit, legend_above, new_figure, zoomable
from soap.report.section import Block, Choice, Contents, Figure, Section, Table, without
from soap.simulator.folded import FoldedSimulation
from soap.simulator.memory.curves import MemoryCurve
from soap.simulator.simulate import Simulation
from soap.units import format_bytes

if TYPE_CHECKING:
    from bokeh.plotting import figure as BokehFigure

Longs = NDArray[np.int64]

MOST_POINTS = 400
"""Of one curve; of more, those with the most memory within a span are kept."""
MOST_DEVICES = 16
"""Devices that can be chosen: those whose curves differ, the fullest first."""


def _blocks(contents: Contents) -> Sequence[Block]:
    simulation = contents.simulation
    assert simulation is not None
    options = []
    for device, alike in distinct(simulation):
        name = names_of(simulation)[device]
        also = f" (and {alike} alike)" if alike else ""
        curve = simulation.memory_over_time[device]
        peak = f"{format_bytes(curve.peak_bytes)} of {format_bytes(limits_of(simulation)[device])} at its peak"
        about = (
            "Bytes that the simulated order of tasks holds, without the allowance for other orders. The dashed line is the limit, where it "
            "is near enough to be seen."
        )
        title = f"{name}{also}: memory over the iteration by what it is for; {peak}"
        figure = Figure(title, draw(curve, limits_of(simulation)[device]), about)
        options.append((f"{name}{also}", figure))
    return [Choice("device", options), _peaks(simulation)]


def names_of(simulation: Simulation | FoldedSimulation) -> list[str]:
    """Names of the devices whose curves there are: of the cluster, or of two copies."""
    return [device.name for device in simulation.tasks.topology.devices]


def limits_of(simulation: Simulation | FoldedSimulation) -> tuple[int, ...]:
    """What plans may use on these devices."""
    return simulation.tasks.topology.memory_limits


def distinct(simulation: Simulation | FoldedSimulation) -> list[tuple[int, int]]:
    """(device, how many others have the same curve), the fullest first."""
    curves, limits = simulation.memory_over_time, limits_of(simulation)
    groups: dict[object, list[int]] = {}
    for device, curve in enumerate(curves):
        key = limits[device], curve.times_ns.tobytes(), *(own.tobytes() for own in curve.by_kind.values())
        groups.setdefault(key, []).append(device)
    ordered = sorted(groups.values(), key=lambda own: (-curves[own[0]].peak_bytes / limits[own[0]], own[0]))
    return [(own[0], len(own) - 1) for own in ordered[:MOST_DEVICES]]


def thinned(curve: MemoryCurve, most: int = MOST_POINTS) -> Longs:
    """Positions of at most so many points of a curve, the peak among them: of each span the one that holds most."""
    count = len(curve.times_ns)
    if count <= most:
        return np.arange(count)
    found = [part[int(np.argmax(curve.bytes_held[part]))] for part in np.array_split(np.arange(count), most - 2)]
    return np.unique(np.array([0, *found, count - 1], np.int64))


def draw(curve: MemoryCurve, limit_bytes: int) -> BokehFigure:
    """The picture of one device: kinds on top of each other, the largest first."""
    from bokeh.models import ColumnDataSource, Span

    kept = thinned(curve)
    times = curve.times_ns[kept] / 1e6
    unit, name = byte_unit(curve.peak_bytes)
    made = new_figure(420, x_axis_label="time since the iteration began (ms)", y_axis_label=f"held memory ({name})")
    kinds = sorted((kind for kind, own in curve.by_kind.items() if own.any()), key=lambda kind: -int(curve.by_kind[kind].sum()))
    below, items = np.zeros(len(kept)), []
    for kind in kinds:
        above = below + curve.by_kind[kind][kept] / unit
        source = ColumnDataSource({"x": times, "y1": below, "y2": above})
        area = made.varea_step("x", "y1", "y2", step_mode="after", color=MEMORY_COLOURS[kind.value], source=source)
        items.append((f"{kind.value} {format_bytes(int(curve.by_kind[kind].max()))}", [area]))
        below = above
    totals = ColumnDataSource(
        {
            "x": times,
            "y": curve.bytes_held[kept] / unit,
            "told": [format_bytes(int(size)) for size in curve.bytes_held[kept]],
            **{kind.value: [format_bytes(int(size)) for size in curve.by_kind[kind][kept]] for kind in kinds},
        }
    )
    line = made.step("x", "y", mode="after", line_color=INK, line_width=1, source=totals)
    limit = limit_bytes / unit
    peak = curve.peak_bytes / unit
    made.y_range.start, made.y_range.end = 0, max(1.15 * peak, 1.05 * limit if limit < 2.5 * peak else 0) or 1
    made.x_range.range_padding = 0
    made.add_layout(Span(location=limit, dimension="width", line_color=INK, line_width=2, line_dash="dashed"))
    legend_above(made, items, hide=False)
    tips = [("time", "@x{0,0.000} ms"), ("all", "@told"), *((kind.value, f"@{kind.value}") for kind in kinds)]
    zoomable(made, tips, [line])
    made.hover.mode = "vline"
    return made


def _peaks(simulation: Simulation | FoldedSimulation) -> Table:
    """Expected peaks of the cluster's devices by kind; devices that are alike have one row."""
    topology, groups = simulation.topology, dict[object, list[int]]()
    for device, held in enumerate(simulation.peak_by_kind):
        groups.setdefault((tuple(held.items()), topology.memory_limits[device]), []).append(device)
    ordered = sorted(groups.values(), key=lambda own: -sum(simulation.peak_by_kind[own[0]].values()))
    kinds = list(simulation.peak_by_kind[0])
    rows = []
    for own in ordered[:MOST_DEVICES]:
        name = topology.devices[own[0]].name + (f" and {len(own) - 1} alike" if len(own) > 1 else "")
        sizes = simulation.peak_by_kind[own[0]]
        limit = topology.memory_limits[own[0]]
        rows.append((name, format_bytes(sum(sizes.values())), format_bytes(limit), *(format_bytes(sizes[kind]) for kind in kinds)))
    left = len(ordered) - len(rows)
    more = f"; {left} more kinds of devices" if left else ""
    title = f"Expected peak of each device, with the allowance for other orders of tasks{more}"
    return Table(title, ("device", "peak", "limit", *kinds), rows)


SECTION = Section("memory", "Memory", without("simulation", "the iteration was not simulated here"), _blocks)
