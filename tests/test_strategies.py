from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.model.regions import volume
from soap.plan.planning import build_plan
from soap.strategy.classical import (
    CLASSICAL,
    data_parallel,
    hybrid,
    megatron,
    model_parallel,
    one_weird_trick,
    random_config,
    random_strategy,
    sample_factor,
    single_device,
    uniform_config,
)
from soap.strategy.config import OpConfig, Strategy
from tests.graph_builder import GraphBuilder, convnet, mlp, transformer
from tests.strategies import cluster, graphs, topologies


def split(graph: OperatorGraph, strategy: Strategy) -> dict[str, tuple[dict[str, int], tuple[int, ...]]]:
    """Operator -> (degrees above 1 by factor name, devices)."""
    result = {}
    for op in graph.operators:
        config = strategy.operators[op.name]
        degrees = {factor.name: degree for factor, degree in zip(op.factors, config.degrees, strict=True) if degree > 1}
        if config.replicas > 1:
            degrees["replicas"] = config.replicas
        result[op.name] = (degrees, config.devices)
    return result


def moved(graph: OperatorGraph, topology: Topology, strategy: Strategy) -> dict[str, int]:
    """Operator -> elements of activations that it fetches from other devices; operators that fetch nothing are left out."""
    plan = build_plan(graph, strategy, topology)
    result: dict[str, int] = {}
    for fetch in plan.fetches:
        remote = sum(volume(piece.box) for piece in fetch.pieces if plan.holdings[piece.holding].device != fetch.device)
        if remote:
            name = graph.operators[plan.tiles[fetch.consumers[0][0]].operator].name
            result[name] = result.get(name, 0) + remote
    return result


def shared_parameters(graph: OperatorGraph, topology: Topology, strategy: Strategy) -> Mapping[str, int]:
    """Parameter -> elements that lie on more than one device and so need synchronization."""
    result: dict[str, int] = {}
    for shard in build_plan(graph, strategy, topology).shards:
        result[shard.parameter] = result.get(shard.parameter, 0) + (volume(shard.box) if len(shard.devices) > 1 else 0)
    return result


@given(graphs(), topologies(max_devices=6))
def test_classical_strategies_are_legal_and_can_be_planned(graph: OperatorGraph, topology: Topology) -> None:
    for strategy in CLASSICAL.values():
        build_plan(graph, strategy(graph, topology), topology)


@pytest.mark.parametrize("name", CLASSICAL)
def test_on_one_device_all_strategies_are_the_same(name: str) -> None:
    graph, topology = transformer(), cluster([1])
    assert CLASSICAL[name](graph, topology) == single_device(graph, topology)


def test_classical_strategies_by_name() -> None:
    assert list(CLASSICAL) == ["single_device", "data_parallel", "model_parallel", "one_weird_trick", "megatron"]


def test_single_device() -> None:
    graph, topology = mlp(), cluster([2, 2])
    assert {config.devices for config in single_device(graph, topology, 3).operators.values()} == {(3,)}
    with pytest.raises(StrategyError, match="device 4 does not exist; expected 0 to 3"):
        single_device(graph, topology, 4)


def test_uniform_config() -> None:
    op = mlp().operators[0]
    assert uniform_config(op, {"b": 2, "n": 2}, (4, 5, 6, 7)) == OpConfig((2, 1, 2), (4, 5, 6, 7))
    assert uniform_config(op, {"n": 2}, (0, 1, 2, 3)) == OpConfig((1, 1, 2), (0, 2))
    assert uniform_config(op, {"b": 4}, (0, 1)) == OpConfig((4, 1, 1), (0, 0, 1, 1))
    assert uniform_config(op, {"b": 2}, (0, 1), replicas=2) == OpConfig((2, 1, 1), (0, 0, 1, 1), 2)
    with pytest.raises(StrategyError, match="operator 'fc0' has no factor 'z'; expected one of b, k, n"):
        uniform_config(op, {"z": 2}, (0,))
    with pytest.raises(StrategyError, match="degree 9 of factor 'b' exceeds its size 8"):
        uniform_config(op, {"b": 9}, (0,))
    with pytest.raises(StrategyError, match="operator 'fc0': no devices given; expected at least one"):
        uniform_config(op, {}, ())


