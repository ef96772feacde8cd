"""The whole way from a strategy to its time and memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.plan.syncs.amounts import COUNT_BYTES
from soap.simulator import simulate
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import TaskKind
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.json_file import strategy_hash
from soap.strategy.sync import worded
from soap.strategy.workers import Workers
from tests.extent import FEW
from tests.simulator.examples import UNIT_NS, PointCosts, chain, on, pairwise_cluster, strategy
from tests.strategies import cases

TWO = pairwise_cluster(1, 1)
PIPELINE = strategy(l1=on(0, degrees=(1, 1, 1)), loss=on(1, degrees=(1,)))


def simulator(topology: Topology = TWO, optimizer_states: int = 2) -> Simulator:
    return Simulator(chain(4, 2, 3), topology, PointCosts(), optimizer_states)


def with_memory(topology: Topology, memory_bytes: int) -> Topology:
    devices = tuple(replace(d, type=replace(d.type, memory_bytes=memory_bytes)) for d in topology.devices)
    return replace(topology, devices=devices)


def test_outcome_by_hand() -> None:
    outcome = simulator().run(PIPELINE)
    assert outcome.makespan_ns == 181 * UNIT_NS
    assert outcome.bytes_moved == 96
    assert (outcome.fits, outcome.overflow_bytes) == (True, 0)
    assert simulator().cost(PIPELINE) == (181 * UNIT_NS, 0)


def test_a_step_of_several_micro_batches_synchronizes_once() -> None:
    outcome = simulator().run(strategy(l1=on(0, 1, degrees=(2, 1, 1)), loss=on(0, 1, degrees=(2,))))
    last = [end for task, end in zip(outcome.tasks.tasks, outcome.schedule.end_ns, strict=True) if task.kind is TaskKind.BACKWARD]
    assert outcome.step_ns() == outcome.step_ns(1) == outcome.makespan_ns > max(last)
    assert outcome.step_ns(3) == outcome.makespan_ns + 2 * max(last)


def test_what_does_not_fit_is_counted_over_all_devices() -> None:
    ample = simulator().run(PIPELINE)
    small = simulator(with_memory(TWO, max(ample.peak_bytes) - 1))
    outcome = small.run(PIPELINE)
    assert not outcome.fits
    assert outcome.overflow_bytes == sum(max(0, peak - max(ample.peak_bytes) + 1) for peak in ample.peak_bytes) > 0
    assert small.cost(PIPELINE) == (181 * UNIT_NS, outcome.overflow_bytes)
    assert small.overflow_bytes(PIPELINE) == outcome.overflow_bytes


def test_what_fits_in_the_simulated_order_fits() -> None:
    ample = simulator().run(PIPELINE)
    small = simulator(with_memory(TWO, max(ample.peak_bytes)))
    assert small.run(PIPELINE).fits and small.cost(PIPELINE)[1] == 0 and simulator(small.topology).overflow_bytes(PIPELINE) == 0


def test_optimizer_states_reach_the_memory() -> None:
    with_adam, with_sgd = simulator().run(PIPELINE), simulator(optimizer_states=0).run(PIPELINE)
    assert with_adam.memory_over_time[0].peak_bytes - with_sgd.memory_over_time[0].peak_bytes == 2 * 24 + COUNT_BYTES


def test_cost_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[object] = []
    monkeypatch.setattr(simulate, "simulate", lambda tasks, play=simulate.simulate: played.append(1) or play(tasks))
    made = simulator()
    reordered = Strategy(dict(reversed(PIPELINE.operators.items())), {"l1.weight": SyncConfig()})
    assert made.cost(PIPELINE) == made.cost(reordered) == made.cost(PIPELINE)
    assert len(played) == 1
    made.cost(PIPELINE.with_operator("loss", on(0, degrees=(1,))))
    assert len(played) == 2


def test_cost_forgets_what_was_not_asked_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "CACHED_STRATEGIES", 2)
    played: list[object] = []
    monkeypatch.setattr(simulate, "simulate", lambda tasks, play=simulate.simulate: played.append(1) or play(tasks))
    made = simulator()
    second, third = (PIPELINE.with_operator("loss", on(0, *more, degrees=(1 + len(more),))) for more in ((), (1,)))
    for chosen in (PIPELINE, second, PIPELINE, third, PIPELINE):
        made.cost(chosen)
    assert len(played) == 3
    made.cost(second)
    assert len(played) == 4


@pytest.mark.parametrize(
    ("operators", "parameters"),
    [
        ({"l1": OpConfig((1, 1, 1), (0,))}, {}),
        ({**PIPELINE.operators, "l2": OpConfig((1,), (0,))}, {}),
        ({**PIPELINE.operators, "loss": OpConfig((1,), (7,))}, {}),
        (PIPELINE.operators, {"l9.weight": SyncConfig()}),
    ],
)
def test_an_illegal_strategy_is_refused_even_beside_a_remembered_one(operators: Any, parameters: Any) -> None:
    made = simulator()
    made.cost(PIPELINE)
    for ask in (made.cost, made.run):
        with pytest.raises(StrategyError):
            ask(Strategy(operators, parameters))


@given(cases(max_moves=4))
@FEW
def test_cost_and_run_agree(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    made = Simulator(graph, with_memory(topology, 2**12), PointCosts())
    outcome = made.run(chosen)
    assert made.cost(chosen) == made.cost(chosen) == (outcome.makespan_ns, outcome.overflow_bytes)
    assert outcome.fits == all(peak <= 2**12 for peak in outcome.peak_bytes)


def test_hash_of_the_costs_follows_the_model_of_costs_and_the_links() -> None:
    base, other = simulator(), simulator()
    assert base.costs_hash == other.costs_hash
    other.costs.hash = "1" * 16  # type: ignore[misc]
    faster = replace(TWO, links=tuple(replace(link, bandwidth_bytes_per_second=1e9) for link in TWO.links))
    assert len({base.costs_hash, other.costs_hash, simulator(faster).costs_hash}) == 3


def test_a_search_imports_neither_torch_nor_pandas() -> None:
    code = "import sys, soap.simulator.simulate; print('torch' in sys.modules, 'pandas' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_a_strategy_that_differs_in_any_field_has_another_key() -> None:
    """Else it would be given another strategy's kept answer."""
    stale, workers = Strategy(PIPELINE.operators, consistency="async"), Workers(((0,), (1,)))
    others: dict[str, tuple[Strategy, Any]] = {
        "operators": (PIPELINE, {**PIPELINE.operators, "loss": on(0, degrees=(1,))}),
        "parameters": (PIPELINE, {"l1.weight": worded("parameter_server")}),
        "prefetch": (PIPELINE, 3),
        "microbatches": (PIPELINE, 2),
        "stages": (PIPELINE, {"loss": 1}),
        "schedule": (PIPELINE, "1f1b"),
        "consistency": (PIPELINE, "bounded:2"),
        "workers": (stale, workers),
    }
    assert others.keys() == {field.name for field in fields(Strategy)}, "say how strategies differ in the new field"
    for name, (before, value) in others.items():
        assert getattr(before, name) != value
        other, graph = replace(before, **{name: value}), simulator().graph
        assert simulator().key(other) != simulator().key(before), name
        assert strategy_hash(other, graph) != strategy_hash(before, graph), name
    turned = Strategy(dict(reversed(PIPELINE.operators.items())), stages={})
    assert simulator().key(turned) == simulator().key(PIPELINE)
