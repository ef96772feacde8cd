"""Clipping in a plan: where all devices learn the norm of all gradients, by which plans ranks can clip, and what searches leave out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.planning import PlanBuilder
from soap.plan.syncs.clipping import NORM_BYTES, NORM_NAME, refusal, sums_norm
from soap.plan.syncs.seam import PULL, SERVE
from soap.profiles.roofline import RooflineCosts
from soap.simulator.analysis.attribution import task_shares
from soap.simulator.communication.prices import Communication
from soap.simulator.compiled.syncs.clipping import can_clip
from soap.simulator.engine import Engine
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.shared import Shared
from soap.simulator.simulate import REFUSED_BYTES, Simulation, Simulator
from soap.simulator.task_list import SYNC
from soap.strategy.classical import data_parallel, random_strategy
from soap.strategy.compression import Bf16, Int8, Rgc
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import SHARDED_STATE, SPARSE_ALL_GATHER, compressed, parameter_server
from tests.graph_builder import GraphBuilder, mlp
from tests.simulator.compiled.agreement import synchronized
from tests.strategies import CPU, GPU, cluster

CLIPS = PlannedTraining(clips=True)
FOUR = cluster([2, 2], CPU)
LARGE, SMALL = "fc0.weight", "fc1.weight"


def words() -> OperatorGraph:
    """A sparse table and a dense layer."""
    g = GraphBuilder()
    x = g.embedding(g.input("ids", 8, 3, dtype="int64"), 64, 16, weight=g.parameter("table", 64, 16))
    return g.build(g.mean(g.linear(x, 16, name="dense")))


def played(sync: SyncConfig | None, training: PlannedTraining, topology: Topology = FOUR, graph: OperatorGraph | None = None) -> Simulation:
    """Data parallelism with all parameters that a method can serve synchronized by it."""
    graph = graph or mlp()
    strategy = data_parallel(graph, topology)
    names = [t.name for t in graph.parameters if sync is not None and sync.contract.serves(sparse=t.name in graph.sparse)]
    changed = strategy.with_changes(parameters={} if sync is None else dict.fromkeys(names, sync))
    return Simulator(graph, topology, RooflineCosts(topology), training=training).run(changed)


def spans(simulation: Simulation) -> dict[str, tuple[int, int]]:
    """Task -> its start and end; of a sum in chunks those of the last chunk."""
    times = zip(simulation.schedule.start_ns.tolist(), simulation.schedule.end_ns.tolist(), strict=True)
    return {task.name: own for task, own in zip(simulation.tasks.tasks, times, strict=True)}


@pytest.mark.parametrize("sync", [None, SHARDED_STATE, parameter_server(2)], ids=["all-reduce", "parts", "servers"])
@pytest.mark.parametrize("topology", [FOUR, cluster([2, 2], GPU)], ids=["cpu", "gpu"])
def test_all_updates_wait_for_the_norm_which_waits_for_all_gradients(sync: SyncConfig | None, topology: Topology) -> None:
    plain, clipped = (played(sync, training, topology) for training in (PLAIN, CLIPS))
    before, after = spans(plain), spans(clipped)
    [norm] = [task for task in clipped.tasks.tasks if task.name == NORM_NAME]
    everyone = tuple(range(4))
    assert NORM_NAME not in before and before.keys() | {NORM_NAME} == after.keys()
    assert norm.duration_ns == Communication(topology).allreduce(NORM_BYTES, everyone)[0] and norm.bytes == 2 * 3 * NORM_BYTES
    start, end = after[NORM_NAME]
    gradients = [name for name in after if name.startswith(("backward", "sync", "scatter", "push"))]
    assert len(gradients) > 4 and start == max(after[name][1] for name in gradients)
    updates = [name for name in after if name.startswith(("update", "serve"))]
    assert updates and min(after[name][0] for name in updates) == end
    assert clipped.bytes_moved == plain.bytes_moved + norm.bytes
    assert sum(clipped.link_bytes.values()) > sum(plain.link_bytes.values())
    shares = task_shares(clipped.tasks)[clipped.tasks.tasks.index(norm)]
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_step_takes_as_much_longer_as_the_norm_takes() -> None:
    """Where the last sum is over all devices, and all updates wait for it anyway."""
    plain, clipped = (played(None, training) for training in (PLAIN, CLIPS))
    assert clipped.makespan_ns - plain.makespan_ns == Communication(FOUR).allreduce(NORM_BYTES, (0, 1, 2, 3))[0]


def test_rows_wait_for_the_norm_too() -> None:
    for sync in (SPARSE_ALL_GATHER, parameter_server(2, rows=True)):
        clipped = played(sync, CLIPS, graph=words())
        after = spans(clipped)
        sums = [task.name for task in clipped.tasks.tasks if task.id[0] == SYNC and task.id[2] not in (SERVE, PULL)]
        assert any(clipped.plan.graph.sparse.keys() & {name.split()[-1].split("[")[0]} for name in sums)
        gradients = [*sums, *(name for name in after if name.startswith("backward"))]
        assert after[NORM_NAME][0] == max(after[name][1] for name in gradients)
        assert min(after[name][0] for name in after if name.startswith(("update", "serve"))) == after[NORM_NAME][1]


def test_nobody_waits_where_there_is_nothing_to_learn() -> None:
    """On one device; and where each rank clips its own gradients, because some are compressed."""
    alone = cluster([1], CPU)
    assert [task.name for task in played(None, CLIPS, alone).tasks.tasks] == [task.name for task in played(None, PLAIN, alone).tasks.tasks]
    assert NORM_NAME not in spans(played(compressed(Bf16()), CLIPS))


def refused(strategy: Strategy, topology: Topology = FOUR, graph: OperatorGraph | None = None) -> str:
    return refusal(PlanBuilder(graph or mlp(), topology, CLIPS).build(strategy))


def test_by_which_plans_ranks_can_clip() -> None:
    graph = mlp()
    usual = data_parallel(graph, FOUR)
    assert not refused(usual.with_changes(parameters={SMALL: parameter_server(2), LARGE: SHARDED_STATE}))
    assert not refused(usual.with_changes(parameters={LARGE: compressed(Rgc(0.01)), SMALL: compressed(Int8())}))
    assert not refused(usual.with_changes(parameters={LARGE: compressed(Rgc(0.01), "host"), SMALL: compressed(Int8(), "host")}))
    assert "compressed by other devices" in refused(
        usual.with_changes(parameters={LARGE: compressed(Rgc(0.01), "host"), SMALL: compressed(Int8())})
    )
    for sync in (parameter_server(2), SHARDED_STATE):
        assert "is not summed over all devices" in refused(usual.with_changes(parameters={LARGE: compressed(Rgc(0.01)), SMALL: sync}))
    apart = replace(usual.operators["fc1"], degrees=(2, 1, 1), devices=(0, 1))
    assert "2 of 4" in refused(usual.with_changes({"fc1": apart}, {LARGE: compressed(Rgc(0.01))}))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_compiled_code_has_the_same_rule(seed: int) -> None:
    """On random strategies, and on data parallelism with one operator or some parameters changed, of which some are refused."""
    rng, verdicts = random.Random(seed), set()
    for graph in (mlp(), words()):
        for topology in (FOUR, cluster([1, 1, 1], CPU), cluster([3], CPU)):
            costs = RooflineCosts(topology)
            engine, asked = (Engine(Shared(graph, topology, costs, training)) for training in (CLIPS, PLAIN))
            simulator = Simulator(graph, topology, costs, training=CLIPS)
            for trial in range(12):
                start = random_strategy(graph, topology, rng) if trial % 4 == 0 else data_parallel(graph, topology)
                strategy = synchronized(start, graph, rng, rng.choice((0.3, 1.0)))
                if trial % 4 == 1:
                    lossy = compressed(Rgc(0.01), rng.choice(("none", "host")))
                    dense = [t.name for t in graph.parameters if t.name not in graph.sparse]
                    strategy = start.with_changes(parameters=dict.fromkeys(rng.sample(dense, rng.randint(1, len(dense))), lossy))
                engine.load(strategy)
                engine.simulate()
                expected = refused(strategy, topology, graph) == ""
                assert bool(can_clip(engine.world)) == expected == (not simulator.is_refused(strategy))
                verdicts.add((expected, any(sync.compression for sync in strategy.parameters.values())))
                asked.load(strategy)
                asked.simulate()
                assert can_clip(asked.world)
    assert verdicts >= {(True, True), (False, True), (True, False)}


@pytest.mark.slow
def test_searches_are_told_that_a_refused_plan_fits_nowhere() -> None:
    graph = mlp()
    usual = data_parallel(graph, FOUR)
    allowed = usual.with_changes(parameters={LARGE: compressed(Rgc(0.01))})
    mixed = allowed.with_changes(parameters={SMALL: SHARDED_STATE})
    for training, lacking in ((CLIPS, REFUSED_BYTES), (PLAIN, 0)):
        simulator = Simulator(graph, FOUR, RooflineCosts(FOUR), training=training)
        for evaluator in (simulator, IncrementalSimulator(simulator)):
            for strategy, expected in ((usual, 0), (allowed, 0), (mixed, lacking)):
                evaluator.makespan_ns(strategy)
                assert evaluator.overflow_bytes(strategy) == expected
                assert (evaluator.peak_share(strategy) < 1) == (expected == 0)
    assert not sums_norm(PlanBuilder(graph, FOUR, CLIPS).build(mixed))
