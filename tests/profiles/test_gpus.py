"""``local`` on machines with and without GPUs; what torch reports of them is made up, and so is what is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import soap
from soap.cluster.memory_budget import left_by_process
from soap.cluster.presets import LOCAL_BANDWIDTH_BYTES_PER_SECOND, local_topology
from soap.cluster.topology import Topology
from soap.errors import ProfileError
from soap.measure import compute_rates, this_machine
from soap.measure.compute_rates import Rates
from soap.measure.this_machine import GPU_COPY_BYTES, first_gpus, gpu_count, islands, measured_local_topology
from soap.profiles.keys import environments, only_environment

A, B = ("NVIDIA H100 80GB HBM3", 80 * 10**9), ("NVIDIA L4", 24 * 10**9)


class Machine:
    """GPUs of these kinds; inside an island copies take 10 us and 100 GB/s, between islands 30 us and 20 GB/s."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, kinds: Sequence[tuple[str, int]], joined: Sequence[Sequence[int]]
    ) -> None:
        self.kinds, self.joined = kinds, joined
        self.rated: list[int] = []
        self.copied: list[tuple[int, int]] = []
        self.copies_fail = False
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setattr(this_machine, "GPU_NODES", (str(folder),) if kinds else ())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(self.kinds))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.kinds))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: self.kinds[gpu][0])
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.properties)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", self.together)
        monkeypatch.setattr(this_machine, "cuda_rates", self.rates)
        monkeypatch.setattr(this_machine, "gpu_copy_seconds", self.copy_seconds)

    def properties(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(name=self.kinds[gpu][0], total_memory=self.kinds[gpu][1])

    def together(self, one: int, other: int) -> bool:
        assert one != other  # which torch refuses
        return any(one in island and other in island for island in self.joined)

    def rates(self, gpu: int) -> Rates:
        self.rated.append(gpu)
        rate = 50e12 if self.kinds[gpu] == A else 20e12
        return Rates({"float32": rate, "bfloat16": 10 * rate}, 1e12, 5e-6)

    def copy_seconds(self, copied_bytes: int, source: int, target: int) -> float:
        if self.copies_fail:
            raise ProfileError("no copies here")
        self.copied.append((source, target))
        latency, rate = (10e-6, 100e9) if self.together(source, target) else (30e-6, 20e9)
        return latency + (copied_bytes / rate if copied_bytes == GPU_COPY_BYTES else 0.0)


def bandwidth(topology: Topology, source: int, target: int) -> float:
    return min(topology.links[link].bandwidth_bytes_per_second for link in topology.route(source, target))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path, [A] * 8, [range(8)])


def test_local_is_the_gpus_that_torch_sees(machine: Machine) -> None:
    found = soap.load_cluster("local")
    assert (found.name, found.device_count) == ("local:8", 8)
    assert {(d.type.name, d.type.kind, d.type.memory_bytes) for d in found.devices} == {(A[0], "cuda", left_by_process(A[1]))}
    assert found.devices[3].type.flops("bfloat16") == 500e12
    assert bandwidth(found, 0, 7) == pytest.approx(100e9)
    assert found.route_latency_seconds(0, 7) == pytest.approx(10e-6)
    assert found == soap.load_cluster("local:8") and found.hash == local_topology(8, found.devices[0].type).hash
    assert (machine.rated, machine.copied) == ([0], [(0, 1), (0, 1)])  # once, and then it is known


def test_fewer_of_them_may_be_asked_for(machine: Machine) -> None:
    two = soap.load_cluster("local:2")
    assert [device.name for device in two.devices] == ["local/gpu0", "local/gpu1"]
    machine.kinds = [A]
    one = soap.load_cluster("local")
    assert (one.name, one.links) == ("local:1", ())


