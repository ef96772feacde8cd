"""What crosses the links of the cluster, as colours on a drawing of it: devices below, switches above them, level by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from soap.cluster.topology import Link, Topology
from soap.report.figures import GREY, INK, byte_unit, duration, heat, new_figure, plain
from soap.report.section import Block, Contents, Figure, Section, Table, Text
from soap.report.timeline import natural
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation
from soap.units import format_bytes, format_rate

if TYPE_CHECKING:
    from bokeh.plotting import figure as BokehFigure

MOST_LINKS = 16
"""Rows of the table."""
MOST_DRAWN = 4000
"""A drawing of more links shows nothing."""
LABELLED = 80
"""Up to so many devices, or switches, there is room for their numbers and names."""
THICK = 120
"""More links that carry something are thin lines."""
APART, APART_SHARE = 0.09, 0.005
"""How far each of the two directions of a cable is from its lower node's middle: in devices, and at most this share of the drawing's width,
so that both end in the node's mark however few devices there are."""
CURVED = 16
"""Points of an arc between devices that no switch joins."""

Point = tuple[float, float]


def _lacks(contents: Contents) -> str:
    if contents.simulation is None:
        return "the iteration was not simulated here"
    return "" if contents.simulation.topology.links else "the cluster has no links"


def _blocks(contents: Contents) -> Sequence[Block]:
    simulation = contents.simulation
    assert simulation is not None
    topology, carried = simulation.topology, simulation.link_bytes
    if not any(carried.values()):
        return [Text("Nothing crosses a link: the plan needs no communication.")]
    found: list[Block] = []
    if len(topology.links) <= MOST_DRAWN:
        about = (
            "Devices are at the bottom, host by host, with switches above them; links between devices of a host are arcs below. Each cable "
            "is two lines, one for each direction. Thin grey ones carry nothing. Point at a line for its figures."
        )
        title = f"{topology.name}: bytes that cross each link in one iteration"
        found.append(Figure(title, _drawing(topology, simulation), about))
    else:
        found.append(Text(f"{len(topology.links)} links are too many to draw."))
    return [*found, _table(simulation)]


def places_of(topology: Topology) -> dict[str, Point]:
    """Where nodes are drawn: devices at height 0 in their order, with a gap between hosts; a switch above the middle of what it joins, and
    one that joins devices of several hosts (a rail) above those of one host."""
    places: dict[str, Point] = {}
    gaps = 0
    for before, device in zip((topology.devices[0], *topology.devices), topology.devices, strict=False):
        gaps += before.host != device.host
        places[device.name] = (device.index + 0.8 * gaps, 0.0)
    neighbours: dict[str, set[str]] = {}
    for link in topology.links:
        neighbours.setdefault(link.source, set()).add(link.target)
        neighbours.setdefault(link.target, set()).add(link.source)
    hosts = {device.name: {device.host} for device in topology.devices}
    width, height = max(x for x, _ in places.values()), 0
    while above := sorted({other for name in places for other in neighbours.get(name, ()) if other not in places}, key=natural):
        height += 1
        below = {name: [other for other in neighbours[name] if other in places] for name in above}
        for name, own in below.items():
            hosts[name] = set().union(*(hosts[other] for other in own))
        few = min(len(hosts[name]) for name in above)
        chosen = [name for name in above if len(hosts[name]) == few]
        middles = {name: sum(places[other][0] for other in below[name]) / len(below[name]) for name in chosen}
        least = 0.7 if height == 1 else max(0.7, 0.8 * width / len(chosen))
        for name, x in _apart(middles, least).items():
            places[name] = (x, float(height))
    return places


def _apart(middles: Mapping[str, float], least: float) -> dict[str, float]:
    """The same places, moved to the right and back as a whole where they are too near to each other."""
    found: dict[str, float] = {}
    for name in sorted(middles, key=lambda own: (middles[own], natural(own))):
        found[name] = max(middles[name], *(x + least for x in list(found.values())[-1:])) if found else middles[name]
    shift = sum(found[name] - middles[name] for name in found) / max(1, len(found))
    return {name: x - shift for name, x in found.items()}


def line_of(link: Link, places: Mapping[str, Point]) -> tuple[list[float], list[float]]:
    """The points of a link's line, an arc between devices; a cable's two directions are apart at its lower end."""
    (x0, y0), (x1, y1) = places[link.source], places[link.target]
    if y0 == y1:
        depth = (0.25 + 0.11 * min(8.0, abs(x1 - x0))) * (1.0 if x0 < x1 else 0.86)
        parts = [i / CURVED for i in range(CURVED + 1)]
        side = -1 if y0 == 0 else 1
        return [x0 + (x1 - x0) * t for t in parts], [y0 + side * depth * 4 * t * (1 - t) for t in parts]
    aside = min(APART, APART_SHARE * (max(x for x, _ in places.values()) - min(x for x, _ in places.values())))
    return ([x0 + aside, x1] if y1 > y0 else [x0, x1 - aside]), [y0, y1]


