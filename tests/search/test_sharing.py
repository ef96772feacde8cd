"""Owners of several parameters at once: starts, sets, and the chain's move."""

from __future__ import annotations

from soap.profiles.roofline import RooflineCosts
from soap.search.compiled.memory import MOVES
from soap.search.compiled.runner import CompiledChain
from soap.search.sharing import owner_sets, shared_starts
from soap.search.space import build_space
from soap.search.starts import Start
from soap.strategy.classical import data_parallel, fsdp, megatron, zero1
from soap.strategy.recomputation import runs_of
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE, parameter_server, sync_choices
from tests.graph_builder import transformer
from tests.search.toys import compiled_space
from tests.strategies import GPU, cluster

GRAPH, TOPOLOGY = transformer(layers=2, batch=8), cluster([2], GPU)


def test_sets_are_those_of_runs_and_of_all() -> None:
    sets = owner_sets(GRAPH, sync_choices(GRAPH, TOPOLOGY, saving=True))
    trained = {tensor.name for tensor in GRAPH.parameters if tensor.requires_grad}
    assert trained in [set(own) for own in sets] and len(set(sets)) == len(sets) > 1
    runs = [{o.tensor for name in run for o in GRAPH.operators[GRAPH.index[name]].parameters} for run in runs_of(GRAPH)]
    assert all(any(set(own) <= run for run in runs) or set(own) == trained for own in sets)
    assert owner_sets(GRAPH, {}) == () and owner_sets(GRAPH, sync_choices(GRAPH, TOPOLOGY, [parameter_server(2)])) == ()


def test_starts_share_what_the_fastest_and_data_parallelism_sum() -> None:
    syncs = sync_choices(GRAPH, TOPOLOGY, saving=True)
    usual, best = data_parallel(GRAPH, TOPOLOGY), megatron(GRAPH, TOPOLOGY)
    name = GRAPH.parameters[0].name
    served = best.with_parameter(name, parameter_server(2))
    starts = [Start("data_parallel", usual, 20, 0), Start("faster", usual, 1, 5), Start("megatron", served, 10, 0)]
    found = shared_starts(GRAPH, TOPOLOGY, starts, syncs)
    assert [*found] == ["megatron+zero1", "zero1", "megatron+fsdp", "fsdp"]
    assert found["zero1"] == zero1(GRAPH, TOPOLOGY) and found["fsdp"] == fsdp(GRAPH, TOPOLOGY)
    assert found["megatron+fsdp"].operators == best.operators and found["megatron+fsdp"].sync(name) == parameter_server(2)
    assert {sync for other, sync in found["megatron+fsdp"].parameters.items() if other != name} == {SHARDED}
    known = [*starts, Start("fsdp", fsdp(GRAPH, TOPOLOGY), 30, 0)]
    assert [*shared_starts(GRAPH, TOPOLOGY, known, syncs)] == ["megatron+zero1", "zero1", "megatron+fsdp"]
    assert shared_starts(GRAPH, TOPOLOGY, starts, {}) == {} == shared_starts(GRAPH, TOPOLOGY, starts[1:2], syncs)
    hosts = cluster([2, 2], GPU)
    alone = [Start("data_parallel", data_parallel(GRAPH, hosts), 20, 0)]
    ways = shared_starts(GRAPH, hosts, alone, sync_choices(GRAPH, hosts, saving=True))
    assert [{*own.parameters.values()} for own in ways.values()] == [{SHARDED_STATE}, {SHARDED}, {SHARDED_IN_HOSTS}]


def test_a_chain_gives_sets_other_owners_at_once() -> None:
    syncs = sync_choices(GRAPH, TOPOLOGY, saving=True)
    sets = {frozenset(own) for own in owner_sets(GRAPH, syncs)}
    strategy = data_parallel(GRAPH, TOPOLOGY)
    space = compiled_space(build_space(GRAPH, 2, syncs=syncs), TOPOLOGY, RooflineCosts(TOPOLOGY))
    chain = CompiledChain(space, strategy, seed=1, proposals=80)
    chain.weights = {move: float(move == "sync") for move in MOVES}
    changed = set()
    for proposals in range(1, 81):
        before = chain.strategy
        chain.run(proposals, beta=1e-6, focus=0.0)
        after = chain.strategy
        moved = frozenset(name for name in syncs if before.sync(name) != after.sync(name))
        if len(moved) > 1:
            assert moved in sets and len({before.sync(name) for name in moved}) == len({after.sync(name) for name in moved}) == 1
            changed.add(moved)
    assert changed
