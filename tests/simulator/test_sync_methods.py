"""What every method of synchronization has to hold, in the plan and in the simulator: one case a method (``sync_cases``)."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from itertools import product

import pytest

from soap.cluster.overheads import Port
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PlannedTraining
from soap.plan.plan import Plan
from soap.plan.syncs.seam import Phase, SyncMethod, method_for, method_of
from soap.profiles.roofline import RooflineCosts
from soap.simulator.compiled.syncs.codes import MOST_SETTINGS, SyncCodes
from soap.simulator.folding import Folding, fold
from soap.simulator.lowering import build_plan, lower
from soap.simulator.memory.sweep import memory_over_time
from soap.simulator.reference import simulate
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import TaskKind
from soap.strategy.classical import data_parallel, random_config, random_strategy
from soap.strategy.compression import parse
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.json_file import dumps, loads, strategy_hash
from soap.strategy.sync import compressed
from soap.strategy.sync_contracts import METHODS, Contract, find_contract
from tests.extent import so_many
from tests.graph_builder import GraphBuilder
from tests.simulator.compiled.walks import Edit, check
from tests.simulator.reference_memory.any_order import peak_bytes
from tests.simulator.sync_cases import CASES
from tests.strategies import CPU, GPU, cluster

METHOD = pytest.mark.parametrize("contract", METHODS, ids=lambda contract: contract.name)


UNKNOWN = [("readers", "dense", "gathered"), ("servers", "bf16", "kept"), ("all", "dense", "kept")]


def looked_up() -> OperatorGraph:
    """A sparse table, dense layers behind it, one of them shared, and two frozen ones, of which one has nothing before it to train."""
    g = GraphBuilder()
    shared = g.parameter("shared", 16, 16)
    x = g.embedding(g.input("ids", 8, 3, dtype="int64"), 64, 16, weight=g.parameter("table", 64, 16))
    low = g.linear(g.input("features", 8, 3, 16), 16, weight=g.parameter("low", 16, 16, frozen=True), bias=False)
    x = g.linear(g.elementwise(x, low), 16, weight=g.parameter("frozen", 16, 16, frozen=True), bias=False)
    x = g.linear(g.linear(x, 16, weight=shared, bias=False), 16, name="middle")
    return g.build(g.mean(g.linear(x, 16, weight=shared, bias=False)))


GRAPH = looked_up()


def served(contract: Contract, graph: OperatorGraph = GRAPH) -> list[str]:
    """The parameters that a method can synchronize."""
    return [tensor.name for tensor in graph.parameters if contract.serves(sparse=tensor.name in graph.sparse)]


def synchronized(strategy: Strategy, contract: Contract, rng: random.Random) -> Strategy:
    """All parameters that a method serves by it, in any of its cases."""
    return strategy.with_changes(parameters={name: rng.choice(CASES[contract.name]) for name in served(contract)})


def clusters() -> list[Topology]:
    plain = cluster([1, 1, 1], CPU)
    busy = replace(plain, ports=(Port(0, 0, 700, 333), Port(1, 0, 0, 1000)))
    return [cluster([2, 2], CPU), cluster([2, 1], GPU), busy, replace(cluster([2, 2], GPU), ports=(Port(0, 0, 700, 333),))]


def strategies(contract: Contract, count: int = 4) -> list[tuple[Topology, Strategy]]:
    found = []
    for number, topology in enumerate(clusters()):
        rng = random.Random(number)
        made = [data_parallel(GRAPH, topology), *(random_strategy(GRAPH, topology, rng) for _ in range(count))]
        found += [(topology, synchronized(strategy, contract, rng)) for strategy in made]
    return found


@METHOD
def test_has_a_case_that_it_serves(contract: Contract) -> None:
    method = method_of(contract)
    assert isinstance(method, SyncMethod) and method.contract is contract
    assert CASES[contract.name] and all(sync.contract is contract for sync in CASES[contract.name])
    assert served(contract), "no parameter of this graph is served: extend it"
    assert {sync.within for sync in CASES[contract.name]} == set(contract.within)


def test_no_two_serve_the_same() -> None:
    asked = [(contract.owner, contract.payload, contract.residence) for contract in METHODS]
    assert len(set(asked)) == len({contract.name for contract in METHODS}) == len(METHODS)
    assert METHODS[0] is SyncConfig().contract and SyncCodes().code(SyncConfig()) == 0


@METHOD
def test_parameters_of_the_other_kind_are_refused(contract: Contract) -> None:
    topology = clusters()[0]
    for tensor in GRAPH.parameters:
        strategy = data_parallel(GRAPH, topology).with_parameter(tensor.name, CASES[contract.name][0])
        if tensor.name in served(contract):
            strategy.validate(GRAPH, topology.device_count)
            continue
        with pytest.raises(StrategyError, match=rf"^parameter '{tensor.name}' is .*; expected {contract.word} "):
            strategy.validate(GRAPH, topology.device_count)


@pytest.mark.parametrize(("owner", "payload", "residence"), UNKNOWN)
def test_unknown_combinations_are_refused(owner: str, payload: str, residence: str) -> None:
    with pytest.raises(StrategyError, match=r"^no method synchronizes with owner .*; expected one of: readers, dense, kept; "):
        find_contract(owner, payload, residence)
    with pytest.raises(StrategyError, match=r"^no method synchronizes"):
        SyncConfig(owner, payload, residence)  # type: ignore[arg-type]


def test_codes_know_every_field() -> None:
    known = ("owner", "payload", "residence", "within", "partitions", "compression", "offload")
    assert tuple(field.name for field in fields(SyncConfig)) == known, "say the new field in a code as well"


@METHOD
def test_its_code_says_all_of_it(contract: Contract) -> None:
    codes = SyncCodes()
    for sync in CASES[contract.name]:
        for partitions in {1, sync.partitions, contract.most_partitions}:
            asked = replace(sync, partitions=partitions)
            assert codes.sync(codes.code(asked)) == asked
    assert len({codes.code(sync) for own in CASES.values() for sync in own}) == sum(map(len, CASES.values()))


def test_numbers_of_compressions_are_of_one_model_on_one_cluster() -> None:
    """A process that lives long may see any number of them, in one simulator after the other."""
    densities = [compressed(parse(f"rgc:{1 / (number + 2)}")) for number in range(MOST_SETTINGS)]
    first, second = SyncCodes(), SyncCodes()
    numbers = [first.code(sync) for sync in densities]
    assert len({*numbers}) == MOST_SETTINGS and [first.sync(code) for code in numbers[-3:]] == densities[-3:]
    further = compressed(parse("rgc:0.9"))
    with pytest.raises(StrategyError, match="more than 4096 settings of compression for one model on one cluster"):
        first.code(further)
    assert [first.code(sync) for sync in densities[:9]] == numbers[:9]  # those that were known still are
    assert second.sync(second.code(further)) == further


@METHOD
def test_files_keep_it(contract: Contract) -> None:
    topology = clusters()[0]
    for sync in CASES[contract.name]:
        strategy = data_parallel(GRAPH, topology).with_changes(parameters=dict.fromkeys(served(contract), sync))
        found, _ = loads(dumps(strategy, GRAPH, topology), GRAPH, topology)
        assert all(found.sync(tensor.name) == strategy.sync(tensor.name) for tensor in GRAPH.parameters)
        assert strategy_hash(found, GRAPH) == strategy_hash(strategy, GRAPH)


@METHOD
def test_every_gradient_is_synchronized_once(contract: Contract) -> None:
    for topology, strategy in strategies(contract):
        plan = build_plan(GRAPH, strategy, topology)
        numbers = [number for sync in plan.syncs for number in sync.shards]
        assert len(numbers) == len(set(numbers))
        for sync in plan.syncs:
            assert sync.contract in (contract, METHODS[0])
            updated = [] if plan.is_frozen(sync) else list(sync.shards)
            assert [part.shard for part in method_for(sync).updates(plan, sync)] == updated
            _check_steps(plan, strategy)


def _check_steps(plan: Plan, strategy: Strategy) -> None:
    """What the lowered tasks move is what the methods say, between the devices that take part."""
    for sync in plan.syncs:
        steps = method_for(sync).steps(plan, sync)
        assert [step.phase for step in steps] == sorted(step.phase for step in steps)
        for step in steps:
            assert [bool(step.rounds), bool(step.summed_bytes), step.collective is not None, bool(step.works)].count(True) == 1
            assert bool(step.summed_bytes) == bool(step.among) and {work.device for work in step.works} <= {*sync.peers}
            ends = {device for flows, _ in step.rounds for source, target, _ in flows for device in (source, target)}
            ends.update(device for group in (step.collective.groups if step.collective else ()) for device in group)
            assert ends | {*step.among} <= {*plan.members(sync)} and step.phase in Phase


@METHOD
def test_tasks_move_what_it_says(contract: Contract) -> None:
    for topology, strategy in strategies(contract, 2):
        plan = build_plan(GRAPH, strategy, topology)
        tasks = lower(plan, topology, RooflineCosts(topology))
        moved = {task.name: task for task in tasks.tasks if task.kind is TaskKind.SYNC}
        for sync in plan.syncs:
            for step in (own for own in method_for(sync).steps(plan, sync) if not own.works):
                task = moved[step.name]
                expected = sum(size for flows, _ in step.rounds for *_, size in flows)
                expected += step.collective.moved_bytes if step.collective else 0
                assert task.bytes == (expected or 2 * (len(step.among) - 1) * step.summed_bytes)


@METHOD
@pytest.mark.parametrize("seed", range(so_many(1, 4)))
def test_delta_full_and_reference_are_equal(contract: Contract, seed: int) -> None:
    for number, topology in enumerate(clusters()):
        rng = random.Random(f"{contract.name} {seed} {number}")
        start = synchronized(random_strategy(GRAPH, topology, rng), contract, rng)
        edits = []
        for _ in range(6):
            op = rng.choice(GRAPH.operators)
            configs = {op.name: random_config(op, topology.device_count, rng)} if rng.random() < 0.7 else {}
            names = rng.sample(served(contract), 1) if rng.random() < 0.6 or not configs else []
            syncs = {name: rng.choice((SyncConfig(), *CASES[contract.name])) for name in names}
            edits.append(Edit(configs, syncs, rng.random() < 0.6))
        check((GRAPH, topology, start, edits), afresh=True, training=PlannedTraining(clips=seed > 0))


@METHOD
def test_memory_is_never_under(contract: Contract) -> None:
    for (topology, strategy), clips in product(strategies(contract, so_many(1, 2)), (False, True)):
        training = PlannedTraining(clips=clips)  # by the norm of all gradients, if nothing is compressed
        simulation = Simulator(GRAPH, topology, RooflineCosts(topology), training=training).run(strategy)
        bound = peak_bytes(simulation.plan)
        for curve, most in zip(memory_over_time(simulation.tasks, simulate(simulation.tasks)), bound, strict=True):
            assert curve.peak_bytes <= most


@METHOD
def test_it_folds_if_its_rows_are_sums_and_collectives(contract: Contract) -> None:
    topology = cluster([1, 1, 1, 1], GPU)
    strategy = data_parallel(GRAPH, topology).with_changes(parameters=dict.fromkeys(served(contract), CASES[contract.name][0]))
    found = fold(GRAPH, topology, strategy)
    folds = contract.name in ("all_reduce", "sharded_state", "sharded")
    assert isinstance(found, Folding) if folds else found == f"synchronization by {contract.word} moves more than sums between copies"
