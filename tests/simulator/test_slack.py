"""Slack is never negative, and a task that ends so much later does not make the iteration longer: played again with the order kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from soap.cluster.overheads import Port
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.analysis.slack import service_order, slack_ns
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import simulate
from soap.simulator.tasks import Schedule, Task, TaskGraph, TaskKind
from soap.strategy.config import Strategy
from tests.simulator.examples import LaunchedCosts, chain, on, pairwise_cluster
from tests.simulator.examples import strategy as strategy_of
from tests.strategies import cases

WITH_PORTS = cases(max_moves=4, servers=True, ports=True)


def played(graph: OperatorGraph, topology: Topology, strategy: Strategy, *, launched: bool = False) -> tuple[TaskGraph, Schedule]:
    tasks = lower(build_plan(graph, strategy, topology), topology, (LaunchedCosts if launched else RooflineCosts)(topology))
    return tasks, simulate(tasks)


def ends_later(tasks: TaskGraph, schedule: Schedule, by_ns: Mapping[int, int]) -> list[int]:
    """When each task ends if some of them end ``by_ns`` later and keep what they hold till then, every device and link keeps its order,
    and tiles take as long as they did. The loop of ``reference.simulate``, without its queue."""
    first_link = tasks.topology.device_count
    port_device = {first_link + port.link: port.device for port in tasks.topology.ports}
    ends: dict[int, int] = {}
    free: dict[int, int] = {}
    passable: dict[int, int] = {}
    launched: dict[int, int] = {}
    for i in service_order(tasks, schedule):
        task = tasks.tasks[i]
        ready = max((ends[p] for p in task.predecessors), default=0)
        if task.tile is not None or task.yields:
            start = max([ready, *(free.get(r, 0) for r in task.resources)])
            if task.launch_ns:
                (device,) = task.resources
                launched[device] = launched.get(device, 0) + task.launch_ns
                start = max(start, launched[device] - min(task.launch_ns, task.duration_ns))
            ends[i] = start + int(schedule.end_ns[i] - schedule.start_ns[i]) + by_ns.get(i, 0)
            free.update(dict.fromkeys(task.resources, ends[i] - task.latency_ns))
        else:
            links = [r for r in task.resources if r >= first_link]
            start = max([ready, *(passable.get(r, 0) for r in links), *(free.get(r, 0) for r in task.resources if r < first_link)])
            shared = max([0, *(free.get(r, 0) - start for r in links)])
            ends[i] = start + task.duration_ns + min(task.held_ns, shared) + by_ns.get(i, 0)
            left = ends[i] - task.latency_ns
            for r in task.resources:
                passable[r], before = left, free.get(r, 0)
                free[r] = max(left, before + task.held_ns) if r >= first_link and before > start else left
        for device in {port_device.get(r) for r in task.resources} - {None}:
            assert device is not None
            free[device] = max(free.get(device, 0), start) + task.cpu_overhead_ns
    return [ends[i] for i in range(len(tasks.tasks))]


@given(WITH_PORTS, st.integers(0, 10**6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_task_may_end_later_by_its_slack(case: tuple[OperatorGraph, Topology, Strategy], pick: int, launched: bool) -> None:
    graph, topology, strategy = case
    tasks, schedule = played(graph, topology, strategy, launched=launched)
    assert ends_later(tasks, schedule, {}) == schedule.end_ns.tolist()
    slack = slack_ns(tasks, schedule)
    assert min(slack) == 0
    for task in {(pick + i * 7) % len(slack) for i in range(8)}:
        assert max(ends_later(tasks, schedule, {task: slack[task]})) == schedule.makespan_ns


@given(cases(max_moves=4, servers=True), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_without_ports_it_may_end_no_later(case: tuple[OperatorGraph, Topology, Strategy], pick: int) -> None:
    tasks, schedule = played(*case)
    slack = slack_ns(tasks, schedule)
    assert min(slack) == 0
    for task in {(pick + i * 7) % len(slack) for i in range(8)}:
        assert max(ends_later(tasks, schedule, {task: slack[task]})) == schedule.makespan_ns
        assert max(ends_later(tasks, schedule, {task: slack[task] + 1})) == schedule.makespan_ns + 1


def slacks(*tasks: Task) -> list[int]:
    """Of tasks on two devices (0, 1) and the links between them (2, 3), both with a port at device 0."""
    topology = replace(pairwise_cluster(1, 1), ports=(Port(0, 0, 0, 0), Port(1, 0, 0, 0)))
    graph = chain(4, 2, 3)
    plan = build_plan(graph, strategy_of(l1=on(0, degrees=(1, 1, 1)), loss=on(1, degrees=(1,))), topology)
    made = TaskGraph(plan, topology, tasks)
    return slack_ns(made, simulate(made))


def task(number: int, resource: int, duration_ns: int, *after: int, cpu_overhead_ns: int = 0, yields: bool = False) -> Task:
    kind = TaskKind.SYNC if yields else TaskKind.TRANSFER
    return Task((number,), f"{number}", kind, (resource,), duration_ns, after, cpu_overhead_ns=cpu_overhead_ns, yields=yields)


def test_what_yields_may_end_later_if_nobody_shares_longer_for_that() -> None:
    shared = (task(1, 0, 30), task(2, 2, 20, 1), task(3, 1, 60, 2))
    assert slacks(task(0, 2, 100, yields=True), *shared, task(4, 0, 10, 0)) == [20, 0, 0, 0, 20]
    assert slacks(task(0, 2, 40, yields=True), *shared, task(4, 0, 10, 0)) == [0, 10, 0, 0, 70]


def test_who_makes_a_communication_ready_makes_its_port_s_device_busy() -> None:
    ahead, message, beside, behind = task(0, 1, 10), task(1, 2, 5, 0, cpu_overhead_ns=50), task(2, 1, 5, 0), task(3, 0, 10, 2)
    assert slacks(ahead, message, beside, behind) == [0, 55, 45, 0]
