"""What sections draw: their places and numbers are those of the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

pytest.importorskip("bokeh", reason="reports need bokeh: pip install '.[report]'")

from soap import api
from soap.report import links, memory, operators, overview, searching, timeline
from soap.report.section import Table
from soap.report.timeline import Bar
from soap.search.record import Improvement
from soap.strategy.config import OpConfig, Strategy
from soap.units import format_bytes
from tests.graph_builder import mlp, transformer
from tests.report.made import usual
from tests.strategies import GPU, cluster, with_rails

SIMULATION = usual().simulation
assert SIMULATION is not None


def test_bars_are_the_tasks_of_the_schedule() -> None:
    bars = timeline.simulated_bars(SIMULATION)
    assert len(bars) == sum(len(task.resources) for task in SIMULATION.tasks.tasks)
    busy: dict[str, int] = {}
    for bar in bars:
        busy[bar.row] = busy.get(bar.row, 0) + bar.end_ns - bar.start_ns
    assert busy == {name: ns for name, ns in SIMULATION.busy_ns.items() if ns}
    measured = usual().measured
    assert measured is not None
    names = {bar.name for bar in bars}
    assert {bar.name for bar in timeline.timeline_bars(measured)} == names


def test_drawn_bars_have_the_tasks_times() -> None:
    made, about = timeline.draw(timeline.simulated_bars(SIMULATION))
    drawn = [dict(one.data_source.data) for one in made.renderers]
    lefts = sorted(float(x) for data in drawn for x in data["left"])
    assert lefts == sorted(bar.start_ns / 1e6 for bar in timeline.simulated_bars(SIMULATION))
    assert max(float(x) for data in drawn for x in data["right"]) <= SIMULATION.makespan_ns / 1e6
    assert about.startswith(f"{len(lefts)} tasks on devices and links")


def test_many_bars_become_few_without_losing_tasks() -> None:
    bars = [Bar(f"gpu{i % 4}", "forward" if i % 3 else "backward", 10 * i, 10 * i + 9, f"t{i}", 1) for i in range(5000)]
    found, width_ns = timeline.merged(bars, most=300)
    assert len(found) <= 300 and width_ns > 0
    assert sum(bar.tasks for bar in found) == 5000 and sum(bar.size_bytes for bar in found) == 5000
    assert {bar.row for bar in found} == {bar.row for bar in bars}
    assert timeline.merged(bars, most=5000) == (bars, 0)


def test_rows_are_devices_first_in_the_order_of_their_numbers() -> None:
    bars = [Bar(name, kind, 0, 1, "", 0) for name, kind in (("gpu10", "forward"), ("gpu2", "forward"), ("a->b", "sync"))]
    assert timeline.shown_rows(bars) == (["gpu2", "gpu10", "a->b"], 0)
    many = [Bar(f"gpu{i}", "forward", 0, 1, "", 0) for i in range(64)]
    assert timeline.shown_rows(many) == ([f"gpu{i}" for i in range(timeline.MOST_ROWS)], 64 - timeline.MOST_ROWS)
    links_too = [Bar(f"a->{i}", "sync", 0, 1 + i, "", 0) for i in range(40)]
    shown, left_out = timeline.shown_rows([*many, *links_too])
    assert shown[: timeline.MOST_DEVICES] == [f"gpu{i}" for i in range(timeline.MOST_DEVICES)] and left_out == 104 - timeline.MOST_ROWS
    assert shown[timeline.MOST_DEVICES :] == [f"a->{39 - i}" for i in range(timeline.MOST_ROWS - timeline.MOST_DEVICES)]


def test_memory_by_kind_adds_up_to_the_curve() -> None:
    for curve in SIMULATION.memory_over_time:
        assert np.array_equal(sum(curve.by_kind.values()), curve.bytes_held)
        peak = int(np.argmax(curve.bytes_held))
        assert {kind: int(own[peak]) for kind, own in curve.by_kind.items()} == dict(curve.at_peak)


def test_thinned_curves_keep_their_peak() -> None:
    curve = replace(SIMULATION.memory_over_time[0], times_ns=np.arange(5000), bytes_held=np.arange(5000)[::-1] % 977)
    kept = memory.thinned(curve, 50)
    assert len(kept) <= 50 and kept[0] == 0 and kept[-1] == 4999 and curve.bytes_held[kept].max() == 976


def test_devices_that_are_alike_are_drawn_once() -> None:
    found = memory.distinct(SIMULATION)
    assert sum(1 + alike for _, alike in found) == 4


def test_cells_say_which_part_a_device_computes() -> None:
    graph = mlp()
    op = graph.operators[0]
    config = OpConfig((2, 2, *(1,) * (len(op.factors) - 2)), (3, 1, 0, 2))
    cells = operators.cells_of(op, config, 7)
    first, second = op.factors[0].name, op.factors[1].name
    parts = [(1, 1), (1, 2), (2, 1), (2, 2)]
    told = [f"{first} {i}/2 {second} {j}/2" for i, j in parts]
    assert [(cell.device, cell.tile) for cell in cells] == list(zip((3, 1, 0, 2), told, strict=True))
    assert len({cell.colour for cell in cells}) == 4 and {cell.row for cell in cells} == {7}
    assert operators.kind_of(op, config) == operators.SEVERAL
    whole = OpConfig((1,) * len(op.factors), (0, 1), replicas=2)
    assert operators.kind_of(op, whole) == operators.WHOLE and {cell.tile for cell in operators.cells_of(op, whole, 0)} == {"all"}


def test_repeated_layers_are_one_row_and_edges_lead_from_makers_to_readers() -> None:
    graph = transformer()
    strategy = Strategy({op.name: OpConfig((1,) * len(op.factors), (0,)) for op in graph.operators})
    rows, left_out = operators.rows_of(graph, strategy)
    assert left_out == 0 and sorted(i for row in rows for i in row.members) == list(range(len(graph.operators)))
    makers = {operand.tensor: i for i, op in enumerate(graph.operators) for operand in op.outputs}
    place = {i: number for number, row in enumerate(rows) for i in row.members}
    read = {(place[makers[o.tensor]], place[i]) for i, op in enumerate(graph.operators) for o in op.inputs if o.tensor in makers}
    assert operators.edges_of(graph, rows) == sorted(pair for pair in read if abs(pair[0] - pair[1]) > 1)


def test_every_node_of_a_cluster_has_a_place_of_its_own() -> None:
    topology = cluster([2, 2])
    places = links.places_of(topology)
    assert set(places) == {device.name for device in topology.devices} | set(topology.switches)
    assert len(set(places.values())) == len(places)
    there, back = (links.line_of(link, places) for link in (topology.links[0], topology.links[1]))
    assert there != back


@pytest.mark.parametrize("name", ["local:2", "rtx4090-4", "p100-4x4", "h100-8"])
def test_cables_end_in_the_marks_of_their_nodes_and_do_not_cross(name: str) -> None:
    """A drawing is some 1000 pixels wide, and a device's box reaches 8 from its middle."""
    topology = api.load_cluster(name)
    places = links.places_of(topology)
    xs = [x for x, _ in places.values()]
    pixel = (max(xs) - min(xs)) / 1000
    cables = [links.line_of(link, places) for link in topology.links]
    for link, (line_xs, line_ys) in zip(topology.links, cables, strict=True):
        for end, node in ((0, link.source), (-1, link.target)):
            assert abs(line_xs[end] - places[node][0]) < 8 * pixel and line_ys[end] == places[node][1]
    up = [own for own in cables if len(own[0]) == 2]
    for (one, ones), (other, others) in combinations(up, 2):
        if sorted(ones) == sorted(others):
            ends = [dict(zip(ys, xs, strict=True)) for xs, ys in ((one, ones), (other, others))]
            low, high = (ends[0][y] - ends[1][y] for y in sorted(ones))
            assert low * high >= 0, "crosses"


