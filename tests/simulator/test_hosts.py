"""What parameter servers beside accelerators keep in the hosts' main memory: by hand, against the same servers on CPUs, and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from soap.cluster.topology import Topology
from soap.errors import InfeasibleError
from soap.model.graph import OperatorGraph
from soap.plan.syncs.amounts import COUNT_BYTES
from soap.profiles.roofline import RooflineCosts
from soap.search.chains import search
from soap.search.options import SearchOptions
from soap.simulator.compiled.memory_sum import FITS, UNKNOWN
from soap.simulator.engine import Engine
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.lowering import build_plan
from soap.simulator.memory.hosts import host_use, hosts_may_lack, lacking_on_hosts
from soap.simulator.memory.memory_sum import MemorySum
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel
from soap.strategy.config import Strategy
from soap.strategy.offloading import with_offload
from soap.strategy.sync import parameter_server, synchronized
from tests.extent import MANY
from tests.graph_builder import mlp
from tests.simulator.reference_memory.any_order import held_for_syncs, kept_parameters
from tests.simulator.reference_memory.sizes import host_copies
from tests.strategies import CPU, GPU, cases, cluster

MLP = mlp(widths=(16, 32), classes=4)
WEIGHTS = [16 * 32 * 4, 32 * 4, 32 * 4 * 4, 4 * 4]
"""Bytes of the parameters: two linear layers with biases."""


def with_memory(topology: Topology, memory_bytes: int | None) -> Topology:
    return replace(topology, hosts=tuple(replace(host, memory_bytes=memory_bytes) for host in topology.hosts))


def on_servers(graph: OperatorGraph, topology: Topology, partitions: int = 1) -> Strategy:
    served = synchronized(graph, parameter_server(partitions), sparse=False)
    return data_parallel(graph, topology).with_changes(parameters=served)


def test_a_host_keeps_values_sums_states_and_what_comes_in() -> None:
    topology = cluster([2], GPU)
    assert sorted(tensor.bytes for tensor in MLP.parameters) == sorted(WEIGHTS)
    for states in (0, 1, 2):
        plan = build_plan(MLP, on_servers(MLP, topology), topology)
        counts = 4 * len(WEIGHTS) if states > 1 else 0  # Adam counts its steps
        assert host_use(plan, topology, states) == ((2 + states) * sum(WEIGHTS) + counts + 2 * sum(WEIGHTS),)  # both devices push


def test_without_servers_or_beside_cpus_hosts_keep_nothing() -> None:
    for topology, strategy in ((cluster([2, 2], GPU), data_parallel), (cluster([2, 2], CPU), on_servers)):
        assert host_use(build_plan(MLP, strategy(MLP, topology), topology), topology) == (0, 0)


@MANY
@given(cases(servers=True))
def test_what_servers_take_is_on_hosts_what_it_would_be_on_cpus(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, drawn = case
    drawn = with_offload(drawn, [name for name, own in drawn.operators.items() if own.offload], False)  # of activations
    syncs = drawn.parameters.items()  # compressed ones, and what readers own in parts, CPUs keep in other buffers than GPUs
    exact = {name: sync for name, sync in syncs if not sync.contract.compresses and sync.owner != "parts"}
    strategy, found = Strategy(drawn.operators, exact), []
    for kind in (CPU, GPU):
        own = replace(topology, devices=tuple(replace(device, type=kind) for device in topology.devices), ports=())
        plan = build_plan(graph, strategy, own)
        values, gradients, updated = kept_parameters(plan)
        sizes = (values, gradients, [2 * size for size in updated], host_copies(plan), *held_for_syncs(plan).values())
        devices = [sum(each) for each in zip(*sizes, strict=True)]
        by_host = [0] * len(own.hosts)
        for device, size in zip(own.devices, devices, strict=True):
            by_host[device.host] += size
        hosts = host_use(plan, own, 2)
        for number in plan.on_servers | plan.offloaded:  # hosts' use counts Adam's number of steps
            for device in plan.accelerators.intersection(plan.shards[number].devices):
                by_host[own.devices[device].host] -= COUNT_BYTES
        found.append([a + b for a, b in zip(by_host, hosts, strict=True)])
        assert (kind is GPU) or hosts == (0,) * len(own.hosts)
        assert lacking_on_hosts(hosts, with_memory(own, None)) == 0
        assert lacking_on_hosts(hosts, with_memory(own, 1)) == sum(max(0, size - 1) for size in hosts)
        offloading = any(sync.offload for sync in strategy.parameters.values())
        assert hosts_may_lack(graph, own, offloading=offloading) or max(hosts) <= own.hosts[0].memory_bytes
    assert found[0] == found[1]


def test_little_memory_of_hosts_concerns_only_plans_that_use_it() -> None:
    """Of others the sum over devices says that they fit."""
    topology = with_memory(cluster([2], GPU), 1)
    assert hosts_may_lack(MLP, topology)
    engine = Engine(Shared(MLP, topology, RooflineCosts(topology)))
    memory, usual = MemorySum(engine, topology.memory_limits), data_parallel(MLP, topology)
    kept = with_offload(usual, [MLP.operators[0].name], True)
    verdicts = []
    for own in (usual, on_servers(MLP, topology), kept):
        engine.load(own)
        verdicts.append(memory.verdict())
    assert verdicts == [FITS, UNKNOWN, UNKNOWN]


def test_a_bound_without_plans_is_never_below_any_plan() -> None:
    topology = cluster([2, 2], GPU)
    most = max(host_use(build_plan(MLP, on_servers(MLP, topology, count), topology), topology)[0] for count in (1, 2, 3))
    assert hosts_may_lack(MLP, with_memory(topology, most - 1)) and not hosts_may_lack(MLP, with_memory(topology, 2**34))
    assert not hosts_may_lack(MLP, with_memory(topology, None)) and not hosts_may_lack(MLP, cluster([2], replace(CPU, memory_bytes=1)))


@pytest.mark.slow
def test_plans_that_overflow_a_host_are_refused_everywhere() -> None:
    topology = cluster([2], GPU)
    strategy = on_servers(MLP, topology)
    (use,) = host_use(build_plan(MLP, strategy, topology), topology)
    for memory, lacking in ((use, 0), (use - 5, 5), (None, 0)):
        tight = with_memory(topology, memory)
        simulator = Simulator(MLP, tight, RooflineCosts(tight))
        found = simulator.run(strategy)
        assert (found.overflow_bytes, found.fits, found.host_memory) == (lacking, lacking == 0, (use,))
        assert simulator.overflow_bytes(strategy) == lacking
        evaluator = IncrementalSimulator(Simulator(MLP, tight, RooflineCosts(tight)))
        evaluator.makespan_ns(strategy)
        assert evaluator.overflow_bytes(strategy) == lacking


@pytest.mark.slow
def test_searches_never_leave_what_hosts_have() -> None:
    """Servers are so fast that they always pay; but the host has room for small parameters alone."""
    topology = with_memory(cluster([4], replace(GPU, name="slow"), bandwidth_bytes_per_second=1e6), 12_000)
    evaluator = IncrementalSimulator(Simulator(MLP, topology, RooflineCosts(topology)))
    asked = [parameter_server(1), parameter_server(2)]
    found = search(MLP, topology, evaluator, SearchOptions(budget=300, syncs=asked, cores=1, starts=["parameter_server"]))
    plan = build_plan(MLP, found.strategy, topology)
    assert lacking_on_hosts(host_use(plan, topology), topology) == 0
    start = next(start for start in found.starts if start.name == "parameter_server")
    played = evaluator.outcome(start.strategy)
    assert played is not None and not start.fits and start.overflow_bytes == played.overflow_bytes > 0


def test_nothing_but_servers_and_no_room_says_which_host() -> None:
    """Devices hold it; the host does not."""
    graph, topology = MLP, with_memory(cluster([2], GPU), 100)

    class OnlyServers(IncrementalSimulator):
        """An evaluator for which all strategies are on servers."""

        def overflow_bytes(self, strategy: Strategy) -> int:
            return super().overflow_bytes(on_servers(graph, topology))

        def outcome(self, strategy: Strategy):  # type: ignore[no-untyped-def]
            return super().outcome(on_servers(graph, topology))

    evaluator = OnlyServers(Simulator(graph, topology, RooflineCosts(topology)))
    words = r"what servers keep and devices offload on host0 needs 1\d\.\d KiB of main memory, available 100 B, in the closest"
    with pytest.raises(InfeasibleError, match=words):
        search(graph, topology, evaluator, SearchOptions(budget=3, starts=["data_parallel"]))
