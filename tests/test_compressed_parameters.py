"""Compression as a choice of a strategy: what files say of it, what is refused, and what a plan makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.plan.compression.policy import layer_of
from soap.plan.syncs.compressed import layouts_for
from soap.plan.syncs.seam import method_for
from soap.profiles.roofline import RooflineCosts
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import simulate
from soap.simulator.tasks import TaskKind
from soap.strategy.classical import data_parallel
from soap.strategy.compression import Bf16, Chunked, Compression, Int8, PowerSgd, Rgc, RgcAsq, parse, read_settings, written_settings
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.json_file import dumps, loads, strategy_hash
from soap.strategy.sync import compressed
from soap.strategy.sync_contracts import Within
from tests.graph_builder import GraphBuilder
from tests.strategies import CPU, WITHIN, cluster

FOUR = cluster([1, 1, 1, 1], CPU)
EVERY = (
    Rgc(),
    Rgc(0.25, "sampled"),
    Rgc(0.25, "search", ragged=True),
    RgcAsq(error_feedback=True),
    Chunked(codes="bf16", decay=1.0),
    PowerSgd(4),
    Bf16(),
    Int8(),
)


def layers() -> OperatorGraph:
    """Two hidden layers and an output layer, which shares the first one's weight."""
    g = GraphBuilder()
    shared = g.parameter("shared", 64, 64)
    x = g.linear(g.input("x", 8, 64), 64, weight=shared, bias=False)
    x = g.linear(x, 64, name="middle")
    return g.build(g.mean(g.linear(x, 64, weight=shared, bias=False)))


GRAPH = layers()


def strategy_of(how: Compression, *names: str, topology: Topology = FOUR, within: Within = "none") -> Strategy:
    sync = compressed(how, within)
    return data_parallel(GRAPH, topology).with_changes(parameters=dict.fromkeys(names or ("middle.weight",), sync))


@pytest.mark.parametrize("how", EVERY, ids=lambda how: how.word)
def test_files_keep_all_settings(how: Compression) -> None:
    assert read_settings(json.loads(json.dumps(written_settings(how)))) == how
    for within in WITHIN:
        strategy = strategy_of(how, within=within)
        found, _ = loads(dumps(strategy, GRAPH, FOUR), GRAPH, FOUR)
        assert found.sync("middle.weight") == compressed(how, within)


def test_hashes_tell_settings_apart() -> None:
    hashes = {strategy_hash(strategy_of(how, within=within), GRAPH) for how in EVERY for within in WITHIN}
    assert len({*hashes, strategy_hash(data_parallel(GRAPH, FOUR), GRAPH)}) == 2 * len(EVERY) + 1


WRONG = [
    ({"method": "zip"}, "compression 'zip' is unknown; expected one of rgc, "),
    ({}, "compression None is unknown; expected one of rgc, "),
    ({"method": "rgc", "rank": 2}, "rgc: unknown setting 'rank'; expected one of density, selection"),
    ({"method": "bf16", "density": 0.1}, "bf16: unknown setting 'density'; it has no settings: take it out"),
    ({"method": "rgc", "density": "much"}, "rgc: density 'much'; expected a number"),
    ({"method": "rgc", "density": True}, "rgc: density True; expected a number"),
    ({"method": "rgc", "density": 2}, "rgc: density 2; expected a share"),
    ({"method": "powersgd", "rank": 1.5}, "powersgd: rank 1.5; expected a whole number"),
    ({"method": "rgc", "ragged": 1}, "rgc: ragged 1; expected true or false"),
    ({"method": "rgc", "ragged": True, "selection": "exact"}, "rgc: ragged with selection 'exact', whose messages all have one length; "),
    ({"method": "bf16", "ragged": True}, "bf16: unknown setting 'ragged'; it has no settings: take it out"),
    ({"method": "rgc+asq", "error_feedback": 1}, r"rgc\+asq: error_feedback 1; expected true or false"),
    ({"method": "rgc+asq", "selection": "sampled"}, r"rgc\+asq: selection 'sampled'; expected one of "),
    ({"method": "rgc", "density": 10**400}, "rgc: density a number of over 20 digits; expected a share"),
    ({"method": "rgc", "density": -(10**5000)}, "rgc: density a number of over 20 digits; expected a share"),
    ({"method": "rgc+asq", "density": float("nan")}, r"rgc\+asq: density nan; expected a share"),
    ({"method": "chunked", "decay": 10**400}, "chunked: decay a number of over 20 digits; expected a number from 0 to 1"),
    ({"method": "chunked", "decay": float("inf")}, "chunked: decay inf; expected a number from 0 to 1"),
    ({"method": "powersgd", "rank": 10**400}, "powersgd: rank a number of over 20 digits; expected a whole number from 1 to 1048576"),
    ({"method": "powersgd", "rank": True}, "powersgd: rank True; expected a whole number"),
    ({"method": "rgc", "selection": 10**5000}, "rgc: selection a number of over 20 digits; expected a text"),
    ({"method": "rgc", "density": [10**5000]}, "rgc: density a list; expected a number"),
    ({"method": 10**5000}, "compression a number of over 20 digits is unknown; expected one of rgc, "),
    ({"method": "rgc", "density": {"a\n": 1}}, r"rgc: density \{'a\\n': 1\}; expected a number"),
]