def test_the_best_cost_is_drawn_where_it_changes() -> None:
    assert searching.thinned([(0, 9), (1, 9), (2, 7), (3, 7), (4, 7)]) == [(0, 9), (2, 7), (4, 7)]
    assert searching.thinned([]) == []


def test_a_search_knows_when_it_found_what() -> None:
    result = usual().result
    assert result is not None and result.improvements
    costs = [own.cost_ns for own in result.improvements]
    assert costs == sorted(costs, reverse=True) and costs[-1] == result.cost_ns
    seconds = [own.seconds for own in result.improvements]
    assert seconds == sorted(seconds) and seconds[0] >= 0
    assert replace(result, improvements=(Improvement(0, 0.0, 1),)) == result  # no part of what makes searches equal
    assert result.best_costs[-1][1] == result.cost_ns


def test_links_that_are_alike_have_one_row() -> None:
    table = links._table(SIMULATION)
    used = [name for name, size in SIMULATION.link_bytes.items() if size]
    counts = [1 + int(row[0].split(" and ")[1].split()[0]) if " and " in row[0] else 1 for row in table.rows]
    assert sum(counts) == len(used) and len(table.rows) < len(used)
    for row in table.rows:
        assert row[1] == format_bytes(SIMULATION.link_bytes[row[0].split(" and ")[0]])


