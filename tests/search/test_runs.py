"""Which operators are worth recomputing together where blocks are hardly wider inside than what goes on, and recurrent layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.model.graph import OperatorGraph
from soap.plan.recomputation import dropped_holdings
from soap.profiles.roofline import RooflineCosts
from soap.simulator.lowering import build_plan
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel
from soap.strategy.named import named
from soap.strategy.recomputation import LIGHT, RECOMPUTED, STAYS, _ends_of_runs, recomputed, run_levels, runs_of
from tests.graph_builder import GraphBuilder, mlp, transformer
from tests.simulator.reference_memory.running import find_recomputation
from tests.strategies import CPU, cluster

TOPOLOGY = cluster([1, 1], CPU)
WIDTH = 64


def residual(blocks: int, inside: int = 4, batch: int = 512) -> OperatorGraph:
    """Blocks of elementwise operators, each added to what goes past it. ``past`` goes past all of them: inside a block half as much more
    goes on as between two of them."""
    g = GraphBuilder("residual")
    past = x = g.elementwise(g.linear(g.input("x", batch, 8), WIDTH, name="first"), name="past")
    for i in range(blocks):
        y = x
        for k in range(inside):
            y = g.elementwise(y, name=f"{i}.{k}")
        x = g.elementwise(x, y, name=f"{i}.add")
    return g.build(g.mean(g.elementwise(x, past, name="last"), name="mean"))


def test_a_repeated_layer_is_one_run_and_what_goes_on_behind_it_is_all_that_is_kept() -> None:
    graph = transformer(batch=8, layers=4)
    inside = [{op.name for op in graph.operators if op.name.startswith(f"{i}.")} - {f"{i}.add2"} for i in range(3)]
    for own in inside:
        assert sum(not own.isdisjoint(run) for run in runs_of(graph)) == sum(own <= {*run} for run in runs_of(graph)) == 1
    plan = build_plan(graph, recomputed(graph, data_parallel(graph, TOPOLOGY)), TOPOLOGY)
    active = {tile for tile, own in enumerate(plan.tiles) if graph.needs_backward(plan.operator(own))}
    dropped = dropped_holdings(plan, find_recomputation(plan, active).tiles, active)
    kept = {graph.operators[plan.tiles[own.tile].operator].name for place, own in enumerate(plan.holdings) if place not in dropped}
    assert kept.isdisjoint(set().union(*inside)) and {f"{i}.add2" for i in range(3)} <= kept


def test_what_is_read_behind_a_run_is_none_of_it() -> None:
    """Else the loss of a mixture's routers, which goes back first, would need all runs at once."""
    g = GraphBuilder("routed")
    x, routes = g.input("x", 512, 8), []
    for i in range(5):
        y = g.linear(x, 256, name=f"{i}.up")
        routes.append(g.linear(y, 8, name=f"{i}.route"))
        x = g.linear(g.elementwise(y, name=f"{i}.act"), 8, name=f"{i}.down")
    for i, own in enumerate(routes):
        x = g.elementwise(x, own, name=f"add{i}")
    graph = g.build(g.mean(x, name="mean"))
    inside = {name for run in runs_of(graph) for name in run}
    assert {f"{i}.act" for i in range(4)} <= inside and not any(name.endswith("route") for name in inside)


def test_runs_end_between_blocks_though_these_are_hardly_wider_inside() -> None:
    graph = residual(8)
    assert len(runs_of(graph)) > 1
    levels = {name: level for own in run_levels(graph, RECOMPUTED) for name, level in own.items()}
    kept = {name for name, level in levels.items() if level == LIGHT}
    assert len(kept) > 2 and all(name.endswith(".add") for name in kept - {"past"})
    assert "past" in kept and levels["0.1"] == RECOMPUTED  # it is read behind all ends: runs would go on across them if it was made again
    simulator = Simulator(graph, TOPOLOGY, RooflineCosts(TOPOLOGY))
    usual = data_parallel(graph, TOPOLOGY)
    whole, least = (max(simulator.run(strategy).peak_bytes) for strategy in (usual, recomputed(graph, usual)))
    assert least < 0.6 * whole


def test_recurrent_layers_are_runs_by_themselves_and_keep_what_they_make() -> None:
    usual = mlp(64, (16, 32, 32, 16))
    operators = tuple(replace(op, kind="lstm") if op.name in ("fc1", "fc2") else op for op in usual.operators)
    graph = OperatorGraph(usual.name, operators, usual.tensors, usual.loss)
    assert [own for own in run_levels(graph, RECOMPUTED) if "fc1" in own or "fc2" in own] == [{"fc1": LIGHT}, {"fc2": LIGHT}]
    selective = named("data_parallel+selective", graph, TOPOLOGY)  # computes nothing twice that costs much
    assert {selective.operators[name].recompute for name in ("fc1", "fc2")} == {STAYS}
    assert not any({"fc1", "fc2"} & {*run} for run in runs_of(graph))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=7), st.integers(0, 9), st.integers(1, 60))
def test_the_narrowest_ends_of_runs_that_are_not_too_large(places: list[tuple[int, int]], rest: int, most: int) -> None:
    """Beside all choices. ``places``: widths, and what is made before each since the one before."""
    ends = [(width, sum(more for _, more in places[: k + 1])) for k, (width, _) in enumerate(places)]
    made = sum(more for _, more in places) + rest

    def width(chosen: tuple[int, ...]) -> int | None:
        held, before = 0, 0
        for own, at in (*(ends[k] for k in chosen), (0, made)):
            if held + at - before > most:
                return None
            held, before = held + own, at
        return held

    every = [width(chosen) for count in range(len(ends) + 1) for chosen in combinations(range(len(ends)), count)]
    found = _ends_of_runs(ends, made, most)
    least = min((own for own in every if own is not None), default=None)
    assert (None if found is None else width(tuple(found))) == least


@pytest.mark.parametrize("blocks", [0, 1])
def test_small_graphs_have_no_runs_that_gain_nothing(blocks: int) -> None:
    assert runs_of(residual(blocks)) == ()
