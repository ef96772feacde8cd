from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soap.cluster.presets import local_topology
from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure
from soap.model.graph import FactorKind, OperatorGraph
from soap.model.regions import volume
from soap.plan.plan import Plan, ShardSync
from soap.profiles.roofline import RooflineCosts
from soap.runtime.planned import resized_plan, resized_program
from soap.runtime.program.program import compile_program
from soap.simulator.lowering import build_plan, lower
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import SPARSE_ALL_GATHER, fitted, parameter_server
from tests.graph_builder import GraphBuilder, mlp, transformer
from tests.runtime.plans import plan_of, split
from tests.strategies import cases

FOUR = local_topology(4)


def graph(name: str, batch: int) -> OperatorGraph:
    return mlp(batch=batch) if name == "mlp" else transformer(batch=batch, layers=1)


def without_uses(sync: ShardSync) -> ShardSync:
    return replace(sync, regions=tuple(replace(region, uses=()) for region in sync.regions))


@given(st.sampled_from(["mlp", "transformer"]), st.integers(1, 9), st.randoms(use_true_random=False))
@settings(suppress_health_check=list(HealthCheck))
def test_shards_stay_and_every_sample_is_computed_once(name: str, batch: int, rng: object) -> None:
    old, new = graph(name, 6), graph(name, batch)
    plan = build_plan(old, random_strategy(old, FOUR, rng), FOUR)  # type: ignore[arg-type]
    program = compile_program(plan)
    resized = resized_program(program, new, FOUR)
    kept = [(s.parameter, s.box, s.devices, s.trainable) for s in resized.plan.shards]
    assert kept == [(s.parameter, s.box, s.devices, s.trainable) for s in program.plan.shards]
    assert [without_uses(sync) for sync in resized.plan.syncs] == [without_uses(sync) for sync in program.plan.syncs]
    for position, op in enumerate(new.operators):
        config = plan.strategy.operators[op.name]
        points = sum(tile.size for tile in resized.plan.tiles if tile.operator == position)
        whole = 1
        for factor in op.factors:
            whole *= factor.size
        assert points == whole * config.replicas
        for tile in resized.plan.tiles:  # what a tile reads of a parameter is there
            if tile.operator == position:
                number = resized.plan.tiles.index(tile)
                for place, box in enumerate(tile.parameters):
                    held = [s for s in resized.plan.shards if (number, place) in s.uses and tile.device in s.devices]
                    assert sum(volume(s.box) for s in held) == volume(box)


@given(cases(max_moves=4, servers=True))
def test_at_the_same_size_it_is_the_same_plan(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    """With all that it says of synchronization."""
    same, topology, strategy = case
    plan = build_plan(same, strategy, topology)
    resized = resized_plan(plan, same, topology)
    assert {f.name for f in fields(Plan) if f.compare and getattr(resized, f.name) != getattr(plan, f.name)} == set()


@pytest.mark.parametrize("sync", [SPARSE_ALL_GATHER, parameter_server(2), parameter_server(2, "host")])
def test_synchronizations_stay_at_another_size(sync: SyncConfig) -> None:
    """It is the plan of the strategy itself at that size, where shards are the same."""
    (old, new), devices = (looking_up(8), looking_up(4)), local_topology(2)
    strategy = CLASSICAL["data_parallel"](old, devices)
    for name in old.sparse:
        strategy = strategy.with_parameter(name, fitted(old, name, sync))
    resized = resized_plan(build_plan(old, strategy, devices), new, devices)
    whole = build_plan(new, strategy, devices)
    assert whole.sparse_lookups and any(sync.contract.by_rows for sync in whole.syncs)
    assert {f.name for f in fields(Plan) if f.compare and getattr(resized, f.name) != getattr(whole, f.name)} == set()
    assert durations(resized, devices) == durations(whole, devices)


def looking_up(batch: int) -> OperatorGraph:
    g = GraphBuilder("looking up")
    x = g.embedding(g.input("ids", batch, 3, dtype="int64"), 40, 6)
    return g.build(g.mean(g.linear(x, 4)), 0.5)


def durations(plan: Plan, topology: Topology) -> dict[str, int]:
    return {task.name: task.duration_ns for task in lower(plan, topology, RooflineCosts(topology)).tasks}


def test_degrees_and_devices_stay() -> None:
    plan = plan_of(mlp(batch=8), split((0, 1, 2), b=3), fc1=split((2, 0, 1, 2), b=2, n=2))
    small = resized_plan(plan, mlp(batch=2), local_topology(3))
    for position in range(len(plan.graph.operators)):
        before, after = ([t for t in p.tiles if t.operator == position] for p in (plan, small))
        assert [t.device for t in before] == [t.device for t in after]
    assert [t.size for t in small.tiles if t.operator == 0][2] == 0  # three tiles for two samples


def test_without_a_sample_factor_the_first_tiles_work() -> None:
    """As importing a program for one sample makes it."""
    one = mlp(batch=1)
    operators = []
    for op in one.operators:
        gone = [i for i, f in enumerate(op.factors) if f.kind is FactorKind.SAMPLE]
        number = {i: k for k, i in enumerate(i for i in range(len(op.factors)) if i not in gone)}

        def without(operand, gone=gone, number=number):  # type: ignore[no-untyped-def]
            dims = tuple(replace(d, factor=None if d.factor in gone or d.factor is None else number[d.factor]) for d in operand.dims)
            return replace(operand, dims=dims)

        operators.append(
            replace(
                op,
                factors=tuple(f for i, f in enumerate(op.factors) if i not in gone),
                inputs=tuple(map(without, op.inputs)),
                parameters=tuple(map(without, op.parameters)),
                outputs=tuple(map(without, op.outputs)),
            )
        )
    single = replace(one, operators=tuple(operators))
    plan = plan_of(mlp(batch=8), split((0, 1, 2, 0), b=2, n=2), fc1=split((2, 0, 1, 2), b=2, n=2), cross_entropy=split((1, 2), b=2))
    small = resized_plan(plan, single, local_topology(3))
    where = [(small.operator(tile).name, tile.device) for tile in small.tiles]
    assert [device for name, device in where if name == "fc0"] == [0, 1]
    assert [device for name, device in where if name == "fc1"] == [2, 0]
    assert [device for name, device in where if name.startswith("cross_entropy")] == [1]
    assert [(s.parameter, s.box, s.devices) for s in small.shards] == [(s.parameter, s.box, s.devices) for s in plan.shards]
    assert all(shard.uses for shard in small.shards)


def test_one_line_where_a_strategy_cannot_be_carried_over() -> None:
    plan = plan_of(mlp(batch=8), split((0, 1), n=2))
    other = mlp(batch=4)
    first = other.operators[0]
    factors = tuple(replace(f, name="m", kind=FactorKind.ATTRIBUTE) if f.name == "n" else f for f in first.factors)
    renamed = replace(first, factors=factors)
    changed = replace(other, operators=(renamed, *other.operators[1:]))
    with pytest.raises(RuntimeFailure, match=r"^operator 'fc0' is split in another way for this batch size, .*; drop the last batch"):
        resized_plan(plan, changed, local_topology(3))
