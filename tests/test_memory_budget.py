"""How much memory plans may use: what is read, what is refused, and that it is no part of a cluster's identity."""

from __future__ import annotations

import pickle
from dataclasses import replace
from fractions import Fraction

import pytest

import soap
from soap.cluster.memory_budget import left_by_process, read_budget, with_memory_budget
from soap.cluster.presets import device_types
from soap.errors import TopologyError
from soap.model.graph import TensorKind
from soap.simulator.memory.sizes import overflow_bytes
from soap.strategy.classical import data_parallel
from tests.graph_builder import mlp
from tests.strategies import GPU, cluster

FOUR = replace(GPU, memory_bytes=4 * 10**9)
TOPOLOGY = cluster([1, 1], FOUR)


def test_a_process_leaves_some_of_a_gpus_memory() -> None:
    """Of an H200 with one rank the allocator had 135.81 GiB, and the process 137.02; NCCL's buffers come on top."""
    total = 139.8 * 2**30
    left = left_by_process(int(total))
    assert 1.2 * 2**30 < total - left - 3 * 2 * 16 * (4 * 2**20 + 2**19 + 4_915_200) < 1.21 * 2**30
    assert left == device_types()["h200"].memory_bytes and left_by_process(2**30) == 2**29


@pytest.mark.parametrize(
    ("text", "read"), [("80%", Fraction(4, 5)), (" 12.5 % ", Fraction(1, 8)), ("100%", 1), ("20GB", 20 * 10**9), ("1.5 GiB", 3 * 2**29)]
)
def test_shares_and_sizes(text: str, read: Fraction | int) -> None:
    assert read_budget(text) == read


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0%", "memory_budget '0%': expected a share of each device's memory, such as 80%, or a size such as 20GB: a share is above 0%"),
        ("120%", "a share is above 0% and at most 100%"),
        ("-5%", "expected a share of each device's memory"),
        ("%", "expected a share"),
        ("0 GB", "memory_budget '0 GB': nothing fits into that; expected a share"),
        ("20", "memory_budget: '20' has no unit; expected a size such as '16 GiB': add the unit"),
        ("much", "memory_budget: 'much' is no quantity"),
        ("20GiB/s", "memory_budget: '20GiB/s' has unit 'GiB/s'"),
    ],
)
def test_nonsense_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(TopologyError) as refused:
        read_budget(text)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(TopologyError):
        soap.SearchOptions(memory_budget=text)


def test_each_device_has_its_share_and_no_more_than_it_has() -> None:
    assert TOPOLOGY.memory_limits == (4 * 10**9,) * 2 and with_memory_budget(TOPOLOGY, None) is TOPOLOGY
    assert with_memory_budget(TOPOLOGY, "80%").memory_limits == (3_200_000_000,) * 2
    large = replace(TOPOLOGY.devices[1], type=replace(FOUR, name="large", memory_bytes=8 * 10**9))
    uneven = replace(TOPOLOGY, devices=(TOPOLOGY.devices[0], large))
    assert with_memory_budget(uneven, "5GB").memory_limits == (4 * 10**9, 5 * 10**9)
    with pytest.raises(TopologyError, match=r"'9GB': no device of cluster 'test' has more than 7\.45 GiB; expected at most that"):
        with_memory_budget(uneven, "9GB")
    with pytest.raises(TopologyError, match="limits of memory"):
        replace(TOPOLOGY, limits=(1,))


def test_it_is_the_same_cluster_with_less_room() -> None:
    limited = with_memory_budget(TOPOLOGY, "1GB")
    assert limited.hash == TOPOLOGY.hash and pickle.loads(pickle.dumps(limited)) == limited != TOPOLOGY
    assert overflow_bytes([10**9 + 1, 5], limited) == 1 and overflow_bytes([10**9 + 1, 5], TOPOLOGY) == 0
    graph = mlp()
    needed = soap.simulate(graph, TOPOLOGY, "data_parallel", costs="estimate")
    tight = soap.simulate(graph, TOPOLOGY, "data_parallel", costs="estimate", memory_budget=f"{max(needed.peak_bytes) - 1} B")
    roomy = soap.simulate(graph, TOPOLOGY, "data_parallel", costs="estimate", memory_budget=f"{max(needed.peak_bytes)} B")
    assert (needed.fits, tight.fits, roomy.fits) == (True, False, True)
    assert tight.makespan_ns == needed.makespan_ns and tight.peak_bytes == needed.peak_bytes


@pytest.mark.slow
def test_a_batch_that_no_device_holds_is_planned_for_ranks_with_their_own_samples() -> None:
    graph, whole = mlp(batch=4096), soap.load_cluster("p100-4x4")
    own = soap.load_cluster("p100-4x4", own_samples=True)
    assert own.hash == whole.hash and pickle.loads(pickle.dumps(own)) == own != whole
    needed = [soap.simulate(graph, given, "data_parallel", costs="estimate") for given in (whole, own)]
    given_bytes = sum(tensor.bytes for tensor in graph.tensors.values() if tensor.kind is TensorKind.INPUT)
    saved = {a["batch"] - b["batch"] for a, b in zip(needed[0].peak_by_kind, needed[1].peak_by_kind, strict=True)}
    assert saved == {given_bytes * 15 // 16} and needed[0].makespan_ns == needed[1].makespan_ns
    assert max(needed[1].peak_bytes) < given_bytes
    starts = ("data_parallel",)
    options = soap.SearchOptions(budget=2, memory_budget=f"{given_bytes} B", costs="estimate", starts=starts, recompute=False)
    assert soap.find(graph, own, options).simulation.fits
    with pytest.raises(soap.InfeasibleError):
        soap.find(graph, whole, options)


def test_plans_made_with_a_budget_hold_for_the_cluster(tmp_path) -> None:
    graph = mlp()
    path = tmp_path / "s.json"
    soap.save_strategy(path, data_parallel(graph, TOPOLOGY), graph, with_memory_budget(TOPOLOGY, "50%"))
    assert soap.load_strategy(path, graph, TOPOLOGY) == data_parallel(graph, TOPOLOGY)