def test_names_of_switches_stand_where_no_cable_leads_up() -> None:
    topology = cluster([2, 2])
    places = links.places_of(topology)
    leaning = {name: links._leans_right(topology, places, name) for name in topology.switches}
    middle = sum(x for x, _ in places.values()) / len(places)
    highest = max(height for _, height in places.values())
    assert all(leaning[name] == (places[name][0] < middle and places[name][1] < highest) for name in leaning)


def test_starts_that_are_far_off_have_no_line_but_a_row() -> None:
    result = usual().result
    assert result is not None
    far = replace(result.starts[0], name="far", cost_ns=100 * result.data_parallel_ns, overflow_bytes=0)
    with_far = replace(result, starts=(*result.starts, far))
    made = searching._against_proposals(with_far)
    named = [item.label.value for legend in made.legend for item in legend.items]
    assert not any(name.startswith("far ") for name in named) and any(name.startswith("data_parallel ") for name in named)
    assert [row[0] for row in searching._starts(with_far, {}).rows][-1] == "far"


def test_switches_of_several_hosts_are_above_those_of_one_host_and_apart() -> None:
    topology = with_rails(cluster([4, 4], GPU))
    places = links.places_of(topology)
    joined = {link.target for link in topology.links if places[link.source][1] == 0} - {device.name for device in topology.devices}
    host = {device.name: device.host for device in topology.devices}
    by_host = {name: {host[link.source] for link in topology.links if link.target == name and link.source in host} for name in joined}
    rails = [name for name, own in by_host.items() if len(own) > 1]
    inside = [name for name, own in by_host.items() if len(own) == 1]
    assert len(rails) > 1 and inside
    assert min(places[name][1] for name in rails) > max(places[name][1] for name in inside)
    xs = sorted(places[name][0] for name in rails)
    assert min(b - a for a, b in pairwise(xs)) >= 0.7


def test_the_fastest_plan_and_the_safe_one_stand_side_by_side() -> None:
    own = usual()
    assert own.summary is not None
    times = {"predicted_ns": 2_000_000, "mean_ns": 2_500_000, "time_ns": [1_000_000, 3_000_000], "gain": [0.9, 1.2]}
    plans = {"found 1": {**times, "wins": 0.75}, "data_parallel": {**times, "wins": 0.5}}
    names = {"answer": "fastest", "fastest": "found 1", "safe": "data_parallel", "reference": "data_parallel"}
    decision = {**names, "plans": plans, "draws": 64}
    summary = {**own.summary, "decision": decision, "files": {"fastest": "s.json", "safe": "s.safe.json"}}
    (table,) = overview._two_plans(summary)
    assert isinstance(table, Table)
    assert [(row[0], row[1], *row[4:]) for row in table.rows] == [
        ("fastest", "found 1 (this plan)", "48 of 64 draws, 0.90 to 1.20 times as fast", "s.json"),
        ("safe", "data_parallel", "", "s.safe.json"),
    ]
    assert overview._two_plans(own.summary) == []
