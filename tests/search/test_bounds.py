from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.api import load_cluster, simulator_for
from soap.cluster.topology import Device, DeviceType, Topology
from soap.model.graph import DimMap, Factor
from soap.plan.tiling import tiles_of
from soap.profiles.roofline import RooflineCosts
from soap.search.oracles.bounds import always_covered, always_touched, certain_gradients, lower_bound
from soap.search.space import build_space
from soap.simulator.cut_operators import CutOperators
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import TaskKind
from soap.strategy.classical import data_parallel
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.sync import SPARSE_ALL_GATHER
from tests.extent import MANY
from tests.graph_builder import SAMPLE, GraphBuilder, convnet, mlp, transformer
from tests.search.toys import drawn_from
from tests.simulator.compiled.agreement import synchronized
from tests.simulator.examples import UNIT_NS, PointCosts, chain, pairwise_cluster
from tests.strategies import CPU, GPU, cluster, graphs, topologies


def mixed(topology: Topology) -> Topology:
    """The same with every other device a slower one."""
    devices = [Device(d.index, d.name, d.host, (GPU, CPU)[d.index % 2]) for d in topology.devices]
    return Topology("mixed", tuple(devices), topology.hosts, topology.links)


@given(graphs(), topologies(max_devices=4), st.booleans(), st.booleans(), st.integers(0, 2**20))
def test_no_strategy_of_the_space_is_below(graph, topology, points, mix, seed) -> None:  # type: ignore[no-untyped-def]
    topology = mixed(topology) if mix else topology
    costs = PointCosts(1000) if points else RooflineCosts(topology)
    space, simulator = build_space(graph, topology.device_count, every_degree=True), Simulator(graph, topology, costs)
    bound = lower_bound(space, CutOperators(space.graph, topology, costs))
    assert bound.bound_ns == max(bound.path_ns, bound.work_ns) > 0
    rng = random.Random(seed)
    for _ in range(5):
        strategy = Strategy({op.name: drawn_from(own, rng) for op, own in zip(graph.operators, space.operators, strict=True)})
        assert bound.bound_ns <= simulator.makespan_ns(strategy)
        assert bound.bound_ns <= simulator.makespan_ns(synchronized(strategy, graph, rng))


@given(graphs(), st.integers(1, 3), st.integers(0, 2**20))
def test_certain_backward_passes_are_run(graph, device_count, seed) -> None:  # type: ignore[no-untyped-def]
    topology, rng = cluster([device_count]), random.Random(seed)
    space = build_space(graph, device_count, every_degree=True)
    strategy = Strategy({op.name: drawn_from(own, rng) for op, own in zip(graph.operators, space.operators, strict=True)})
    run = Simulator(graph, topology, PointCosts(1)).run(strategy)
    done = set()
    for task in run.tasks.tasks:
        if task.kind is TaskKind.BACKWARD and task.tile is not None:
            tile = run.plan.tiles[task.tile]
            done.add((tile.operator, tile.intervals))
    for i, certain in enumerate(certain_gradients(graph)):
        cells = {tile.intervals for tile in run.plan.tiles if tile.operator == i}
        assert not certain or all((i, cell) in done for cell in cells), graph.operators[i].name


@given(st.integers(1, 6), st.integers(0, 3), st.integers(-3, 3), st.integers(-3, 4), st.integers(1, 8), st.data())
@MANY
def test_touched_and_covered_are_so_under_all_degrees(factor, scale, lo, hi, size, data) -> None:  # type: ignore[no-untyped-def]
    g = GraphBuilder()
    x = g.operator("make", [Factor("s", size, SAMPLE)], [], [(g.parameter("p", size), [DimMap(0)])], [((size,), [DimMap(0)])])[0]
    read = g.operator("read", [Factor("f", factor, SAMPLE)], [(x, [DimMap(0, scale, lo, hi)])], [], [((factor,), [DimMap(0)])])[0]
    graph = g.build(g.mean(read))
    tiles = tiles_of(graph, 1, OpConfig((factor,), (0,) * factor))
    intervals = [tile.inputs[0][0] for tile in tiles]
    assert always_touched(graph, 1, graph.operators[1].inputs[0]) <= all(a < b for a, b in intervals)
    got = set().union(*(range(a, b) for a, b in intervals))
    if scale:  # with scale 0 all tiles have the same part
        assert always_covered(graph, 1, graph.operators[1].inputs[0]) <= (got == set(range(size)))
        assert always_touched(graph, 1, graph.operators[1].inputs[0]) == all(a < b for a, b in intervals)


