"""Several jobs on one cluster: as if alone where they share nothing, slower where they share links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.api.beside import beside_of
from soap.cluster.fewer import part_of
from soap.cluster.topology import DeviceType, Topology
from soap.errors import StrategyError, TopologyError
from soap.model.graph import OperatorGraph
from soap.plan.offloading import host_update_name
from soap.profiles.roofline import RooflineCosts
from soap.simulator.beside import Job, beside
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.classical import data_parallel
from soap.strategy.ralp import cut_at
from soap.strategy.sync import offloaded
from tests.graph_builder import mlp
from tests.strategies import CPU, GPU, cluster, with_servers

SMALL, LARGE = mlp(batch=8), mlp(batch=32, widths=(64, 128, 64))
TWO_HOSTS = cluster([2, 2], CPU)


def run(graph: OperatorGraph, whole: Topology, *names: str, served: bool = False, away: bool = False) -> Simulation:
    part = part_of(whole, names)
    strategy = cut_at(graph, part, len(graph.operators), part.servers) if served else data_parallel(graph, part)
    strategy = offloaded(graph, strategy) if away else strategy
    return Simulator(graph, part, RooflineCosts(part, 0), 0).run(strategy)


def jobs(whole: Topology, *own: Simulation) -> tuple[Job, ...]:
    return beside([simulation.tasks for simulation in own], whole)


@pytest.mark.parametrize("kind", [CPU, GPU], ids=["cpu", "launched"])
def test_jobs_that_share_nothing_are_as_if_alone(kind: DeviceType) -> None:
    """Each on a host of its own, of very different length; kernels of a GPU are launched for one step at a time."""
    whole = cluster([2, 2], kind)
    one, other = run(SMALL, whole, "host0"), run(LARGE, whole, "host1")
    found = jobs(whole, one, other)
    for own, simulation in zip(found, (one, other), strict=True):
        assert own.step_ns == own.least_ns == own.most_ns == own.alone_ns == simulation.makespan_ns
    assert found[0].steps > found[1].steps >= 16 and [own.slowdown for own in found] == [1.0, 1.0]


def test_jobs_that_share_links_wait_for_each_other() -> None:
    """Both across the same two hosts, each on devices of its own: sums take their turns on the hosts' links."""
    names = ("host0/device0", "host1/device0"), ("host0/device1", "host1/device1")
    one, other = (run(LARGE, TWO_HOSTS, *own) for own in names)
    first, second = jobs(TWO_HOSTS, one, other)
    for own in (first, second):
        assert own.alone_ns == one.makespan_ns < own.step_ns <= 2 * one.makespan_ns
        assert own.least_ns <= own.step_ns <= own.most_ns
    assert jobs(TWO_HOSTS, one)[0].slowdown == 1.0
    busy = sum(task.held_ns for task in one.tasks.tasks if 4 + 4 * 2 in task.resources)  # of a host's way out
    assert first.step_ns >= busy


def test_the_order_of_jobs_does_not_decide() -> None:
    one = run(SMALL, TWO_HOSTS, "host0/device0", "host1/device0")
    other = run(LARGE, TWO_HOSTS, "host0/device1", "host1/device1")
    here, there = jobs(TWO_HOSTS, one, other), jobs(TWO_HOSTS, other, one)
    for own, again in zip(here, reversed(there), strict=True):
        assert own.step_ns == pytest.approx(again.step_ns, rel=0.02)


def test_servers_of_one_host_share_its_cores_and_links() -> None:
    """Each job has a host with two workers and a device of the one server host."""
    whole = with_servers(cluster([2, 2, 2]), 1)
    one = run(LARGE, whole, "host0", "host2/device0", served=True)
    other = run(LARGE, whole, "host1", "host2/device1", served=True)
    first, second = jobs(whole, one, other)
    assert first.slowdown + second.slowdown > 2.02  # each way of the server host is in use for a third of a step by either
    alone = one.tasks.topology
    cores = {core for task in one.tasks.tasks for core in task.resources if core >= alone.device_count + len(alone.links)}
    assert cores and min(cores) == alone.device_count + len(alone.links) + 2 * 4  # of the third host, in the part


def test_offloading_jobs_on_hosts_of_their_own_are_as_if_alone() -> None:
    """Copies and updates of the second host's devices have numbers of their own in the whole cluster, which the part has for others."""
    whole = cluster([3, 2, 1])
    own = [run(LARGE, whole, f"host{host}", away=True) for host in range(3)]
    for found, simulation in zip(jobs(whole, *own), own, strict=True):
        assert found.step_ns == found.least_ns == found.most_ns == found.alone_ns == simulation.makespan_ns
    assert own[1].host_memory[1] > 0 == own[1].host_memory[0]


