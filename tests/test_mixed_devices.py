"""Clusters of unlike devices: what is said of all of them at once is not said of the first alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cli.links import backend_of
from soap.cli.profile import _check_same_devices
from soap.cluster.kinds import has_gpus, run_kind, types_of
from soap.cluster.presets import device_types
from soap.cluster.topology import DeviceType, Topology
from soap.errors import ProfileError, TopologyError
from soap.model.graph import OperatorGraph
from soap.profiles.link_places import link_places
from soap.profiles.roofline import RooflineCosts
from soap.search.compiled.space_arrays import rough_ns
from tests.graph_builder import mlp
from tests.strategies import CPU, GPU, cluster

SLOW_CPU, SLOW_GPU = (
    replace(kind, name=f"slow {kind.name}", flops_per_second={"float32": 1e9}, kernel_seconds=3 * kind.kernel_seconds)
    for kind in (CPU, GPU)
)


def pair(first: DeviceType, second: DeviceType) -> Topology:
    topology = cluster([1, 1], first)
    return replace(topology, devices=(topology.devices[0], replace(topology.devices[1], type=second)))


PROCESSORS, GPUS, BOTH = pair(CPU, SLOW_CPU), pair(GPU, SLOW_GPU), pair(CPU, GPU)
GRAPH = mlp()


def test_a_run_has_devices_of_one_kind() -> None:
    assert [types_of(own) for own in (PROCESSORS, GPUS, BOTH)] == [(CPU, SLOW_CPU), (GPU, SLOW_GPU), (CPU, GPU)]
    assert [run_kind(own) for own in (PROCESSORS, GPUS)] == ["cpu", "cuda"]
    assert [has_gpus(own) for own in (PROCESSORS, GPUS, BOTH)] == [False, True, True]
    with pytest.raises(TopologyError, match=r"'test' has 'host0/device0' \(cpu\) and 'host1/device0' \(cuda\); expected devices of one"):
        run_kind(BOTH)


def test_two_types_have_two_names() -> None:
    """What tiles cost is looked up by the name of a type."""
    with pytest.raises(TopologyError, match=r"^cluster 'test': two device types are named 'test-cpu'; rename one$"):
        pair(CPU, replace(CPU, kernel_seconds=2e-6))
    assert len(types_of(pair(CPU, replace(CPU, source="elsewhere")))) == 2  # the same figures


def test_ranks_on_both_kinds_do_not_meet_on_gpus() -> None:
    assert [backend_of("auto", own) for own in (PROCESSORS, GPUS, BOTH)] == ["gloo", "nccl", "gloo"]
    assert {place.backend for place in link_places(BOTH)} == {"gloo"}


def _rough(topology: Topology, graph: OperatorGraph = GRAPH) -> float:
    (loss,) = [position for position, op in enumerate(graph.operators) if op.kind == "cross_entropy"]
    grid = (1,) * (1 + len(graph.operators[loss].factors))
    return float(rough_ns(graph, loss, [grid], topology, RooflineCosts(topology, 0))[0])


def test_proposals_are_weighed_by_all_devices() -> None:
    alone = [_rough(cluster([1, 1], kind)) for kind in (CPU, SLOW_CPU)]
    assert alone[1] > 1.5 * alone[0]
    assert _rough(PROCESSORS) == pytest.approx(sum(alone) / 2) == pytest.approx(_rough(pair(SLOW_CPU, CPU)))


def test_each_type_is_measured_where_it_is() -> None:
    types = [device_types()[name] for name in ("titanv", "rtx2060")]
    titans = replace(GPUS, devices=tuple(replace(own, type=types[own.index]) for own in GPUS.devices))
    for name in ("NVIDIA TITAN V", "NVIDIA GeForce RTX 2060"):
        _check_same_devices(cluster([1], replace(GPU, name=name)), titans)
    with pytest.raises(ProfileError, match="its devices are titanv, rtx2060, and this machine's NVIDIA A100-SXM4-80GB; expected some GPUs"):
        _check_same_devices(cluster([1], replace(GPU, name="NVIDIA A100-SXM4-80GB")), titans)
