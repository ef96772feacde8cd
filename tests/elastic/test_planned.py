"""Strategies of servers and workers, and the plans that they mean: each says all of the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.elastic.layout import ElasticPlan, TableCut
from soap.elastic.planned import in_order, options_of, plan_of, strategy_of
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.consistency import parse
from soap.strategy.json_file import dumps, loads
from soap.strategy.named import named
from soap.strategy.recomputation import RECOMPUTED
from soap.strategy.sync import parameter_server
from tests.graph_builder import GraphBuilder, mlp
from tests.strategies import CPU, cluster

DEVICES, SAMPLES = 6, 12
ROWS = {"wide": 9, "short": 2, "twice": 7}


def clicks(kept: bool = False) -> OperatorGraph:
    """Three tables, one of them with two uses, and a dense layer behind them. ``kept``: a buffer that changes."""
    g = GraphBuilder("clicks")
    ids = [g.input(name, SAMPLES, 1, dtype="int64") for name in ("a", "b", "c", "d")]
    found = [g.embedding(own, ROWS[name], 4, name=name) for own, name in zip(ids, ROWS, strict=False)]
    found.append(g.embedding(ids[3], ROWS["twice"], 4, weight="twice.weight", name="again"))
    x = g.elementwise(*found, name="sum")
    if kept:
        g.state(g.elementwise(g.batch_mean(x), g.constant("held", 1, 4)))
    return g.build(g.mean(g.linear(x, 3, name="top"), name="loss"))


GRAPH = clicks()
TOPOLOGY = cluster([1] * DEVICES, CPU)
TABLES = tuple(f"{name}.weight" for name in ROWS)


@st.composite
def plans(draw: st.DrawFn) -> ElasticPlan:
    """Any plan for ``GRAPH`` whose dense variables are on the first servers; servers in any order, some of them with nothing."""
    workers = draw(st.permutations(range(DEVICES)))[: draw(st.sampled_from([n for n in range(1, DEVICES + 1) if SAMPLES % n == 0]))]
    devices = draw(st.permutations(range(DEVICES)))[: draw(st.integers(1, DEVICES))]
    tables = {}
    for name in draw(st.lists(st.sampled_from(TABLES), min_size=1, unique=True)):
        axis = draw(st.integers(0, 1))
        size = GRAPH.tensors[name].shape[axis]
        tables[name] = TableCut(axis, tuple(draw(st.lists(st.integers(0, len(devices) - 1), min_size=1, max_size=min(size, 5)))))
    used = sorted({server for cut in tables.values() for server in cut.servers}, key=lambda server: devices[server])
    dense = tuple(used[: draw(st.integers(1, len(used)))])
    consistency = parse(draw(st.sampled_from(("sync", "bounded:0", "bounded:4", "async"))))
    return ElasticPlan(tuple(workers), tuple(devices), tables, dense, SAMPLES // len(workers), consistency)


@given(plans())
def test_a_plan_is_a_strategy_and_back(plan: ElasticPlan) -> None:
    strategy = strategy_of(plan, GRAPH)
    found = plan_of(strategy, GRAPH)
    assert found == in_order(plan) == in_order(found)
    assert strategy_of(found, GRAPH) == strategy
    text = dumps(strategy, GRAPH, TOPOLOGY)
    assert plan_of(loads(text, GRAPH, TOPOLOGY)[0], GRAPH) == found
    used = sorted({plan.servers[server] for cut in plan.tables.values() for server in cut.servers})
    assert [found.servers, found.workers, found.dense] == [tuple(used), plan.workers, tuple(range(len(plan.dense)))]
    for name, cut in plan.tables.items():
        assert [found.servers[server] for server in found.tables[name].servers] == [plan.servers[server] for server in cut.servers]


@given(plans())
def test_in_step_it_is_an_exact_strategy_that_can_be_simulated(plan: ElasticPlan) -> None:
    strategy = replace(strategy_of(plan, GRAPH), consistency="sync")
    found = Simulator(GRAPH, TOPOLOGY, RooflineCosts(TOPOLOGY)).run(strategy)
    readers = [len(shard.devices) for shard in found.plan.shards if shard.parameter in plan.tables]
    assert found.makespan_ns > 0 and {*readers} == {1}  # nothing of a table travels


def usual(**changes: object) -> ElasticPlan:
    cuts = {name: TableCut(0, (0, 1)) for name in TABLES}
    plan = ElasticPlan((2, 3, 4), (0, 1), cuts, (0, 1), 4, parse("async"))
    return replace(plan, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (usual(workers=()), r"workers on devices \[\]; expected one on each, and one at least"),
        (usual(workers=(2, 2, 3)), r"workers on devices \[2, 2, 3\]"),
        (usual(servers=(1, 1)), r"servers on devices \[1, 1\]"),
        (usual(batch=5), r"3 workers with 5 samples each; expected the model's 12 samples together"),
        (usual(dense=(1,)), r"dense variables are on servers \[1\]; expected those on the first devices"),
        (usual(dense=()), r"0 servers have pieces of the dense variables; expected one at least, for 'top\.weight'"),
        (usual(tables={"short.weight": TableCut(0, (0, 1, 1))}), r"table 'short\.weight' in 3 parts along axis 0; expected 1 to 2"),
        (usual(tables={"top.weight": TableCut(0, (0, 1))}), r"parameter 'top\.weight' is no table .* expected one of those: wide\.weight"),
    ],
)
def test_what_no_strategy_says_is_refused(plan: ElasticPlan, said: str) -> None:
    with pytest.raises(StrategyError, match=f"^{said}"):
        strategy_of(plan, GRAPH)


def changed(name: str, config: OpConfig) -> Strategy:
    return strategy_of(usual(), GRAPH).with_operator(name, config)


STRATEGY = strategy_of(usual(), GRAPH)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (data_parallel(GRAPH, TOPOLOGY), r"operator 'wide', which looks up table 'wide\.weight', is split by b:6; expected its owners"),
        (changed("again", OpConfig((1, 1, 1, 2), (0, 1))), r"operators 'twice' and 'again' have table 'twice\.weight' in different parts"),
        (changed("wide", OpConfig((1, 1, 1, 1), (0, 1), 2)), r"operator 'wide', .* is split by nothing in 2 replicas"),
        (
            changed("top", OpConfig((3, 1, 1, 1), (2, 4, 3))),
            r"operator 'top' is split by b:3 on devices 2, 4, 3; expected samples in 3 parts",
        ),
        (changed("top", OpConfig((1, 1, 1, 3), (2, 3, 4))), r"operator 'top' is split by n:3 on devices 2, 3, 4"),
        (changed("top", replace(STRATEGY.operators["top"], recompute=RECOMPUTED)), r"operator 'top' is marked to be recomputed"),
        (replace(STRATEGY, microbatches=2), r"the strategy has micro-batches or stages; expected none"),
        (replace(STRATEGY, parameters={}), r"parameter 'top\.weight' is synchronized by allreduce; expected servers to own it"),
        (STRATEGY.with_parameter("top.bias", parameter_server(1)), r"parameter 'top\.weight' is in 2 partitions, 'top\.bias' in 1"),
        (STRATEGY.with_changes(parameters={n: parameter_server(2, rows=True) for n in TABLES}), r"no table is looked up at servers"),
    ],
)
def test_strategies_of_another_form_are_refused_by_name(strategy: Strategy, said: str) -> None:
    with pytest.raises(StrategyError, match=f"^{said}") as refused:
        plan_of(strategy, GRAPH)
    assert "\n" not in str(refused.value)


def test_what_keeps_state_or_has_no_table_is_refused() -> None:
    kept = clicks(kept=True)
    strategy = replace(
        STRATEGY, operators={op.name: STRATEGY.operators.get(op.name, OpConfig((1,) * len(op.factors), (2,))) for op in kept.operators}
    )
    with pytest.raises(StrategyError, match=r"^operator '.*' keeps buffers from step to step \(batch norm\?\)"):
        plan_of(strategy, kept)
    with pytest.raises(StrategyError, match=r"^model 'mlp' has no table that ids of the batch look up"):
        named("bipartite", mlp(), TOPOLOGY)


def test_strategies_by_name() -> None:
    """Tables by rows, dealt out in turn; as many workers as divide the samples."""
    apart, together = (
        plan_of(named("bipartite:2+bounded:3", GRAPH, TOPOLOGY), GRAPH),
        plan_of(named("fully_connected", GRAPH, TOPOLOGY), GRAPH),
    )
    assert apart == ElasticPlan((2, 3, 4, 5), (0, 1), {name: TableCut(0, (0, 1)) for name in TABLES}, (0, 1), 3, parse("bounded:3"))
    assert (together.workers, together.servers, together.batch, str(together.consistency)) == ((*range(6),), (*range(6),), 2, "sync")
    assert [cut.servers for cut in together.tables.values()] == [(0, 1, 2, 3, 4, 5), (0, 1), (2, 3, 4, 5, 0, 1)]
    assert plan_of(named("bipartite", GRAPH, TOPOLOGY), GRAPH).servers == (0, 1)  # 12 samples are not for 5 workers
    assert plan_of(named("bipartite:1", GRAPH, TOPOLOGY), GRAPH).workers == (1, 2, 3, 4)
    for name, said in (
        ("bipartite:6", r"6 servers; expected 1 to 5 on this cluster"),
        ("fully_connected:7", r"7 devices; expected 1 to 6 on this cluster"),
        ("data_parallel+async", r"'async' is for servers and workers; expected it behind bipartite\[:N\] or fully_connected\[:N\]"),
        ("bipartite+bounded:x", r"consistency 'bounded:x'"),
    ):
        with pytest.raises(StrategyError, match=said):
            named(name, GRAPH, TOPOLOGY)


def test_launcher_options_follow_from_the_plan() -> None:
    options = options_of(usual(), machines=[0, 0, 1, 1, 2, 2], steps=5)
    assert (options.batch, options.workers, options.servers, options.dense, options.steps) == (4, 3, 2, (0, 1), 5)
    assert options.tables == usual().tables and (options.worker_machines, options.server_machines) == ((1, 1, 2), (0, 0))
    assert (options.bound, options.averaged) == (None, False)
    exact = options_of(usual(consistency=parse("sync")))
    assert exact.averaged and (exact.reduce_dense, exact.reduce_sparse) == ("mean", "mean")
    assert options_of(usual(consistency=parse("bounded:7"))).bound == 7