NOT_MADE: list[Callable[[], Compression]] = [
    lambda: PowerSgd(rank=True),
    lambda: Rgc(density=True),
    lambda: Rgc(10**400),
    lambda: Chunked(decay=True),
    lambda: parse("powersgd:" + "9" * 5000),
    lambda: parse("rgc:" + "9" * 5000),
    lambda: parse("rgc:nan"),
]


@pytest.mark.parametrize("make", NOT_MADE)
def test_values_of_other_types_and_sizes_are_refused(make: Callable[[], Compression]) -> None:
    with pytest.raises(StrategyError, match="expected ") as found:
        make()
    assert len(str(found.value)) < 300


@pytest.mark.parametrize(("entry", "line"), WRONG)
def test_wrong_settings_are_refused_in_one_line(entry: dict[str, Any], line: str) -> None:
    with pytest.raises(StrategyError, match=f"^{line}"):
        read_settings(entry)


def test_files_with_wrong_settings_are_refused() -> None:
    text = dumps(strategy_of(Rgc(0.25)), GRAPH, FOUR)
    for old, new in (("0.25", '"much"'), ("0.25", "7"), ("0.25", "1" + "0" * 400), ('"rgc"', '"zip"'), ('"density"', '"weight"')):
        with pytest.raises(StrategyError) as refused:
            loads(text.replace(old, new), GRAPH, FOUR)
        assert "\n" not in str(refused.value)
    with pytest.raises(StrategyError, match=r"^parameter 'middle.weight': payload 'compressed' without a compression; expected one of rgc"):
        loads(text.replace(', "compression": {"method": "rgc", "density": 0.25}', ""), GRAPH, FOUR)


def test_a_compression_needs_its_payload() -> None:
    for payload in ("dense", "rows"):
        with pytest.raises(StrategyError, match=f"^payload '{payload}' with compression 'rgc:0.001'; expected payload 'compressed'"):
            SyncConfig(payload=payload, compression=Rgc())


def test_layers_are_told_by_their_users() -> None:
    assert layer_of(GRAPH, "shared").kind == "output"  # a tied encoder counts as the output layer
    assert layer_of(GRAPH, "middle.weight").kind == "hidden"


def test_output_layers_are_not_averaged() -> None:
    plan = build_plan(GRAPH, strategy_of(RgcAsq(0.1), "shared", "middle.weight"), FOUR)
    found = {sync.parameter: sync.compression for sync in plan.syncs if sync.compression}
    assert found == {"shared": Rgc(0.1, "sampled"), "middle.weight": RgcAsq(0.1, "search")}


