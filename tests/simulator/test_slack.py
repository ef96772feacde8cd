"""Slack is never negative, and a task that ends so much later does not make the iteration longer: played again with the order kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.overheads import Port
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.analysis.timeline import service_order, slack_ns
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
    port_device = {tasks.topology.device_count + port.link: port.device for port in tasks.topology.ports}
    ends: dict[int, int] = {}
    free: dict[int, int] = {}
    launched: dict[int, int] = {}
    for i in service_order(tasks, schedule):
        task = tasks.tasks[i]
        start = max([0, *(ends[p] for p in task.predecessors), *(free.get(r, 0) for r in task.resources)])
        if task.launch_ns:
            (device,) = task.resources
            launched[device] = launched.get(device, 0) + task.launch_ns
            start = max(start, launched[device] - min(task.launch_ns, task.duration_ns))
        ends[i] = start + int(schedule.end_ns[i] - schedule.start_ns[i]) + by_ns.get(i, 0)
        free.update(dict.fromkeys(task.resources, ends[i] - task.latency_ns))
        for own in {port_device.get(r) for r in task.resources} - {None}:
            assert own is not None
            free[own] = max(free.get(own, 0), start) + task.cpu_overhead_ns
    return [ends[i] for i in range(len(tasks.tasks))]


@given(WITH_PORTS, st.integers(0, 10**6), st.booleans())
def test_a_task_may_end_later_by_its_slack_and_no_more(case: tuple[OperatorGraph, Topology, Strategy], pick: int, launched: bool) -> None:
    graph, topology, strategy = case
    tasks, schedule = played(graph, topology, strategy, launched=launched)
    assert ends_later(tasks, schedule, {}) == schedule.end_ns.tolist()
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


def task(number: int, resource: int, duration_ns: int, *after: int, cpu_overhead_ns: int = 0) -> Task:
    return Task((number,), f"{number}", TaskKind.TRANSFER, (resource,), duration_ns, after, cpu_overhead_ns=cpu_overhead_ns)


def test_who_makes_a_communication_start_makes_its_port_s_device_busy() -> None:
    ahead, message, beside, behind = task(0, 1, 10), task(1, 2, 5, 0, cpu_overhead_ns=50), task(2, 1, 5, 0), task(3, 0, 10, 2)
    assert slacks(ahead, message, beside, behind) == [0, 55, 45, 0]
    holding, waiting = task(0, 2, 30), task(1, 2, 5, cpu_overhead_ns=50)
    assert slacks(holding, waiting, task(2, 0, 10, 0)) == [0, 55, 0]
