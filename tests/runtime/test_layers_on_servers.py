"""Layers on servers train like one process: front on workers, tail on one or two devices of servers, wherever the model is cut."""

from __future__ import annotations

import pytest

from soap.cluster.topology import Topology
from soap.strategy.ralp import cut_at, front_parameters, tails
from tests.extent import often
from tests.runtime.pool import Pool
from tests.runtime.sparse_plans import hosts
from tests.runtime.test_sharded_state import assert_trains
from tests.runtime.test_sharded_state import files as files  # a fixture
from tests.runtime.traced import traced
from tests.strategies import with_servers

ONE, TWO = with_servers(hosts(2, 1), 1), with_servers(hosts(1, 1, 1, 1), 2)


@pytest.mark.parametrize("share", often((0.2, 0.5, 0.8), (0.5,)))
@pytest.mark.parametrize(("topology", "count"), [(ONE, 1), (TWO, 1), (TWO, 2)])
@pytest.mark.parametrize("name", often(("odd", "shared"), ("odd",)))
def test_trains_like_one_process(four: Pool, files: dict[str, str], name: str, topology: Topology, count: int, share: float) -> None:
    """With Adam and clipping. "shared": tied parameters, which the front and the tail may both use. One batch is smaller."""
    graph = traced(files[name]).graph
    cut, tail = round(share * len(graph.operators)), tails(topology, count)[0]
    strategy = cut_at(graph, topology, cut, tail)
    assert {device for op in graph.operators[cut:] for device in strategy.operators[op.name].devices} == {*tail}
    assert front_parameters(graph, cut)
    assert_trains(four, files, name, strategy, topology, sizes=((6, 6), (6, 4), (6, 6)), clip_norm=0.05)
