"""Recomputed operators whose parameters are gathered for their uses: the second run, too, waits for the values."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import recompute_name
from soap.plan.recomputation import needed_from
from soap.plan.syncs.gathering import gathers
from soap.plan.syncs.sharded import regather_name
from soap.profiles.roofline import RooflineCosts
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import simulate
from soap.strategy.classical import fsdp
from soap.strategy.config import Strategy
from soap.strategy.recomputation import recomputed
from soap.strategy.sync import SHARDED
from tests.simulator.test_sharded import FOUR, before, layers, passes
from tests.strategies import cases


def test_a_run_needs_all_its_values_when_it_begins_again() -> None:
    """Of eight layers 2 to 4 are recomputed: all three are needed behind the backward pass of layer 5."""
    graph = layers()
    strategy = recomputed(graph, fsdp(graph, FOUR), ("l2", "l3", "l4"))
    plan = build_plan(graph, replace(strategy, prefetch=0), FOUR)
    assert needed_from(plan)[1:6] == (1, 5, 5, 5, 5)
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