@pytest.mark.parametrize("how", EVERY, ids=lambda how: how.word)
def test_devices_work_and_wait(how: Compression) -> None:
    """Every reader selects behind its own gradient; what it does with the others' messages comes behind its whole backward pass."""
    plan = build_plan(GRAPH, strategy_of(how), FOUR)
    tasks = lower(plan, FOUR, RooflineCosts(FOUR))
    schedule = simulate(tasks)
    [sync] = [sync for sync in plan.syncs if sync.compression]
    [layout] = layouts_for(plan, sync)
    start, end = ({t.name: int(at) for t, at in zip(tasks.tasks, times, strict=True)} for times in (schedule.start_ns, schedule.end_ns))
    last = [max(end[t.name] for t in tasks.tasks if t.kind is TaskKind.BACKWARD and t.resources == (device,)) for device in range(4)]
    works = ["select", "combine", "restore"] if len(layout.exchanges) > 1 else ["select", "restore"]
    for device in range(4):
        assert start[f"select middle.weight[0] @{device}"] >= end[f"backward middle[{device}]"]
        for work in works[1:]:
            assert start[f"{work} middle.weight[0] @{device}"] >= last[device]
        assert start[f"update @{device}"] >= end[f"restore middle.weight[0] @{device}"]
    names = [task.name for task in tasks.tasks if task.kind is TaskKind.COMPRESS and not task.name.startswith("settle")]
    assert len(names) == 4 * len(works)
    sent = sum(task.bytes for task in tasks.tasks if "middle.weight" in task.name)
    assert sent == sum(2 * 3 * e.message_bytes if e.kind == "sum" else 12 * e.message_bytes for e in layout.exchanges)


@pytest.mark.parametrize("how", EVERY, ids=lambda how: how.word)
def test_one_device_of_each_host_compresses(how: Compression) -> None:
    """It waits for its host's gradients, and the host's other devices for the sum. They keep nothing, and select nothing."""
    hosts = cluster([2, 2], CPU)
    plan = build_plan(GRAPH, strategy_of(how, topology=hosts, within="host"), hosts)
    tasks = lower(plan, hosts, RooflineCosts(hosts))
    schedule = simulate(tasks)
    [sync] = [sync for sync in plan.syncs if sync.compression]
    [layout], size = layouts_for(plan, sync), 64 * 64 * 4
    assert (sync.readers, sync.leaders, sync.peers, layout.peers) == ((0, 1, 2, 3), (0, 0, 2, 2), (0, 2), 2)
    start, end = ({t.name: int(at) for t, at in zip(tasks.tasks, times, strict=True)} for times in (schedule.start_ns, schedule.end_ns))
    assert start["collect middle.weight[0]"] >= max(end[f"backward middle[{device}]"] for device in range(4))
    works = ["select", "combine", "restore"] if len(layout.exchanges) > 1 else ["select", "restore"]
    for device in (0, 2):
        assert start[f"select middle.weight[0] @{device}"] >= end["collect middle.weight[0]"]
        assert start["hand on middle.weight[0]"] >= end[f"restore middle.weight[0] @{device}"]
    assert all(start[f"update @{device}"] >= end["hand on middle.weight[0]"] for device in range(4))
    names = [task.name for task in tasks.tasks if task.kind is TaskKind.COMPRESS and not task.name.startswith("settle")]
    assert sorted(names) == sorted(f"{work} middle.weight[0] @{device}" for work in works for device in (0, 2))
    moved = {task.name: (task.bytes, task.flows) for task in tasks.tasks if "middle.weight" in task.name and task.bytes}
    assert moved.pop("collect middle.weight[0]") == (2 * size, ((1, 0, size), (3, 2, size)))
    assert moved.pop("hand on middle.weight[0]") == (2 * size, ((0, 1, size), (2, 3, size)))
    assert sum(sent for sent, _ in moved.values()) == sum(2 * e.message_bytes for e in layout.exchanges)
    state = layout.state_bytes(how)
    kept = {hold.device: hold.size_bytes for hold in method_for(sync).holds(plan, sync) if not hold.since}
    assert kept == {0: state, 2: state}


def test_a_host_alone_compresses_nothing() -> None:
    """Nothing leaves it, so its devices sum as ever; buckets and all."""
    alone = cluster([4], CPU)
    plan = build_plan(GRAPH, strategy_of(Rgc(0.1), topology=alone, within="host"), alone)
    assert {sync.method for sync in plan.syncs} == {"all_reduce"}
    assert plan.syncs == build_plan(GRAPH, data_parallel(GRAPH, alone), alone).syncs


def test_one_reader_compresses_nothing() -> None:
    alone = cluster([1], CPU)
    plan = build_plan(GRAPH, data_parallel(GRAPH, alone).with_parameter("shared", compressed(Rgc())), alone)
    assert {sync.method for sync in plan.syncs} == {"all_reduce"}
    assert all(not method_for(sync).steps(plan, sync) for sync in plan.syncs)
