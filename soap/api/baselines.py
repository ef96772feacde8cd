"""How long the strategies take that people would use, next to which every plan is shown."""

from __future__ import annotations

from typing import Any

from soap.api.fitting import fastest_that_fits
from soap.api.predictions import quick_evaluator
from soap.search.pipelining import best_pipeline
from soap.search.space import build_space
from soap.search.starts import BASELINE
from soap.simulator.simulate import Simulator, is_large
from soap.strategy.config import Strategy
from soap.strategy.named import PIPELINE, named, usual_names


def usual_strategies(simulator: Simulator) -> dict[str, Strategy]:
    """By name, those of ``usual_names`` that need no simulation."""
    graph, topology = simulator.graph, simulator.topology
    return {name: named(name, graph, topology) for name in usual_names(graph, topology) if name != PIPELINE}


def baselines(simulator: Simulator) -> dict[str, dict[str, Any]]:
    """Predictions by name, as plain values: of ``usual_names``, and where data parallelism does not fit, of the fastest way of ``fits``
    that does. All are priced by this simulator. What would take many seconds has none: large strategies that are not made of equal copies
    (servers never are), and where data parallelism is large, pipelines and ways that fit."""
    found: dict[str, dict[str, Any]] = {}
    quick, usual = quick_evaluator(simulator), usual_strategies(simulator)
    brief = is_large(usual[BASELINE])
    for name, strategy in usual.items():
        left_out = name != BASELINE and takes_long(simulator, strategy)
        found[name] = _record(None, None) if left_out else _record(quick.makespan_ns(strategy), quick.overflow_bytes(strategy))
    if PIPELINE in usual_names(simulator.graph, simulator.topology):
        found |= {PIPELINE: _record(None, None)} if brief else _pipeline(simulator)
    if not brief and found[BASELINE]["overflow_bytes"] and (way := fastest_that_fits(simulator)) is not None:
        found.setdefault(way.name, _record(way.time_ns, 0))
    return found


def takes_long(simulator: Simulator, strategy: Strategy) -> bool:
    """Whether to price a strategy takes many seconds: it is large, and not made of equal copies."""
    return is_large(strategy) and isinstance(simulator.folding(strategy, nearly=True), str)


def _record(predicted_ns: int | None, overflow_bytes: int | None) -> dict[str, Any]:
    return {"predicted_ns": predicted_ns, "overflow_bytes": overflow_bytes}


def _pipeline(simulator: Simulator) -> dict[str, dict[str, Any]]:
    """The best pipeline by name; nothing if the model has none here."""
    space = build_space(simulator.graph, simulator.topology.device_count)
    best = best_pipeline(space, simulator.topology, quick_evaluator(simulator))
    return {} if best is None else {PIPELINE: _record(best.cost_ns, best.overflow_bytes)}
