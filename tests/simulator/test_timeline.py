"""Tables, traces, critical path and sums of schedules that are known by hand, and what holds for all of them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.analysis import timeline
from soap.simulator.lowering import build_plan, lower
from soap.simulator.memory.sweep import memory_over_time
from soap.simulator.reference import simulate
from soap.simulator.tasks import Schedule, TaskGraph
from soap.strategy.config import Strategy
from tests.extent import FEW
from tests.simulator.examples import UNIT_NS, LaunchedCosts, PointCosts, batch_split, chain, on, pairwise_cluster, strategy, units
from tests.strategies import cases

TWO = pairwise_cluster(1, 1)


def played(graph: OperatorGraph, chosen: Strategy, topology: Topology = TWO) -> tuple[TaskGraph, Schedule]:
    tasks = lower(build_plan(graph, chosen, topology), topology, PointCosts())
    return tasks, simulate(tasks)


def over_two_devices() -> tuple[TaskGraph, Schedule]:
    return played(chain(4, 2, 3), strategy(l1=on(0, degrees=(1, 1, 1)), loss=on(1, degrees=(1,))))


def complete(trace: timeline.Trace) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def threads(trace: timeline.Trace) -> dict[tuple[int, int], str]:
    events = trace["traceEvents"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}


def test_chrome_trace_has_a_thread_per_device_and_link() -> None:
    trace = timeline.chrome_trace(*over_two_devices())
    assert list(threads(trace).values()) == ["d0", "d1", "d0->d1", "d1->d0"]
    assert [e["args"] for e in trace["traceEvents"] if e["name"] == "process_name"] == [{"name": "simulated"}]
    first, transfer, *_ = complete(trace)
    assert first.pop("args") == {"operator": "linear"}
    assert first == {"name": "forward l1[0]", "cat": "forward", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 24 * UNIT_NS / 1000}
    assert (transfer["tid"], transfer["args"]) == (2, {"bytes": 48})
    assert (transfer["ts"], transfer["dur"]) == (24 * UNIT_NS / 1000, 48 * UNIT_NS / 1000)
    assert json.loads(json.dumps(trace)) == trace


def test_chrome_trace_shows_memory_as_counters() -> None:
    tasks, schedule = over_two_devices()
    curves = memory_over_time(tasks, schedule, 2)
    trace = timeline.chrome_trace(tasks, schedule, memory=curves)
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    for device, curve in zip(("d0", "d1"), curves, strict=True):
        own = [(event["ts"], event["args"]["bytes"]) for event in counters if event["name"] == f"memory of {device}"]
        assert own == [(time / 1000, held) for time, held in zip(curve.times_ns.tolist(), curve.bytes_held.tolist(), strict=True)]
    assert complete(trace) == complete(timeline.chrome_trace(tasks, schedule))
    assert len(timeline.merge_traces(trace, trace)["traceEvents"]) == 2 * len(trace["traceEvents"])


def test_measured_events_look_like_simulated_ones() -> None:
    events = [
        (1, "forward loss[0]", "forward", 5_072, 5_076),
        (0, "forward l1[0]", "forward", 5_000, 5_024),
        (0, "transfer l1[0:4,0:3] 0->1", "transfer", 5_024, 5_072),
    ]
    trace = timeline.measured_trace(events, device_names=["d0", "d1"])
    assert list(threads(trace).values()) == ["d0", "d1", "d0 communication"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in complete(trace)] == [
        ("forward l1[0]", 0, 0.0, 0.024),
        ("transfer l1[0:4,0:3] 0->1", 2, 0.024, 0.048),
        ("forward loss[0]", 1, 0.072, 0.004),
    ]
    simulated = {e["name"] for e in complete(timeline.chrome_trace(*over_two_devices()))}
    assert {e["name"] for e in complete(trace)} <= simulated


def test_communications_at_the_same_time_stand_on_threads_of_their_own() -> None:
    events = [(0, "a", "sync", 0, 10), (0, "b", "sync", 5, 20), (1, "a", "sync", 6, 10), (0, "c", "transfer", 10, 12)]
    trace = timeline.measured_trace(events, device_names=["d0", "d1"])
    assert list(threads(trace).values())[2:] == ["d0 communication", "d0 communication", "d1 communication"]
    assert [(e["name"], e["tid"]) for e in complete(trace)] == [("a", 2), ("b", 3), ("a", 4), ("c", 2)]


def test_measured_trace_names_ranks_and_may_be_empty() -> None:
    assert list(threads(timeline.measured_trace([(1, "a", "forward", 0, 1)])).values())[:2] == ["rank 0", "rank 1"]
    assert complete(timeline.measured_trace([])) == []


def test_of_several_iterations_the_middle_one_is_shown() -> None:
    lengths = [30, 10, 20]
    iterations = [[(0, "a", "forward", 100, 105 + n), (1, "b", "update", 110, 100 + n)] for n in lengths]
    middle, medians_ns = timeline.middle_iteration(iterations)
    assert middle == iterations[2]
    assert medians_ns == {"a": 25, "b": 10}
    assert timeline.middle_iteration(iterations[:2])[0] == iterations[1]  # of two, the shorter
    assert (timeline.span_ns(iterations[0]), timeline.span_ns([])) == (35, 0)
    trace = timeline.measured_trace(middle, details={"a": {"median_ns": 25, "bytes": 3}})
    assert [event.get("args") for event in complete(trace)] == [{"median_ns": 25, "bytes": 3}, None]


def test_merged_traces_stand_side_by_side() -> None:
    simulated = timeline.chrome_trace(*over_two_devices())
    measured = timeline.measured_trace([(0, "forward l1[0]", "forward", 7, 9)])
    before = json.dumps(simulated)
    merged = timeline.merge_traces(simulated, measured, timeline.merge_traces(simulated, measured))
    names = {e["pid"]: e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "simulated", 1: "measured", 2: "simulated", 3: "measured"}
    assert len(merged["traceEvents"]) == 2 * (len(simulated["traceEvents"]) + len(measured["traceEvents"]))
    order = {e["pid"]: e["args"]["sort_index"] for e in merged["traceEvents"] if e["name"] == "process_sort_index"}
    assert order == {0: 0, 1: 1, 2: 2, 3: 3}
    assert json.dumps(simulated) == before


def test_critical_path_of_a_chain_is_the_chain() -> None:
    tasks, schedule = over_two_devices()
    assert timeline.critical_path(tasks, schedule) == list(range(len(tasks.tasks)))


def test_critical_path_goes_through_waits_for_a_link() -> None:
    split = strategy(l1=on(0, 0, degrees=(2, 1, 1)), loss=on(1, 1, degrees=(2,)))
    tasks, schedule = played(chain(4, 2, 3), split)
    assert [tasks.tasks[p].name for p in timeline.critical_path(tasks, schedule)] == [
        "forward l1[0]",
        "transfer l1[0:2,0:3] 0->1",
        "transfer l1[2:4,0:3] 0->1",
        "forward loss[1]",
        "backward loss[0]",
        "transfer gradient of l1[0:2,0:3] 1->0",
        "transfer gradient of l1[2:4,0:3] 1->0",
        "backward l1[1]",
        "update @0",
    ]


def test_a_message_under_way_is_on_the_path_as_far_as_others_wait_for_it() -> None:
    away = pairwise_cluster(1, 1, latency=4)
    split = strategy(l1=on(0, 0, degrees=(2, 1, 1)), loss=on(1, 1, degrees=(2,)))
    tasks, schedule = played(chain(4, 2, 3), split, away)
    path = timeline.critical_path(tasks, schedule)
    parts = {tasks.tasks[p].name: units(ns) for p, ns in zip(path, timeline.path_parts_ns(schedule, path), strict=True)}
    assert parts == {
        "forward l1[0]": 12,
        "transfer l1[0:2,0:3] 0->1": 24,  # the next has the link then
        "transfer l1[2:4,0:3] 0->1": 24 + 4,
        "forward loss[1]": 2,
        "backward loss[0]": 4,
        "transfer gradient of l1[0:2,0:3] 1->0": 24,
        "transfer gradient of l1[2:4,0:3] 1->0": 24 + 4,
        "backward l1[1]": 24,
        "update @0": 1,
    }
    assert {name: units(busy_ns) for name, busy_ns in timeline.busy_time_ns(tasks).items()}["d0->d1"] == 48
    shown = {(e["name"], e["tid"]): e for e in complete(timeline.chrome_trace(tasks, schedule))}
    first = shown["transfer l1[0:2,0:3] 0->1", 2]
    assert first["dur"] * timeline.NS_PER_US == 24 * UNIT_NS and first["args"] == {"bytes": 24, "latency_ns": 4 * UNIT_NS}


def test_critical_path_of_nothing() -> None:
    tasks, _ = over_two_devices()
    empty = TaskGraph(tasks.plan, tasks.topology, ())
    assert timeline.critical_path(empty, simulate(empty)) == []


def test_busy_time_and_bytes_of_a_transfer() -> None:
    tasks, _ = over_two_devices()
    busy = {name: units(busy_ns) for name, busy_ns in timeline.busy_time_ns(tasks).items()}
    assert busy == {"d0": 24 + 48 + 1, "d1": 4 + 8, "d0->d1": 48, "d1->d0": 48}
    assert timeline.link_bytes(tasks) == {"d0->d1": 48, "d1->d0": 48}
    assert timeline.bytes_moved(tasks) == 96


def test_bytes_of_an_all_reduce_are_those_of_its_ring() -> None:
    # 24 bytes of weights over three devices: each hop carries 2 (n-1)/n of them.
    # The loss is a sum of 4 bytes: 16 on three hops, rounded up.
    graph, topology = chain(6, 2, 3), pairwise_cluster(3)
    tasks, _ = played(graph, batch_split(graph, [0, 1, 2]), topology)
    carried = timeline.link_bytes(tasks)
    assert {link: carried[link] for link in ("d0->d1", "d1->d2", "d2->d0")} == dict.fromkeys(("d0->d1", "d1->d2", "d2->d0"), 32 + 6)
    assert carried["d1->d0"] == 0
    assert timeline.bytes_moved(tasks) == 96 + 16


@given(cases(max_moves=4, servers=True, ports=True), st.booleans())
def test_parts_of_the_critical_path_add_up_where_links_are_shared(case: tuple[OperatorGraph, Topology, Strategy], launched: bool) -> None:
    graph, topology, chosen = case
    costs = (LaunchedCosts if launched else RooflineCosts)(topology)
    tasks = lower(build_plan(graph, chosen, topology), topology, costs)
    schedule = simulate(tasks)
    path = timeline.critical_path(tasks, schedule)
    parts = timeline.path_parts_ns(schedule, path)
    assert min(parts) >= 0 and sum(parts) == schedule.makespan_ns == sum(timeline.critical_path_ns(tasks, schedule).values())


@given(cases(max_moves=4))
@FEW
def test_what_holds_for_every_schedule(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    tasks, schedule = played(graph, chosen, topology)
    path = timeline.critical_path(tasks, schedule)
    start, end = schedule.start_ns.tolist(), schedule.end_ns.tolist()
    assert start[path[0]] == 0
    assert all(start[b] in (end[a], end[a] - tasks.tasks[a].latency_ns) for a, b in pairwise(path))
    assert sum(timeline.path_parts_ns(schedule, path)) == schedule.makespan_ns
    by_kind = timeline.critical_path_ns(tasks, schedule)
    assert sum(by_kind.values()) == schedule.makespan_ns and set(by_kind) == {tasks.tasks[p].kind for p in path}
    shown = complete(timeline.chrome_trace(tasks, schedule))
    assert len(shown) == sum(len(task.resources) for task in tasks.tasks)
    assert max(timeline.busy_time_ns(tasks).values()) <= schedule.makespan_ns
    crossings = sum(len(task.resources) > 0 for task in tasks.tasks if task.bytes)
    assert (timeline.bytes_moved(tasks) > 0) == (crossings > 0)
    assert sum(timeline.link_bytes(tasks).values()) >= timeline.bytes_moved(tasks)