def test_offloading_jobs_share_their_hosts_cores_alone() -> None:
    """A device alone has its host's four cores, and with the other job's device two of them. Nothing else is shared here: so a step takes
    longer by what the update does. A job that offloads nothing takes none."""
    whole = cluster([2, 2])
    one, other = (run(LARGE, whole, f"host0/device{k}", away=True) for k in range(2))
    (updated,) = [task for task in one.tasks.tasks if task.name == host_update_name(0)]
    first, second = jobs(whole, one, other)
    for found in (first, second):
        assert found.alone_ns == one.makespan_ns and found.step_ns == one.makespan_ns + updated.duration_ns
    calm = jobs(whole, one, run(LARGE, whole, "host0/device1"))
    assert [own.slowdown for own in calm] == [1.0, 1.0]


def test_memory_of_hosts_adds_up_over_jobs() -> None:
    """Each offloads to the one host, which has room for either alone."""
    whole = cluster([2, 1])

    def with_memory(size: int) -> Topology:
        return replace(whole, hosts=tuple(replace(host, memory_bytes=size) for host in whole.hosts))

    needed = [run(graph, whole, f"host0/device{k}", away=True).host_memory[0] for k, graph in enumerate((SMALL, LARGE))]
    assert min(needed) > 0
    for lacking in (0, 1):
        have = with_memory(sum(needed) - lacking)
        own = [run(graph, have, f"host0/device{k}", away=True) for k, graph in enumerate((SMALL, LARGE))]
        assert all(simulation.fits for simulation in own)
        if lacking:
            with pytest.raises(StrategyError, match=r"host 'host0' would hold .* \+ .* of 2 jobs; expected at most its memory, "):
                beside_of(own, have)
        else:
            assert len(beside_of(own, have)) == 2
    apart = [run(SMALL, have, "host0/device0", away=True), run(LARGE, have, "host1/device0", away=True)]
    assert len(beside_of(apart, have)) == 2


def test_three_jobs_are_slower_than_two() -> None:
    whole = cluster([3, 3], CPU)
    own = [run(LARGE, whole, f"host0/device{k}", f"host1/device{k}") for k in range(3)]
    two, three = jobs(whole, *own[:2]), jobs(whole, *own)
    assert min(job.step_ns for job in three) > max(job.step_ns for job in two)


def test_a_part_keeps_what_is_known_of_it() -> None:
    whole = replace(cluster([2, 2], CPU), limits=(1, 2, 3, 4))
    part = part_of(whole, ["host1", "host0/device1"])
    assert [device.name for device in part.devices] == ["host0/device1", "host1/device0", "host1/device1"]
    assert part.limits == (2, 3, 4) and part.hosts == whole.hosts and part.name == "host1, host0/device1 of test"
    assert {link.name: link.bandwidth_bytes_per_second for link in part.links}.items() <= {
        link.name: link.bandwidth_bytes_per_second for link in whole.links
    }.items()
    assert part_of(whole, ["host0", "host1"]) is whole
    with pytest.raises(TopologyError, match="'host9' is no device of cluster 'test', and no host that has some; expected some of host0, "):
        part_of(whole, ["host9"])
    with pytest.raises(TopologyError, match="no devices of cluster 'test' are named; expected one at least"):
        part_of(whole, [])


def test_what_cannot_be_beside_each_other_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = replace(cluster([2, 3], CPU), name="elsewhere")
    with pytest.raises(StrategyError, match="job 2 is for cluster 'elsewhere'; expected cluster 'test' or a part of it"):
        jobs(TWO_HOSTS, run(SMALL, TWO_HOSTS, "host0"), run(SMALL, elsewhere, "host0", "host1"))
    with pytest.raises(StrategyError, match="device 'host0/device0' is in job 1 and in job 2; expected devices of its own for each job"):
        jobs(TWO_HOSTS, run(SMALL, TWO_HOSTS, "host0"), run(SMALL, TWO_HOSTS, "host0/device0"))
    monkeypatch.setattr("soap.simulator.beside.MOST_TASKS", 10)
    with pytest.raises(StrategyError, match=r"beside each other are \d+ tasks; expected at most 10: jobs on fewer devices, or with steps"):
        jobs(TWO_HOSTS, run(SMALL, TWO_HOSTS, "host0"), run(LARGE, TWO_HOSTS, "host1"))
