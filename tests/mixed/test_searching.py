"""Which workers are best: on a small cluster of unequal hosts, by memory, by what leaves hosts, and against all policies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cluster.fewer import without
from soap.cluster.presets import preset
from soap.cluster.topology import Topology
from soap.elastic.faults import ElasticError
from soap.mixed.partitioning import POLICIES, Allocation, allocations, host_bytes, node_partition, placed
from soap.mixed.steady import Finder
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.tracing.load import load_model
from tests.elastic.stars import star
from tests.strategies import GPU


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return load_model("zoo:alexnet:tiny", plan_only=True).graph


def hosts(*names: str) -> Topology:
    """Two GPUs of each of these hosts of HetPipe's cluster."""
    whole = preset("thesis-4x4")
    return without(whole, [d.index for d in whole.devices if whole.hosts[d.host].name not in names or d.name[-1] in "23"])


def finder(graph: OperatorGraph, topology: Topology, bound: int | None = 1) -> Finder:
    return Finder(graph, topology, RooflineCosts(topology, 0), bound)


def test_policies_differ_in_what_leaves_hosts(graph: OperatorGraph) -> None:
    """ED sends parameters and activations; ED-local activations alone; NP parameters alone."""
    topology = hosts("titanrtx", "p4000")
    own = finder(graph, topology)
    found = {name: own.with_in_flight(make(topology), 2).steady for name, make in POLICIES.items()}
    moved = {name: (steady.parameter_bytes > 0, steady.activation_bytes > 0) for name, steady in found.items()}
    assert moved == {"NP": (True, False), "ED": (True, True), "ED-local": (False, True), "HD": (True, True)}
    assert found["ED"].activation_bytes == found["ED-local"].activation_bytes


@pytest.mark.slow
def test_all_workers_have_as_many_in_flight_as_the_least_has_memory_for(graph: OperatorGraph) -> None:
    """NP suffers from its smallest host, ED does not: there all workers are alike, and the small device gets a small stage."""
    topology = hosts("titanrtx", "p4000")
    whole = sum(tensor.bytes for tensor in graph.parameters)
    small = replace(topology, limits=(1000 * whole, 1000 * whole, 80 * whole, 80 * whole))
    own = finder(graph, small)
    most = {name: own.best_in_flight(POLICIES[name](small)).most_in_flight for name in ("NP", "ED")}
    assert max(most["NP"]) == 16 > min(most["NP"]) and min(most["NP"]) < min(most["ED"]) == max(most["ED"])
    found = own.best_in_flight(POLICIES["NP"](small))
    assert found.in_flight <= min(most["NP"])
    with pytest.raises(ElasticError, match=rf"16 minibatches in flight of allocation 'NP'; expected 1 to {min(most['NP'])}: memory"):
        own.with_in_flight(POLICIES["NP"](small), 16)
    with pytest.raises(ElasticError, match=r"a worker on .*p4000.* fits no stages into memory, .*; the largest layer alone, from '"):
        nothing = replace(topology, limits=(100 * whole, 100 * whole, whole // 4, whole // 4))
        finder(graph, nothing).best_in_flight(POLICIES["NP"](nothing))


def test_promising_divisions_come_in_the_order_of_what_their_slowest_stages_allow(graph: OperatorGraph) -> None:
    topology = hosts("titanrtx", "p4000")
    own = finder(graph, topology)
    rated = [own.allowed_rate(one) for one in own.promising(100)]
    assert rated == sorted(rated, reverse=True) and len(rated) == len(list(allocations(topology)))


@pytest.mark.long
def test_the_best_is_no_slower_than_any_policy(graph: OperatorGraph) -> None:
    topology = hosts("titanrtx", "p4000")
    own = finder(graph, topology)
    best = own.best()
    rates = {name: own.best_in_flight(make(topology)).steady.samples_per_second for name, make in POLICIES.items()}
    assert best.steady.samples_per_second >= max(rates.values())
    mine = Allocation("mine", ((0, 1, 2, 3),))
    assert own.best([mine]).steady.samples_per_second >= best.steady.samples_per_second


def test_a_bound_below_none_is_refused(graph: OperatorGraph) -> None:
    with pytest.raises(ElasticError, match="a bound of -1 waves; expected 0 or more, or none"):
        finder(graph, hosts("titanrtx"), -1)


def test_hosts_without_room_for_servers_are_refused() -> None:
    """D = 1, two workers of one GPU each with half of the parameters on either host: three versions, two more while one is made, three
    pushes that wait, two questions and two answers; and the GPU's own three waves."""
    graph = load_model("zoo:alexnet:tiny@4", plan_only=True).graph
    size = sum(tensor.bytes for tensor in graph.parameters if tensor.requires_grad)
    topology = star([GPU, GPU], 1e9)
    allocation = node_partition(topology)
    found = Finder(graph, topology, RooflineCosts(topology), 1).with_in_flight(allocation, 1)
    needed = host_bytes(topology, found.plans, placed(topology, allocation, found.plans), 1)
    assert needed == tuple((3 + 2 + 3 + 4) * (size // 2) + 3 * size for _ in range(2))
    for lacking in (0, 1):
        hosts = tuple(replace(host, memory_bytes=needed[0] - lacking) for host in topology.hosts)
        finder = Finder(graph, replace(topology, hosts=hosts), RooflineCosts(topology), 1)
        if lacking:
            with pytest.raises(ElasticError, match=r"updates of 2 workers need .* on host 'host0', which has .*; expected"):
                finder.best_in_flight(allocation)
        else:
            finder.with_in_flight(allocation, 1)
