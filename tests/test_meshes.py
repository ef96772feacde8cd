"""Meshes inside a host as a cluster file describes them, and one line for each mistake."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from soap.cluster.yaml_file import parse_cluster
from soap.errors import TopologyError
from tests.cluster_text import dump_cluster

MESH = {"bandwidth": "25 GB/s", "latency": "1 us", "kind": "mesh", "interconnect": "nvlink2"}


def mesh(*joined: list[Any], **changes: str) -> str:
    intra = {**MESH, "joined": list(joined), **changes}
    host = {"name": "a", "devices": {"type": "p100", "count": 3}, "cpu_cores": 4, "memory": "8 GiB", "links": {"intra": intra}}
    return yaml.safe_dump({"name": "small", "hosts": [host]})


def test_a_mesh_joins_pairs_by_one_link_or_several():
    t = parse_cluster(mesh([0, 1], [2, 1, 2], [0, 7]))
    assert [(link.name, link.bandwidth_bytes_per_second, link.interconnect) for link in t.links[::2]] == [
        ("a/gpu0->a/gpu1", 25e9, "nvlink2"),
        ("a/gpu1->a/gpu2", 50e9, "nvlink2"),  # the third pair is beyond the host's devices
    ]
    assert parse_cluster(dump_cluster(t)) == t


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (mesh([0]), "joined[0]: [0]; expected two places in the host, and the number of links if it is not 1: [0, 3, 2]"),
        (mesh([0, 1], [0, "b"]), "joined[1]: [0, 'b']; expected two places in the host, and the number of links if it is not 1: "
            "[0, 3, 2]"),
        (mesh([0, 1], [1, 1]), "joined[1]: [1, 1]; expected two different places from 0 on, and 1 to 64 links"),
        (mesh([0, 1, 0]), "joined[0]: [0, 1, 0]; expected two different places from 0 on, and 1 to 64 links"),
        (mesh([0, 1], [1, 0, 2]), "joined[1]: devices 0 and 1 are joined above; expected each pair once, with its number of links"),
        (mesh([0, 1], kind="ring"), "joined: not used with kind 'ring'; remove it or write 'kind: mesh'"),
        (mesh([0, 1], interconnect="nvlink9"), "interconnect: 'nvlink9'; expected one of nvlink1, nvlink2, nvlink3, nvlink4, nvlink5, "
            "xgmi3, pcie, network"),
    ],
)  # fmt: skip
def test_mistakes_in_a_mesh_get_one_line(text, line):
    with pytest.raises(TopologyError) as refused:
        parse_cluster(text)
    assert str(refused.value) == f"cluster.yaml: hosts[0].links.intra.{line}"


def test_a_device_that_a_mesh_leaves_out_is_told():
    with pytest.raises(TopologyError, match="no route from"):
        parse_cluster(mesh([0, 1]))