@pytest.mark.parametrize(("cores", "processes"), [(1, 2), (2, 2), (3, 2), (4, 4), (64, 4)])
def test_without_gpus_local_is_a_few_processes(
    cores: int, processes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Machine(monkeypatch, tmp_path, [], [])
    monkeypatch.setattr(this_machine, "cpu_cores", lambda: cores)
    assert gpu_count() == 0 and this_machine.device_count() == processes
    asked = list[str]()
    monkeypatch.setattr(this_machine, "measured_topology", lambda topology: asked.append(topology.name) or topology)
    assert soap.load_cluster("local").device_count == processes and asked == [f"local:{processes}"]


def test_islands_have_links_of_their_own(machine: Machine) -> None:
    machine.joined = [range(4), range(4, 8)]
    found = soap.load_cluster("local")
    assert found.switches == ("local/switch", "local/switch0", "local/switch1")
    assert [found.links[link].name for link in found.route(1, 6)] == [
        "local/gpu1->local/switch0", "local/switch0->local/switch", "local/switch->local/switch1", "local/switch1->local/gpu6",
    ]  # fmt: skip
    assert (bandwidth(found, 0, 3), bandwidth(found, 0, 4)) == pytest.approx((100e9, 20e9))
    assert (found.route_latency_seconds(4, 5), found.route_latency_seconds(1, 6)) == pytest.approx((10e-6, 30e-6))
    assert set(machine.copied) == {(0, 1), (0, 4)} and machine.rated == [0]
    again = soap.load_cluster("local:8")
    assert again == found and len(machine.copied) == 4
    machine.joined = [range(8)]
    assert soap.load_cluster("local").switches == ("local/switch",)  # what is kept is of the other wiring


def test_gpus_outside_of_islands_are_joined_by_the_host(machine: Machine) -> None:
    machine.kinds, machine.joined = [A] * 5, [[0], [1, 2], [3], [4]]
    found = soap.load_cluster("local")
    assert [found.links[link].name for link in found.route(0, 3)] == ["local/gpu0->local/switch", "local/switch->local/gpu3"]
    assert found.switches == ("local/switch", "local/switch1")
    assert (bandwidth(found, 0, 3), bandwidth(found, 1, 2), bandwidth(found, 1, 4)) == pytest.approx((20e9, 100e9, 20e9))
    assert (found.route_latency_seconds(0, 3), found.route_latency_seconds(2, 3)) == pytest.approx((30e-6, 30e-6))
    assert set(machine.copied) == {(1, 2), (0, 1)}


def test_gpus_that_reach_nobody_have_one_switch(machine: Machine) -> None:
    machine.joined = [[gpu] for gpu in range(8)]
    found = soap.load_cluster("local")
    assert found.switches == ("local/switch",) and bandwidth(found, 0, 1) == pytest.approx(20e9)
    assert set(machine.copied) == {(0, 1)}


def test_gpus_of_several_kinds_each_have_their_own_figures(machine: Machine) -> None:
    machine.kinds = [A, A, B]
    machine.joined = [range(3)]
    found = soap.load_cluster("local")
    assert [(d.type.name, d.type.flops("float32")) for d in found.devices] == [(A[0], 50e12), (A[0], 50e12), (B[0], 20e12)]
    assert [d.type.memory_bytes for d in found.devices] == [left_by_process(kind[1]) for kind in (A, A, B)]
    assert machine.rated == [0, 2] and soap.load_cluster("local") == found and machine.rated == [0, 2]
    assert set(environments(found)) == {A[0], B[0]}
    with pytest.raises(ProfileError, match=r"cluster 'local:3' has devices of several kinds .*; expected one kind"):
        only_environment(found)
    assert only_environment(soap.load_cluster("local:2")).device == A[0]


def test_gpus_of_one_name_with_unequal_memory_have_types_of_their_own(machine: Machine) -> None:
    machine.kinds, machine.joined = [A, (A[0], 96 * 10**9)], [range(2)]
    types = [device.type for device in soap.load_cluster("local").devices]
    assert [own.name for own in types] == [f"{A[0]} 74.5 GiB", f"{A[0]} 89.4 GiB"]
    assert [own.memory_bytes for own in types] == [left_by_process(kind[1]) for kind in machine.kinds]


def test_islands_whose_links_cannot_be_measured(machine: Machine) -> None:
    machine.joined, machine.copies_fail = [range(4), range(4, 8)], True
    with pytest.warns(UserWarning, match="no copies here; going on with the usual figures"):
        found = soap.load_cluster("local")
    assert {link.bandwidth_bytes_per_second for link in found.links} == {LOCAL_BANDWIDTH_BYTES_PER_SECOND}


def test_who_reaches_whom() -> None:
    ways = {(0, 1), (1, 0), (1, 2), (2, 1), (3, 0)}  # 0 and 2 do not, and 3 is not reached back
    assert islands(4, lambda a, b: (a, b) in ways) == ((0, 1), (2,), (3,))
    assert islands(0, lambda a, b: True) == ()


def test_each_gpu_is_rated_on_itself_and_copies_end_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which device the work is for, and which are waited for; the work itself is left out."""
    on, awaited, places = list[int](), list[int](), list[str]()

    @contextmanager
    def device(gpu: int) -> Iterator[None]:
        on.append(gpu)
        yield
        on.append(-1)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", awaited.append)
    monkeypatch.setattr(compute_rates, "SECONDS_PER_RATE", 0.0)
    for maker in ("_matmul", "_copy", "_tiny_calls"):
        monkeypatch.setattr(compute_rates, maker, lambda *_: lambda: lambda: None)
    assert compute_rates.cuda_rates(3).kernel_seconds > 0
    assert on == [3, -1] and set(awaited) == {3}
    awaited.clear()
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, dtype: places.append(device) or real(*sizes, dtype=dtype))
    assert compute_rates.gpu_copy_seconds(8, 2, 5) > 0
    assert places == ["cuda:2", "cuda:5"] and set(awaited) == {2, 5}


def test_facts_are_torch_s(machine: Machine) -> None:
    machine.kinds, machine.joined = [A, B, A], [[0, 2], [1]]
    found = first_gpus(3)
    assert (found.kinds, found.islands, found.neighbours, found.strangers) == ((A, B, A), ((0, 2), (1,)), (0, 2), (0, 1))
    assert not found.are_joined_alike and first_gpus(1).neighbours is None and first_gpus(1).are_joined_alike
    assert measured_local_topology(3, cache=False).device_count == 3
