"""What communication costs: messages by hand, and that kept answers are the formulas' own."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soap.simulator import communication
from soap.simulator.allreduce import allreduce_options, fastest
from soap.simulator.collectives import exchange_seconds
from soap.simulator.communication import Communication
from soap.simulator.costs import nanoseconds
from soap.topology import Topology
from tests.strategies import cluster, topologies


def test_messages_wait_for_every_latency_and_the_narrowest_link() -> None:
    made = Communication(cluster([1, 1]))
    assert made.transfer_ns(1_000_000, 0, 1) == pytest.approx(4 * 10_000 + 1_000_000 / 1e8 * 1e9, abs=1)
    assert made.transfer_ns(0, 0, 1) == pytest.approx(4 * 10_000, abs=1)
    assert made.transfer_ns(1_000_000, 1, 1) == 1


@given(topologies(max_devices=5), st.lists(st.integers(0, 10**7), min_size=1, max_size=4), st.data())
@settings(max_examples=40, deadline=None)
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
    monkeypatch.setattr(communication, "CACHE_ENTRIES", 1)
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
