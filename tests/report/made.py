"""Contents of reports for tests: a search on a small graph, its plan simulated and "measured" as simulated."""

from __future__ import annotations

from functools import cache

from soap import api
from soap.cli import plan_summary
from soap.cli.timelines import predicted_text
from soap.model.graph import OperatorGraph
from soap.report import Alternative, Contents
from soap.search.chains import search
from soap.search.options import SearchOptions
from soap.simulator.analysis.comparison import compare
from soap.simulator.analysis.timeline_file import loads
from soap.simulator.incremental import IncrementalSimulator
from soap.strategy.classical import CLASSICAL
from tests.graph_builder import mlp
from tests.strategies import cluster


def contents(graph: OperatorGraph | None = None, title: str = "a plan") -> Contents:
    """All that a searched and measured plan has."""
    graph, topology = graph or mlp(), cluster([2, 2])
    simulator = api.simulator_for(graph, topology, costs="estimate")
    result = search(graph, topology, IncrementalSimulator(simulator), SearchOptions(budget=40))
    strategy = CLASSICAL["megatron"](graph, topology)
    simulation = simulator.run(strategy)
    text = predicted_text(graph, strategy, simulation, simulator.costs_hash)
    (predicted,) = loads(text)
    (measured,) = loads(text.replace('"origin": "predicted"', '"origin": "measured"'))
    return Contents(
        title=title,
        summary=plan_summary.document(simulator, strategy, simulation),
        graph=graph,
        strategy=strategy,
        simulation=simulation,
        result=result,
        alternatives=[Alternative("other", 1_500_000, 2**20, 1, 3)],
        elsewhere=api.elsewhere(simulator, strategy, ["h100-4"], costs="estimate"),
        measured=measured,
        comparison=compare(predicted, measured),
        tuning=TUNING,
        preprocessing=PREPROCESSING,
    )


@cache
def usual() -> Contents:
    """The same for all who do not change it."""
    return contents()


TUNING = {
    "before": {"table": 2},
    "iterations": 20,
    "partitions": 4,
    "fit": {"theta0_ns": 1e6, "theta1_ns": 4e6, "theta2_ns": 2e5, "deviation": 0.01},
    "samples": [
        {"partitions": 2, "measured_ns": 3_500_000, "fitted_ns": 3_400_000, "predicted_ns": 3_000_000},
        {"partitions": 4, "measured_ns": 2_900_000, "fitted_ns": 2_800_000, "predicted_ns": 2_500_000},
        {"partitions": 8, "measured_ns": None, "fitted_ns": 3_100_000, "predicted_ns": 2_600_000},
    ],
}
PREPROCESSING = {
    "output": "data",
    "rows": 1234,
    "skipped": 5,
    "kept": 0,
    "tasks": 2,
    "dictionaries": {"c1": 77, "c2": 5},
    "steps": [{"name": "index", "tasks": 2, "bytes": 2**20, "begin_s": 0.1, "ends_s": [0.6, 1.1], "seconds": 1.0}],
}