def test_data_parallel_splits_the_batch_and_moves_nothing() -> None:
    for graph in (mlp(), transformer(), convnet()):
        topology = cluster([2, 2])
        strategy = data_parallel(graph, topology)
        for op in graph.operators:
            config = strategy.operators[op.name]
            expected = "replicas" if sample_factor(op) is None else "b"
            assert split(graph, strategy)[op.name] == ({expected: 4}, (0, 1, 2, 3)), op.name
            assert len(config.devices) == 4
        assert moved(graph, topology, strategy) == {}
        shared = shared_parameters(graph, topology, strategy)
        assert shared == {t.name: int(np.prod(t.shape)) for t in graph.parameters}


def test_data_parallel_with_a_small_batch_uses_spread_devices() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 2, 6), 6, name="two")
    merged = g.build(g.mean(x, name="loss"))
    topology = cluster([4])
    strategy = data_parallel(merged, topology)
    assert split(merged, strategy) == {"two": ({"b": 2}, (0, 2)), "loss": ({"b": 2}, (0, 2))}
    assert moved(merged, topology, strategy) == {}


def test_data_parallel_without_batch_dimension() -> None:
    """What follows a summed loss or a mean over the batch runs where that sum already is; a whole operator runs once."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 8, 6), 6, name="fc")
    center = g.elementwise(x, g.batch_mean(x), name="center")
    whole = g.elementwise(g.opaque(center), name="after")
    loss = g.operator("scale", [], [(g.mean(whole, name="mean"), [])], [], [((), ())], name="scale")[0]
    graph, topology = g.build(loss), cluster([4])
    strategy = data_parallel(graph, topology)
    assert split(graph, strategy)["batch_mean1"] == ({"b": 4}, (0, 1, 2, 3))
    assert split(graph, strategy)["center"] == ({"b": 4}, (0, 1, 2, 3))
    assert split(graph, strategy)["opaque3"] == ({}, (0,))
    assert split(graph, strategy)["after"] == ({"b": 4}, (0, 1, 2, 3))
    assert split(graph, strategy)["scale"] == ({"replicas": 4}, (0, 1, 2, 3))
    assert moved(graph, topology, strategy) == {"opaque3": 36, "after": 36}


def test_model_parallel_blocks_are_contiguous_and_balanced() -> None:
    graph, topology = mlp(batch=4, widths=(32, 32, 32, 32, 32), classes=32), cluster([2, 2])
    strategy = model_parallel(graph, topology)
    devices = [strategy.operators[op.name].devices for op in graph.operators]
    assert devices == sorted(devices)
    assert set(devices) == {(0,), (1,), (2,), (3,)}
    work: dict[int, int] = {}
    for op in graph.operators:
        work[strategy.operators[op.name].devices[0]] = work.get(strategy.operators[op.name].devices[0], 0) + op.flops
    assert max(work.values()) <= 2 * 8192 + 3 * 128 + 640  # five equal layers on four devices
    assert not any(shared_parameters(graph, topology, strategy).values())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=7), st.integers(1, 5))
def test_fullest_block_is_as_small_as_possible(widths: list[int], devices: int) -> None:
    graph = mlp(batch=1, widths=(3, *(4 * w for w in widths)))
    strategy = model_parallel(graph, cluster([devices]))
    work = [op.flops for op in graph.operators]
    best = [0, *(10**9 for _ in work)]
    for _ in range(devices):  # best[i]: least possible fullest block of the first i operators
        best = [0] + [min(max(best[j], sum(work[j:i])) for j in range(i)) for i in range(1, len(best))]
    blocks: dict[int, int] = {}
    for op in graph.operators:
        device = strategy.operators[op.name].devices[0]
        blocks[device] = blocks.get(device, 0) + op.flops
    assert max(blocks.values()) == best[-1]


def test_model_parallel_uses_every_device_it_can() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 8, 64), 64, name="huge")
    for i in range(6):
        x = g.elementwise(x, name=f"small{i}")
    graph = g.build(g.mean(x))
    strategy = model_parallel(graph, cluster([4]))
    assert {config.devices for config in strategy.operators.values()} == {(0,), (1,), (2,), (3,)}


def test_one_weird_trick_splits_dense_layers_only() -> None:
    graph, topology = convnet(), cluster([4])
    strategy = one_weird_trick(graph, topology)
    everywhere = (0, 1, 2, 3)
    assert split(graph, strategy) == {
        **{name: ({"b": 4}, everywhere) for name in ("conv0", "relu0", "conv1", "flatten", "relu1", "cross_entropy7")},
        **{name: ({"n": 4}, everywhere) for name in ("fc0", "fc1")},
    }
    shared = shared_parameters(graph, topology, strategy)
    assert {name for name, elements in shared.items() if elements} == {"conv0.weight", "conv1.weight"}


def test_one_weird_trick_with_fewer_outputs_than_devices_splits_the_batch_as_well() -> None:
    graph = mlp(batch=8, widths=(6, 2))
    assert split(graph, one_weird_trick(graph, cluster([4])))["fc0"] == ({"b": 2, "n": 2}, (0, 1, 2, 3))


@pytest.mark.parametrize("joint", [False, True])
def test_megatron_inside_one_host(joint: bool) -> None:
    graph, topology = transformer(layers=2, joint=joint), cluster([4])
    strategy, group = megatron(graph, topology), (0, 1, 2, 3)
    found = split(graph, strategy)
    heads = "attention5" if joint else "attention7"
    expected = {
        "embedding": ({"v": 4}, group),
        "add_positions": ({"replicas": 4}, group),
        "0.norm1": ({"replicas": 4}, group),
        heads: ({"h": 4}, group),
        "0.proj": ({"k": 4}, group),
        "0.add1": ({"replicas": 4}, group),
        "0.fc1": ({"n": 4}, group),
        "0.gelu": ({"d2": 4}, group),
        "0.fc2": ({"k": 4}, group),
        "norm": ({"replicas": 4}, group),
        "head": ({"n": 4}, group),
    }
    assert {name: found[name] for name in expected} == expected
    if joint:
        assert found["0.qkv"] == ({"n": 12}, group * 3)
    else:
        assert [found[f"0.{part}"] for part in "qkv"] == [({"n": 4}, group)] * 3
    loss = graph.operators[-1].name
    assert moved(graph, topology, strategy) == {loss: 8 * 6 * 64 * 3 // 4}
    plan = build_plan(graph, strategy, topology)
    reduced = [graph.operators[r.operator].name for r in plan.reductions if len(r.devices) > 1]
    assert reduced == ["embedding", "0.proj", "0.fc2", "1.proj", "1.fc2", loss]


def test_megatron_splits_samples_across_hosts() -> None:
    graph, topology = transformer(layers=1), cluster([2, 2])
    strategy = megatron(graph, topology)
    found = split(graph, strategy)
    assert found["embedding"] == ({"b": 2, "v": 2}, (0, 1, 2, 3))
    assert found["0.norm1"] == ({"b": 2, "replicas": 2}, (0, 2, 1, 3))
    assert found["0.fc2"] == ({"b": 2, "k": 2}, (0, 1, 2, 3))
    assert moved(graph, topology, strategy) == {graph.operators[-1].name: 8 * 6 * 64 // 2}
    assert found[graph.operators[-1].name] == ({"b": 4}, (0, 1, 2, 3))
    plan = build_plan(graph, strategy, topology)
    loss = graph.index[graph.operators[-1].name]
    assert {r.devices for r in plan.reductions if r.operator != loss} == {(0, 1), (2, 3)}
    shards = {shard.box: shard.devices for shard in plan.shards if shard.parameter == "embedding.weight"}
    assert shards == {((0, 32), (0, 16)): (0, 2), ((32, 64), (0, 16)): (1, 3)}


def test_hybrid_is_megatron_in_stages() -> None:
    graph, topology = transformer(batch=4), cluster([4, 4])
    assert hybrid(graph, topology, tensor=4) == megatron(graph, topology)
    strategy = hybrid(graph, topology, tensor=2, pipeline=2)
    homes = [set(strategy.operators[op.name].devices) for op in graph.operators]
    stages = [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert all(any(own <= stage for stage in stages) for own in homes)
    assert homes[0] <= stages[0] and homes[-1] <= stages[1]
    assert [max(own) > 5 or min(own) in (2, 3) for own in homes] == sorted(max(own) > 5 or min(own) in (2, 3) for own in homes)


@pytest.mark.parametrize(("tensor", "pipeline", "word"), [(3, 1, "divisor"), (0, 1, "divisor"), (1, 8, "no more than operators")])
def test_hybrid_refuses_what_does_not_divide(tensor: int, pipeline: int, word: str) -> None:
    with pytest.raises(StrategyError, match=word):
        hybrid(mlp(batch=8), cluster([4, 4]), tensor=tensor, pipeline=pipeline)


def test_megatron_with_hosts_of_a_single_device_or_unequal_ones() -> None:
    graph = transformer(layers=1)
    assert split(graph, megatron(graph, cluster([1, 1])))["0.fc1"] == ({"n": 2}, (0, 1))
    assert split(graph, megatron(graph, cluster([2, 4])))["0.fc1"] == ({"b": 3, "n": 2}, (0, 1, 2, 3, 4, 5))
    assert megatron(graph, cluster([1, 2])) == data_parallel(graph, cluster([1, 2]))


def test_megatron_splits_samples_where_heads_are_too_few() -> None:
    graph, topology = transformer(layers=1, heads=2), cluster([4])
    found = split(graph, megatron(graph, topology))
    assert found["attention7"] == ({"b": 2, "h": 2}, (0, 1, 2, 3))
    assert found["0.fc1"] == ({"n": 4}, (0, 1, 2, 3))


def test_megatron_without_pairs_is_data_parallel() -> None:
    g = GraphBuilder()
    x = g.conv(g.elementwise(g.conv(g.input("x", 8, 3, 12), 4)), 4)
    graph = g.build(g.mean(g.linear(g.norm(x), 5)))
    assert megatron(graph, cluster([4])) == data_parallel(graph, cluster([4]))


def test_megatron_keeps_heavy_operators_data_parallel_between_vocabularies() -> None:
    """A recurrent layer between embedding and output layer must not be computed by every device."""
    g = GraphBuilder()
    x = g.embedding(g.input("ids", 8, 24, dtype="int64"), 64, 16, name="embedding")
    x = g.conv(g.elementwise(x, name="dropout"), 64, name="heavy")
    graph = g.build(g.cross_entropy(g.linear(x, 64, name="head"), g.input("y", 8, 64, dtype="int64")))
    found = split(graph, megatron(graph, cluster([4])))
    assert [found[name][0] for name in ("embedding", "dropout", "heavy", "head")] == [{"v": 4}, {"replicas": 4}, {"b": 4}, {"n": 4}]


def test_megatron_splits_output_layers_but_not_every_matrix_that_widens() -> None:
    g = GraphBuilder()
    x = g.norm(g.linear(g.input("x", 8, 6), 24, name="widening"))
    x = g.norm(g.linear(x, 8, name="narrowing"))
    graph = g.build(g.cross_entropy(g.linear(x, 32, name="head"), g.input("y", 8, dtype="int64")))
    found = split(graph, megatron(graph, cluster([4])))
    assert [found[name][0] for name in ("widening", "narrowing", "head")] == [{"b": 4}, {"b": 4}, {"n": 4}]


def test_small_tables_are_not_split() -> None:
    g = GraphBuilder()
    x = g.embedding(g.input("kinds", 8, 6, dtype="int64"), 8, 16, name="kinds_table")
    graph = g.build(g.mean(g.norm(x)))
    assert megatron(graph, cluster([4])) == data_parallel(graph, cluster([4]))


def test_devices_of_a_host_need_not_be_numbered_in_a_row() -> None:
    base = cluster([2, 2])
    places = [0, 1, 0, 1]
    devices = tuple(type(d)(d.index, d.name, places[d.index], d.type) for d in base.devices)
    graph, topology = mlp(), Topology("mixed", devices, base.hosts, base.links)
    assert split(graph, megatron(graph, topology))["fc1"] == ({"b": 2, "k": 2}, (0, 2, 1, 3))


@given(graphs(), topologies(), st.integers(0, 2**32))
def test_random_strategies_are_legal_and_repeatable(graph: OperatorGraph, topology: Topology, seed: int) -> None:
    strategy = random_strategy(graph, topology, random.Random(seed))
    strategy.validate(graph, topology.device_count)
    assert random_strategy(graph, topology, random.Random(seed)) == strategy
    for op in graph.operators:
        assert len(strategy.operators[op.name].devices) <= 2 * topology.device_count
        assert op.partitionable or set(strategy.operators[op.name].degrees) <= {1}


def test_random_configs_reach_every_corner() -> None:
    op, rng = mlp().operators[0], np.random.default_rng(0)
    drawn = [random_config(op, 3, rng, max_tiles=4) for _ in range(400)]
    assert {max(config.degrees) for config in drawn} == {1, 2, 3, 4}
    assert {config.replicas for config in drawn} == {1, 2, 3, 4}
    assert {device for config in drawn for device in config.devices} == {0, 1, 2}
    assert {i for config in drawn for i, degree in enumerate(config.degrees) if degree > 1} == {0, 1, 2}
    assert max(len(config.devices) for config in drawn) == 4
