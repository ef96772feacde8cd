"""Recomputed operators whose parameters are gathered for their uses: the second run, too, waits for the values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import recompute_name
from soap.plan.recomputation import needed_from
from soap.plan.syncs.gathering import gathers
from soap.plan.syncs.sharded import regather_name
from soap.profiles.roofline import RooflineCosts
from soap.simulator.engine import Engine
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import simulate
from soap.simulator.shared import Shared
from soap.strategy.classical import fsdp
from soap.strategy.config import Strategy
from soap.strategy.recomputation import recomputed
from soap.strategy.sync import SHARDED
from tests.simulator.compiled.agreement import compiled_tasks, reference_tasks
from tests.simulator.examples import across_a_barrier
from tests.simulator.test_sharded import FOUR, before, layers, passes
from tests.strategies import cases


def test_a_run_needs_all_its_values_when_it_begins_again() -> None:
    """Of eight layers 2 to 4 are recomputed: all three are needed behind the backward pass of layer 5."""
    graph = layers()
    strategy = recomputed(graph, fsdp(graph, FOUR), ("l2", "l3", "l4"))
    plan = build_plan(graph, replace(strategy, prefetch=0), FOUR)
    assert [own.position for own in needed_from(plan)[1:6]] == [1, 5, 5, 5, 5]
    named = {sync.parameter: sync for sync in plan.syncs}
    order = [plan.syncs[gather.sync].parameter for gather in gathers(plan) if gather.backward]
    assert order[:2] == ["l7.weight", "l6.weight"] and set(order[2:6]) == {f"l{i}.weight" for i in (2, 3, 4, 5)}
    found = before(plan)
    for i in (2, 3, 4):
        gather = regather_name(named[f"l{i}.weight"])
        again = {recompute_name(graph.operators[i], tile) for tile in plan.tiles if tile.operator == i}
        assert len(again) == 4
        assert all(gather in found[name] for name in again | passes(plan, i, back=True))
        assert not found[gather] & set().union(*(passes(plan, other, back=True) for other in (2, 3, 4, 5)))
    assert passes(plan, 6, back=True) <= found[regather_name(named[order[2]])]


def crossing(topology: Topology, count: int, *again: str, prefetch: int = 1) -> tuple[OperatorGraph, Strategy]:
    """``across_a_barrier`` with gathered parameters in so many micro-batches; these operators run again."""
    graph = across_a_barrier()
    return graph, replace(recomputed(graph, fsdp(graph, topology), again), microbatches=count, prefetch=prefetch)


@pytest.mark.parametrize(("count", "prefetch"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 4096)])
def test_second_runs_that_are_read_behind_a_barrier_wait_for_no_micro_batch(count: int, prefetch: int) -> None:
    """All of them come before any micro-batch goes back in front of the barrier."""
    graph, strategy = crossing(FOUR, count, "n0", "n1", "after", prefetch=prefetch)
    plan, at = build_plan(graph, strategy, FOUR), graph.index
    assert [needed_from(plan)[at[name]] for name in ("first", "n0", "n1")] == [(0, at["first"]), (1, at["loss"]), (1, at["loss"])]
    order = [(plan.syncs[own.sync].parameter, plan.syncs[own.sync].part) for own in gathers(plan) if own.backward]
    crossed = [(f"n{i}.weight", part) for part in range(count) for i in range(2)]
    assert [own[1] for own in order] == [*sorted(part for _, part in crossed), *range(count)]
    assert sorted(order[:-count]) == sorted(crossed) and order[-count:] == [("first.weight", part) for part in range(count)]
    for own in gathers(plan):
        waited = {plan.operator(plan.tiles[tile]).name for tile in own.after_backward}
        if not own.backward or plan.syncs[own.sync].parameter != "first.weight":
            assert not waited
        elif plan.syncs[own.sync].part:
            assert "first" in waited
    assert any(own.after_forward for own in gathers(plan) if own.backward)
    found = before(plan)
    for name in ("n0", "n1"):
        again = {recompute_name(graph.operators[at[name]], tile) for tile in plan.tiles if tile.operator == at[name]}
        assert len(again) == 4 * count and all(any(other.startswith("regather") for other in found[one]) for one in again)


def test_a_second_run_that_nothing_reads_behind_a_barrier_comes_with_its_own_chunk() -> None:
    """What ``behind`` and ``after`` read is kept: values of micro-batch 1 come when micro-batch 0 has gone back, as without second runs."""
    for again in (("n1",), ("n0", "n1")):
        plan = build_plan(*crossing(FOUR, 2, *again, prefetch=0), FOUR)
        assert {own.chunk for own in needed_from(plan)[: plan.graph.index["n1"] + 1]} == {0}
        waits = {(plan.syncs[own.sync].parameter, plan.syncs[own.sync].part): own.after_backward for own in gathers(plan) if own.backward}
        names = {plan.operator(plan.tiles[tile]).name for tile in waits["n1.weight", 1]}
        assert names >= {"n1", "first"}


@pytest.mark.parametrize("prefetch", [0, 1])
def test_compiled_code_gathers_for_them_as_plain_code_does(prefetch: int) -> None:
    graph, _ = crossing(FOUR, 2)
    costs = RooflineCosts(FOUR)
    engine = Engine(Shared(graph, FOUR, costs))
    for again in (("n0", "n1", "after"), ("n1", "after"), ("n1",), ()):
        for count in (1, 2, 3):
            _, strategy = crossing(FOUR, count, *again, prefetch=prefetch)
            engine.load(strategy)
            engine.simulate()
            assert compiled_tasks(engine) == reference_tasks(graph, FOUR, costs, strategy)


def test_values_of_a_run_come_when_the_run_before_it_goes_back() -> None:
    """Layers 1 to 3 are recomputed together: the gathers of layers 3 and 4 cannot wait for those two places before theirs."""
    graph = layers()
    plan = build_plan(graph, recomputed(graph, fsdp(graph, FOUR), ("l1", "l2", "l3", "l5", "l6")), FOUR)
    waits = {plan.syncs[own.sync].parameter: own.after_backward for own in gathers(plan) if own.backward}
    after = {name[:2]: "".join(sorted({plan.operator(plan.tiles[tile]).name for tile in tiles})) for name, tiles in waits.items()}
    assert after == {"l5": "", "l6": "", "l7": "", "l1": "l6", "l2": "l7", "l3": "l7", "l4": "l7", "l0": "l3"}


@given(cases())
def test_no_gather_waits_for_itself(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, strategy = case
    syncs = {tensor.name: SHARDED for tensor in graph.parameters if tensor.requires_grad}
    strategy = recomputed(graph, strategy.with_changes(parameters=syncs))
    for prefetch in (0, 2):
        plan = build_plan(graph, replace(strategy, prefetch=prefetch), topology)
        tasks = lower(plan, topology, RooflineCosts(topology))
        assert simulate(tasks).makespan_ns > 0
