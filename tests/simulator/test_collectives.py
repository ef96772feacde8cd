"""Exchanges and trees: what they put on links, and how long they take."""

from __future__ import annotations

import pytest

from soap.plan.collectives import exchange_seconds, flow_links, tree_rounds
from soap.simulator.communication.algorithms import Algorithm
from soap.simulator.communication.allreduce import allreduce_options
from tests.strategies import CPU, cluster


def test_a_reduce_scatter_is_half_of_a_rings_all_reduce_on_one_switch() -> None:
    topology, members, cell = cluster([4], CPU), range(4), 1_000_000
    flows = [(a, b, cell) for a in members for b in members if a != b]
    scattered = exchange_seconds(topology, flows, 3 * cell)
    assert scattered == pytest.approx(3 * 20e-6 + 3 * cell / 1e9 + 3 * cell / (1e10 / 3))
    gathered = exchange_seconds(topology, flows)
    ring = allreduce_options(topology, members)[0]
    assert ring.algorithm is Algorithm.RING
    assert scattered + gathered == pytest.approx(ring.latency_seconds + ring.seconds_per_byte * 4 * cell)


def test_uneven_flows_wait_for_the_fullest_link() -> None:
    topology = cluster([2, 1])  # the network has a tenth of the bandwidth
    flows = [(0, 1, 5000), (0, 2, 3000), (1, 2, 1000)]
    assert exchange_seconds(topology, flows) == pytest.approx(2 * 40e-6 + 4000 / 1e8)
    carried = {topology.links[link].name: size for link, size in flow_links(topology, flows).items()}
    assert carried["host0/device0>host0/switch"] == 8000
    assert carried["host0/switch>network"] == carried["host1/switch>host1/device0"] == 4000
    assert exchange_seconds(topology, []) == 0.0


@pytest.mark.parametrize(("count", "expected"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_a_tree_reaches_everybody_once(count: int, expected: int) -> None:
    rounds = tree_rounds([7, *range(count - 1)], 10)
    assert len(rounds) == expected
    have = {7}
    for flows in rounds:
        assert {source for source, _, _ in flows} <= have and len({source for source, _, _ in flows}) == len(flows)
        have |= {target for _, target, _ in flows}
    assert sorted(target for flows in rounds for _, target, _ in flows) == list(range(count - 1))
