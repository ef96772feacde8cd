"""Sums on clusters with ports, and long ones between GPUs, are chains of chunks, which together are the sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.overheads import CpuOverhead, Port, Share
from soap.plan.plan import sync_name
from soap.simulator.analysis.timeline import busy_time_ns, chrome_trace, link_bytes
from soap.simulator.analysis.timeline_file import Description, dumps, loads
from soap.simulator.chunks import GPU_CHUNK_NS, MOST_CHUNKS, NO_CHUNKS, chunk_count, parts, shortest_chunk_ns
from soap.simulator.communication.prices import Communication
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import simulate
from soap.simulator.task_list import TaskList
from soap.simulator.tasks import TaskGraph, TaskKind
from tests.simulator.examples import PointCosts, batch_split, chain, pairwise_cluster
from tests.simulator.reference_memory.as_run import as_run
from tests.simulator.reference_memory.task_spans import TaskSpans
from tests.strategies import cluster

PLAIN = pairwise_cluster(1, 1)
GPUS = cluster([1, 1])
PORTS = replace(PLAIN, ports=(Port(0, 0, 0, 0), Port(1, 1, 0, 0)), cpu_overhead=CpuOverhead(((2, Share(1001, 0)),), ((2, Share(1001, 0)),)))


@given(st.integers(0, 2**50), st.integers(1, MOST_CHUNKS))
def test_parts_are_equal_and_make_the_whole(whole: int, count: int) -> None:
    found = parts(whole, count)
    assert len(found) == count and sum(found) == whole and max(found) - min(found) <= 1


@pytest.mark.parametrize(("duration_ns", "count"), [(0, 1), (1, 1), (5, 5), (10**9, MOST_CHUNKS)])
def test_no_chunk_takes_no_time(duration_ns: int, count: int) -> None:
    assert chunk_count(duration_ns) == count


@pytest.mark.parametrize(("duration_ns", "count"), [(0, 1), (199_999, 1), (200_000, 2), (799_999, 7), (10**9, MOST_CHUNKS)])
def test_short_sums_between_gpus_are_left_whole(duration_ns: int, count: int) -> None:
    assert chunk_count(duration_ns, GPU_CHUNK_NS) == count
    assert chunk_count(duration_ns, NO_CHUNKS) == 1


def test_where_sums_are_cut() -> None:
    mixed = replace(GPUS, devices=(GPUS.devices[0], replace(GPUS.devices[1], type=PLAIN.devices[1].type)))
    assert [shortest_chunk_ns(own) for own in (PLAIN, PORTS, GPUS, mixed)] == [NO_CHUNKS, 1, GPU_CHUNK_NS, NO_CHUNKS]


def test_a_message_passes_a_long_sum_between_gpus() -> None:
    """Two GPUs sum gradients for a second; a message that becomes ready meanwhile waits for an eighth of that at most."""
    tasks = TaskList(Communication(GPUS))
    for device in (0, 1):
        tasks.add((0, 0, 0, 0, 0, device), f"tile {device}", TaskKind.FORWARD, (device,), 10**6, ())
    tasks.all_reduce((2, 0, 0, 0, 0, 0), "sum", TaskKind.SYNC, 10**9, (0, 1), (), chunked=True)
    message = tasks.message((1, 0, 0, 0, 0, 0), "message", TaskKind.TRANSFER, 0, 1, 1000, (0,))
    made = [task for task in tasks.tasks if task.name == "sum"]
    schedule = simulate(TaskGraph(two_plans()[0].plan, GPUS, tuple(tasks.tasks)))
    assert len(made) == MOST_CHUNKS
    assert 10**6 < schedule.start_ns[message] <= made[0].duration_ns
    whole = sum(task.duration_ns for task in made)
    assert whole <= schedule.makespan_ns < whole * 1.01  # no bandwidth is lost


@pytest.mark.parametrize("kind", ["sum", "rows"])
def test_chunks_together_are_the_whole(kind: str) -> None:
    made = []
    for topology in (PLAIN, PORTS):
        tasks = TaskList(Communication(topology))
        first = tasks.add((0, 0, 0, 0, 0, 0), "before", TaskKind.FORWARD, (0,), 1, ())
        if kind == "sum":
            last = tasks.all_reduce((2, 0, 0, 0, 0, 0), "whole", TaskKind.SYNC, 10**6, (0, 1), (first,), chunked=True)
        else:
            rounds = [(((0, 1, 10**6), (1, 0, 10**6)), 0)]
            last = tasks.exchange((2, 0, 0, 0, 0, 0), "whole", TaskKind.SYNC, rounds, (first,), chunked=True)
        assert last == len(tasks.tasks) - 1
        made.append(tasks.tasks[1:])
    (whole,), chunks = made
    assert [task.chunk for task in chunks] == list(range(MOST_CHUNKS)) and whole.chunk is None
    assert [task.predecessors for task in chunks] == [(k,) for k in range(MOST_CHUNKS)]
    assert {(task.name, task.kind, task.resources, task.latency_ns) for task in chunks} == {("whole", whole.kind, whole.resources, 0)}
    assert sum(task.duration_ns for task in chunks) == whole.duration_ns
    assert sum(task.cpu_overhead_ns for task in chunks) == 1001
    assert sum(task.bytes for task in chunks) == chunks[-1].bytes == whole.bytes
    assert chunks[-1].flows == whole.flows and not any(task.flows for task in chunks[:-1])


def two_plans() -> tuple[TaskGraph, TaskGraph]:
    graph = chain(4, 2, 3)
    plain, ports = (lower(build_plan(graph, batch_split(graph, [0, 1]), own), own, PointCosts()) for own in (PLAIN, PORTS))
    return plain, ports


def test_what_is_told_of_a_sum_is_told_of_all_its_chunks() -> None:
    """Bytes and busy times are those of the whole; a timeline that is read again has one task, from the first chunk's start on."""
    plain, ports = two_plans()
    assert len(ports.tasks) == len(plain.tasks) + MOST_CHUNKS - 1
    schedule = simulate(ports)
    assert link_bytes(ports) == link_bytes(plain) and busy_time_ns(ports) == busy_time_ns(plain)
    name = sync_name(ports.plan.syncs[0])
    chunks = [position for position, task in enumerate(ports.tasks) if task.name == name]
    span = int(schedule.start_ns[chunks[0]]), int(schedule.end_ns[chunks[-1]])
    assert TaskSpans(ports, as_run(ports, schedule)).named[name] == span
    described = Description("predicted", "m", "1", "c", "2", "3", 1, schedule.makespan_ns, link_bytes=link_bytes(ports))
    (read,) = loads(dumps([(chrome_trace(ports, schedule), described)]))
    task = read.tasks[name]
    assert (task.start_ns, task.end_ns, task.duration_ns) == (*span, span[1] - span[0])
    assert len(task.threads) == len(set(task.threads)) == len(ports.tasks[chunks[0]].resources)
    assert task.bytes == ports.tasks[chunks[-1]].bytes