def test_the_bound_of_a_chain_by_hand() -> None:
    graph, topology = chain(4, 2, 2), pairwise_cluster(2)
    bound = lower_bound(build_space(graph, 2), CutOperators(graph, topology, PointCosts()))
    # l1 has 4 * 2 * 2 points and the loss 4, of which a tile has half; backward takes twice as long.
    assert bound.path_ns == 3 * (8 + 2) * UNIT_NS
    assert bound.work_ns == pytest.approx(3 * (16 + 4) * UNIT_NS / 2)
    alone = lower_bound(build_space(graph, 1), CutOperators(graph, pairwise_cluster(1), PointCosts()))
    assert alone.path_ns == 3 * (16 + 4) * UNIT_NS


def test_lookups_count_as_what_is_quicker() -> None:
    """The gradient of the whole table takes 0.4 ms, that of 64 rows next to nothing."""
    g = GraphBuilder()
    ids, table = g.input("ids", 64, dtype="int64"), g.parameter("table", 10**6, 1)
    graph, topology = g.build(g.mean(g.embedding(ids, 10**6, 1, weight=table))), cluster([1], CPU)
    costs = RooflineCosts(topology)
    simulator, usual = Simulator(graph, topology, costs), data_parallel(graph, topology)
    computing = []
    for sync in (SyncConfig(), SPARSE_ALL_GATHER):
        tasks = simulator.run(usual.with_parameter("table", sync)).tasks.tasks
        computing.append(sum(task.duration_ns for task in tasks if task.tile is not None))
    assert lower_bound(build_space(graph, 1), CutOperators(graph, topology, costs)).bound_ns == computing[1] < computing[0] / 4


def test_slower_devices_count_by_their_speed() -> None:
    graph, topology = transformer(), cluster([2])
    half = DeviceType("half", "cuda", {"float32": 5e11}, 5e10, 2**32, 1e-5, "made up for tests")
    devices = (topology.devices[0], replace(topology.devices[1], type=half))
    space, others = build_space(graph, 2), (topology, replace(topology, devices=devices))
    bounds = [lower_bound(space, CutOperators(graph, own, RooflineCosts(own))) for own in others]
    assert bounds[1].work_ns == pytest.approx(2 / 1.5 * bounds[0].work_ns, rel=1e-3)
    assert bounds[1].path_ns == bounds[0].path_ns  # which may go over the quicker device


@pytest.mark.parametrize("make", [mlp, convnet, transformer])
def test_durations_are_those_of_the_cost_model(make) -> None:  # type: ignore[no-untyped-def]
    graph, topology = make(), mixed(cluster([2]))
    costs = RooflineCosts(topology)
    cuts = CutOperators(graph, topology, costs)
    for position, op in enumerate(graph.operators):
        degrees = tuple(min(2, factor.size) if i < 2 else 1 for i, factor in enumerate(op.factors)) if op.partitionable else (1,) * 0
        config = OpConfig(degrees, (0,) * int(np.prod(degrees)))
        for device in topology.devices:
            tiles = tiles_of(graph, position, config)
            expected = [[f(graph, tile, device.type) for tile in tiles] for f in (costs.forward_ns, costs.backward_ns)]
            assert cuts.durations(position, degrees)[cuts.type_of[device.index]].tolist() == expected


@pytest.mark.long
def test_a_large_batch_on_quick_links_comes_near_the_bound() -> None:
    simulator = simulator_for("zoo:resnet50@4096", load_cluster("h200-8"))
    bound = lower_bound(build_space(simulator.graph, 8), CutOperators(simulator.graph, simulator.topology, simulator.costs))
    found_ns = simulator.makespan_ns(data_parallel(simulator.graph, simulator.topology))
    assert 0.8 * found_ns < bound.bound_ns < found_ns


def test_the_path_goes_on_behind_a_concatenation() -> None:
    g = GraphBuilder()
    x = g.input("x", 4, 2)
    branches = [g.linear(x, 2, bias=False), g.linear(g.linear(x, 2, bias=False), 2, bias=False)]
    graph = g.build(g.mean(g.concat(*branches, 1)))
    bound = lower_bound(build_space(graph, 1), CutOperators(graph, pairwise_cluster(1), PointCosts()))
    assert bound.path_ns == 3 * (16 + 16 + 16) * UNIT_NS  # the shorter branch, the concatenation, the loss
