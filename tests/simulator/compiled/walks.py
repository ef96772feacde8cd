"""Walks of proposals on the compiled simulator, and their check against simulations from the ground up."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from benchmarks.oracles.drawn_cost import cost_ns as draws_cost_ns
from soap.cluster.topology import Topology
from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.profiles.roofline import RooflineCosts
from soap.simulator.compiled.events import NO_BOUND
from soap.simulator.drawn_engine import DrawnEngine, make_engine
from soap.simulator.drawn_times import reference_times_ns
from soap.simulator.draws import Draws
from soap.simulator.engine import Engine
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.stages import chunks_of, devices_of_stages, stages_of_chunks
from tests.graph_builder import counting, overlapping
from tests.simulator.compiled.agreement import Played, compiled_tasks, reference_tasks
from tests.simulator.examples import LaunchedCosts
from tests.strategies import cases, configs, syncs


class Edit(NamedTuple):
    """A proposal for some operators and parameters' synchronization at once, and whether it is accepted. ``prefetch``: None: as it is."""

    operators: dict[str, OpConfig]
    parameters: dict[str, SyncConfig]
    accepted: bool
    prefetch: int | None = None

    def of(self, strategy: Strategy) -> Strategy:
        for name, config in self.operators.items():
            strategy = strategy.with_operator(name, config)
        for name, sync in self.parameters.items():
            strategy = strategy.with_parameter(name, sync)
        return strategy if self.prefetch is None else replace(strategy, prefetch=self.prefetch)

    def propose(self, engine: Engine, at_most_ns: int = NO_BOUND) -> int | None:
        return engine.propose_changes(self.operators, self.parameters, prefetch=self.prefetch, at_most_ns=at_most_ns)


Walk = tuple[OperatorGraph, Topology, Strategy, list[Edit]]


@st.composite
def walks(draw: st.DrawFn, *, max_moves: int = 6, max_tiles: int = 8, max_edits: int = 6) -> Walk:
    """A strategy and a sequence of edits of it."""
    graph, topology, strategy = draw(cases(max_moves=max_moves, max_tiles=max_tiles, servers=True, ports=True))
    graph = counting(graph) if draw(st.booleans()) else graph
    graph = overlapping(graph) if draw(st.booleans()) else graph
    edits, cut = [], MicroBatches(graph, strategy.microbatches)
    chunks, devices = chunks_of(graph, strategy.stages), devices_of_stages(graph, strategy)
    stage_of = stages_of_chunks(max(chunks) + 1, strategy.schedule)
    for _ in range(draw(st.integers(1, max_edits))):
        operators, parameters = {}, {}
        for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3, 5)))):
            if graph.parameters and draw(st.integers(0, 4)) == 0:
                name = draw(st.sampled_from([*[tensor.name for tensor in graph.parameters], *graph.sparse]))
                parameters[name] = draw(syncs(graph, name))
            else:
                op = draw(st.sampled_from(graph.operators))
                own = sorted(devices[stage_of[chunks[graph.index[op.name]]]]) if strategy.stages else ()
                operators[op.name] = draw(configs(op, topology.device_count, max_tiles=max_tiles, graph=graph, cut=cut, among=own))
        prefetch = draw(st.sampled_from((None, None, None, 0, 1, 2)))
        edits.append(Edit(operators, parameters, draw(st.booleans()), prefetch))
    return graph, topology, strategy, edits


def makespan_of(tasks: dict[tuple[int, int], Played]) -> int:
    return max(end for _, _, _, end, _ in tasks.values())


def check(walk: Walk, *, afresh: bool, launched: bool = False, draws: Draws | None = None, training: PlannedTraining = PLAIN) -> None:
    """``afresh``: simulate every proposal with another engine as well, from the ground up; both share what engines share. ``launched``:
    devices' work is. ``draws``: of the costs; then costs are what all of them come to, and each draw is that of the reference.
    ``training``: of compressed parameters."""
    graph, topology, strategy, edits = walk
    states = 2 * (len(edits) % 2)  # of an optimizer that updates rows alone, or whole tables
    costs = (LaunchedCosts if launched else RooflineCosts)(topology, states)
    shared = Shared(graph, topology, costs, training)
    engine = make_engine(shared, draws)
    full = make_engine(shared, draws) if afresh else engine
    engine.load(strategy)
    held_ns = engine.simulate()
    current = reference_tasks(graph, topology, costs, strategy, training)
    for edit in edits:
        edited = edit.of(strategy)
        expected = reference_tasks(graph, topology, costs, edited, training)
        drawn = None if draws is None else reference_times_ns(Simulator(graph, topology, costs, 2, training).run(edited), draws)
        cost_ns = makespan_of(expected) if draws is None or drawn is None else draws_cost_ns(drawn, draws.risk)
        for at_most_ns in (cost_ns, cost_ns - 1, cost_ns // 2):  # the bounded decision is the exact one
            assert edit.propose(engine, at_most_ns) == (cost_ns if at_most_ns == cost_ns else None)
            engine.reject()
        assert edit.propose(engine) == cost_ns
        if isinstance(engine, DrawnEngine):
            assert tuple(engine.times_ns().tolist()) == drawn
        if edit.accepted:
            engine.accept()
            strategy, current, held_ns = edited, expected, cost_ns
        else:
            engine.reject()
        assert engine.usual_ns == makespan_of(current)
        assert engine.makespan_ns == held_ns
        assert engine.strategy == strategy
        assert compiled_tasks(engine) == current
        if afresh:
            full.load(edited)
            assert full.simulate() == cost_ns and full.usual_ns == makespan_of(expected)
            assert compiled_tasks(full) == expected
    engine.simulate()  # what the edits have left behind is a whole task graph
    assert compiled_tasks(engine) == current
