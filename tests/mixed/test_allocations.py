"""HetPipe's policies on HetPipe's cluster, and all divisions of a small one by hand."""

from __future__ import annotations

import pytest

from soap.cluster.presets import preset
from soap.cluster.yaml_file import parse_cluster
from soap.elastic.faults import ElasticError
from soap.mixed.partitioning import POLICIES, Allocation, allocations, hybrid_distribution, policies
from tests.elastic.stars import star


def hosts_of(name: str) -> list[dict[str, int]]:
    """By worker: host -> how many of its devices."""
    topology = preset("thesis-4x4")
    found = []
    for own in POLICIES[name](topology).workers:
        names = [topology.hosts[topology.devices[device].host].name for device in own]
        found.append({name: names.count(name) for name in names})
    return found


def test_policies_are_those_of_the_paper() -> None:
    """Titan V (V), Titan RTX (R), RTX 2060 (G), Quadro P4000 (Q): NP VVVV, RRRR, GGGG, QQQQ; ED VRGQ four times; HD VVQQ and RRGG, twice
    each; Titan RTX is the quickest on its sheet, so that here it is paired with the P4000."""
    assert hosts_of("NP") == [{"titanv": 4}, {"titanrtx": 4}, {"rtx2060": 4}, {"p4000": 4}]
    assert hosts_of("ED") == hosts_of("ED-local") == [{"titanv": 1, "titanrtx": 1, "rtx2060": 1, "p4000": 1}] * 4
    assert hosts_of("HD") == [{"titanrtx": 2, "p4000": 2}] * 2 + [{"titanv": 2, "rtx2060": 2}] * 2
    assert [own.local for own in policies(preset("thesis-4x4"))] == [False, False, True, False]


def test_all_divisions_of_two_hosts() -> None:
    """Two devices each, a and b: 4 of one; aa + bb or twice ab; one of four."""
    host = "cpu_cores: 4, links: {intra: {kind: switch, bandwidth: 10 GB/s, latency: 1 us}}"
    topology = parse_cluster(
        "hosts:\n"
        f"- {{name: a, devices: {{type: v100-16gb, count: 2}}, {host}}}\n"
        f"- {{name: b, devices: {{type: k80, count: 2}}, {host}}}\n"
        "network: {bandwidth: 1 GB/s, latency: 1 us}\n"
    )
    found = {own.name: own.workers for own in allocations(topology)}
    assert found == {
        "4 workers: 2 of 1 b, 2 of 1 a": ((2,), (3,), (0,), (1,)),
        "2 workers: 2 b, 2 a": ((2, 3), (0, 1)),
        "2 workers: 2 of 1 a + 1 b": ((0, 2), (1, 3)),
        "1 workers: 2 a + 2 b": ((0, 1, 2, 3),),
    }


def test_divisions_of_the_thesis_cluster_take_each_device_once() -> None:
    found = list(allocations(preset("thesis-4x4")))
    assert all(sorted(device for own in one.workers for device in own) == list(range(16)) for one in found)
    assert len({one.name for one in found}) == len(found) > 100
    assert {len(one.workers) for one in found} == {1, 2, 4, 8, 16}


def test_what_does_not_suit_is_said() -> None:
    with pytest.raises(ElasticError, match="HD on 3 hosts with 1 devices; expected two hosts at least, with an even number"):
        hybrid_distribution(star(3))
    with pytest.raises(ElasticError, match="allocation 'mine': device 1 is in two workers"):
        Allocation("mine", ((0, 1), (1,)))
    with pytest.raises(ElasticError, match="1 workers, or one without devices"):
        Allocation("mine", ((),))
    assert [own.name for own in policies(star(3))] == ["NP", "ED", "ED-local"]
