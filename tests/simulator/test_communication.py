"""What communication costs: messages by hand, and that kept answers are the formulas' own."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.overheads import CpuOverhead, Port, Share
from soap.cluster.topology import Topology
from soap.plan.collectives import exchange_seconds, tree_rounds
from soap.simulator.communication import prices
from soap.simulator.communication.algorithms import fastest
from soap.simulator.communication.allreduce import allreduce_options
from soap.simulator.communication.prices import Communication
from soap.simulator.costs import nanoseconds
from soap.simulator.task_list import TaskList
from soap.simulator.tasks import TaskKind
from tests.strategies import cluster, topologies


def test_messages_wait_for_every_latency_and_the_narrowest_link() -> None:
    made = Communication(cluster([1, 1]))
    assert made.transfer_ns(1_000_000, 0, 1) == pytest.approx(4 * 10_000 + 1_000_000 / 1e8 * 1e9, abs=1)
    assert made.transfer_ns(0, 0, 1) == pytest.approx(4 * 10_000, abs=1)
    assert made.transfer_ns(1_000_000, 1, 1) == 1


@given(topologies(max_devices=5), st.lists(st.integers(0, 10**7), min_size=1, max_size=4), st.data())
def test_kept_answers_are_the_formulas(topology: Topology, sizes: list[int], data: st.DataObject) -> None:
    made, ends = Communication(topology), st.integers(0, topology.device_count - 1)
    source, target = data.draw(ends), data.draw(ends)
    group = tuple(sorted(data.draw(st.sets(ends, min_size=1))))
    flows = tuple((a, b, size) for a in group for b in group if a != b for size in sizes[:1])
    for size in [*sizes, *sizes]:
        latency_seconds, seconds_per_byte = made.route_figures(source, target)
        assert made.transfer_ns(size, source, target) == nanoseconds(latency_seconds + seconds_per_byte * size)
        best = fastest(allreduce_options(topology, group), size)
        assert made.allreduce(size, group) == (best.duration_ns(size), best.links)
        assert made.exchange_ns(flows, size) == nanoseconds(exchange_seconds(topology, flows, size))


def test_exchanges_are_forgotten_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "CACHE_ENTRIES", 1)
    made = Communication(cluster([2]))
    before = [made.exchange_ns([(0, 1, size)]) for size in (10, 20_000_000)]
    assert [made.exchange_ns([(0, 1, size)]) for size in (10, 20_000_000)] == before
    assert before[0] < before[1]


def test_hash_follows_the_figures() -> None:
    base = cluster([2])
    faster = replace(base, links=tuple(replace(link, bandwidth_bytes_per_second=2e9) for link in base.links))
    near = replace(base, links=tuple(replace(link, latency_seconds=0.0) for link in base.links))
    wide = replace(base, devices=tuple(replace(d, type=replace(d.type, memory_bandwidth_bytes_per_second=1e12)) for d in base.devices))
    assert Communication(base).hash == Communication(cluster([2])).hash
    assert len({Communication(topology).hash for topology in (base, faster, near, wide, cluster([3]))}) == 5


def test_survives_pickling() -> None:
    made = Communication(cluster([2, 2]))
    made.allreduce(1000, (0, 1, 2))
    copy = pickle.loads(pickle.dumps(made))
    assert copy.hash == made.hash
    assert copy.allreduce(1000, (0, 1, 2)) == made.allreduce(1000, (0, 1, 2))


def test_a_message_is_handled_by_the_slowest_port_s_call_and_the_narrowest_link_s_bytes() -> None:
    base = cluster([1, 1])
    first, *between, last = base.route(0, 1)
    made = Communication(replace(base, ports=(Port(first, 0, 30, 400), Port(between[0], None, 50, 100), Port(last, 1, 20, 300))))
    assert made.message_share(0, 1) == Share(50, 100)
    assert made.message_share(1, 0) == Share(0, 0)
    assert Communication(base).message_share(0, 1) == Share(0, 0)


def test_lowering_says_for_how_long_communication_keeps_devices_busy() -> None:
    """Sums by the number of devices, exchanges by the most messages of one, broadcasts as sums, messages by their ports."""
    base = cluster([1, 1, 1])
    overhead = CpuOverhead(((2, Share(200, 0)), (3, Share(300, 500))), ((2, Share(2000, 0)), (3, Share(3000, 100))))
    ports = tuple(Port(link, None, 7, 0) for link in base.route(0, 1))
    tasks = TaskList(Communication(replace(base, ports=ports, cpu_overhead=overhead)))
    all_to_all = tuple((a, b, 10**6) for a in range(3) for b in range(3) if a != b)
    tree = [(tuple(flows), 0) for flows in tree_rounds((0, 1, 2), 10**6)]
    tasks.message((0,), "message", TaskKind.TRANSFER, 0, 1, 10**6, ())
    tasks.all_reduce((1,), "sum", TaskKind.REDUCE, 10**6, (0, 1, 2), ())
    tasks.all_reduce((2,), "sum of two", TaskKind.REDUCE, 10**6, (0, 1), ())
    tasks.exchange((3,), "exchange", TaskKind.EXCHANGE, [(all_to_all, 0)], ())
    tasks.exchange((4,), "two rounds", TaskKind.SYNC, [(all_to_all[:1], 0), (all_to_all[1:2], 0)], ())
    tasks.tree((5,), "broadcast", TaskKind.EXCHANGE, tree, ())
    duration = {task.name: task.duration_ns for task in tasks.tasks}
    assert {task.name: task.cpu_overhead_ns for task in tasks.tasks} == {
        "message": 7,
        "sum": 300 + duration["sum"] // 2,
        "sum of two": 200,
        "exchange": 3000 + duration["exchange"] // 10,
        "two rounds": 2000,
        "broadcast": 300 + duration["broadcast"] // 2,
    }