def _drawing(topology: Topology, simulation: Simulation | FoldedSimulation) -> BokehFigure:
    from bokeh.models import ColorBar, ColumnDataSource, HoverTool, LinearColorMapper, NumeralTickFormatter

    carried, busy = simulation.link_bytes, simulation.busy_ns
    places = places_of(topology)
    most = max(carried.values())
    unit, unit_name = byte_unit(most)
    made = new_figure(430, x_axis_label="", tools="pan,box_zoom,reset,save")
    lines = [line_of(link, places) for link in topology.links]
    mapper = LinearColorMapper(palette=heat(), low=0, high=most / unit)
    for used in (False, True):
        chosen = [i for i, link in enumerate(topology.links) if (carried[link.name] > 0) == used]
        links = [topology.links[i] for i in chosen]
        source = ColumnDataSource(
            {
                "xs": [lines[i][0] for i in chosen],
                "ys": [lines[i][1] for i in chosen],
                "name": [plain(link.name) for link in links],
                "size": [carried[link.name] / unit for link in links],
                "told": [format_bytes(carried[link.name]) for link in links],
                "held": [f"{duration(busy[link.name])}, {busy[link.name] / max(1, simulation.makespan_ns):.0%}" for link in links],
                "rate": [format_rate(link.bandwidth_bytes_per_second) for link in links],
            }
        )
        own_width = 3 if len(links) <= THICK else 1.5
        heated = {"line_color": {"field": "size", "transform": mapper}, "line_width": own_width}
        colour = heated if used else {"line_color": INK, "line_width": 0.6}
        drawn = made.multi_line(xs="xs", ys="ys", source=source, **colour)
        tips = [("link", "@name"), ("carries", "@told"), ("held for", "@held of the iteration"), ("bandwidth", "@rate")]
        made.add_tools(HoverTool(renderers=[drawn], tooltips=tips, line_policy="interp"))
    bar = ColorBar(color_mapper=mapper, title=f"{unit_name} per iteration", width=12, formatter=NumeralTickFormatter(format="0,0.[00]"))
    bar.background_fill_alpha, bar.major_label_text_color, bar.title_text_color = 0, INK, INK
    made.add_layout(bar, "right")
    _nodes(made, topology, places)
    _hosts(made, topology, places, min(min(ys) for _, ys in lines))
    made.axis.visible = False
    made.grid.grid_line_color = None
    return made


def _nodes(made: BokehFigure, topology: Topology, places: Mapping[str, Point]) -> None:
    from bokeh.models import ColumnDataSource, HoverTool

    devices = {device.name: device for device in topology.devices}
    switches = [name for name in places if name not in devices]
    for names, marker, size in ((list(devices), "square", 16 if len(devices) <= LABELLED else 6), (switches, "diamond", 15)):
        source = ColumnDataSource(
            {
                "x": [places[name][0] for name in names],
                "y": [places[name][1] for name in names],
                "name": [plain(name) for name in names],
                "short": [str(devices[name].index) if name in devices else plain(name, 24) for name in names],
                "aside": [-11 if _leans_right(topology, places, name) else 11 for name in names],
                "align": ["center" if name in devices else "right" if _leans_right(topology, places, name) else "left" for name in names],
            }
        )
        drawn = made.scatter("x", "y", marker=marker, size=size, fill_color=GREY, line_color=INK, source=source)
        made.add_tools(HoverTool(renderers=[drawn], tooltips=[("node", "@name")]))
        if len(names) > LABELLED:
            continue
        inside = marker == "square"
        made.text(
            x="x", y="y", text="short", text_font_size="9px" if inside else "10px", text_color="#000000" if inside else INK,
            text_align="align", text_baseline="middle", x_offset=0 if inside else "aside", y_offset=0 if inside else -7, source=source,
        )  # fmt: skip
    made.y_range.range_padding = 0.12


def _leans_right(topology: Topology, places: Mapping[str, Point], name: str) -> bool:
    """Whether the cables that lead up from a switch lead to the right, so that its name has to be at its left."""
    x, height = places[name]
    above = [places[link.target][0] for link in topology.links if link.source == name and places[link.target][1] > height]
    return bool(above) and max(above) > x


def _hosts(made: BokehFigure, topology: Topology, places: Mapping[str, Point], lowest: float) -> None:
    """Names of hosts below their devices and the arcs between these."""
    for host in topology.hosts if len(topology.hosts) > 1 else ():
        xs = [places[device.name][0] for device in topology.devices if topology.hosts[device.host] is host]
        if xs:
            made.text(
                x=[sum(xs) / len(xs)], y=[lowest], text=[plain(host.name, 20)], text_align="center", text_baseline="middle", y_offset=28,
                text_font_size="11px", text_color=INK,
            )  # fmt: skip


def _table(simulation: Simulation | FoldedSimulation) -> Table:
    """The busiest links; those of which all figures are alike have one row."""
    carried, busy = simulation.link_bytes, simulation.busy_ns
    used = sorted((link for link in simulation.topology.links if carried[link.name]), key=lambda link: (-busy[link.name], link.index))
    alike: dict[tuple[str, ...], list[str]] = {}
    for link in used:
        held = f"{busy[link.name] / max(1, simulation.makespan_ns):.0%}"
        figures = format_bytes(carried[link.name]), duration(busy[link.name]), held, format_rate(link.bandwidth_bytes_per_second)
        alike.setdefault(figures, []).append(link.name)
    rows = [(f"{own[0]} and {len(own) - 1} alike" if len(own) > 1 else own[0], *figures) for figures, own in alike.items()]
    head = ("link", "carries", "held for", "of the iteration", "bandwidth")
    return Table(f"The busiest of {len(used)} links that carry something", head, rows[:MOST_LINKS])


SECTION = Section("links", "Links", _lacks, _blocks)
