"""How long the strategies take that people would use, next to which every plan is shown."""

from __future__ import annotations

from typing import Any

from soap.api.fitting import fastest_that_fits
from soap.api.predictions import quick_evaluator
from soap.search.pipelining import best_pipeline
from soap.search.space import build_space
from soap.search.starts import BASELINE
from soap.simulator.simulate import Simulator, is_large, tile_count
from soap.strategy.classical import SYNCHRONIZED
from soap.strategy.config import Strategy
from soap.strategy.named import PIPELINE, named, usual_names

MOST_TILES = 2**14
"""A strategy with more tiles is compared only if it can be folded: one_weird_trick of a model with 8 billion parameters on 64 devices
(2^15.3 tiles) took 90 s of a core, more than all else of a report together."""
MOST_FOLDED_TILES = 2**11
"""Of two copies: by ``fsdp`` a model with 70 billion parameters has 2^11.6, which take 3 s of a core with their memory."""


def usual_strategies(simulator: Simulator) -> dict[str, Strategy]:
    """By name, those of ``usual_names`` that need no simulation."""
    graph, topology = simulator.graph, simulator.topology
    return {name: named(name, graph, topology) for name in usual_names(graph, topology) if name != PIPELINE}


def baselines(simulator: Simulator) -> dict[str, dict[str, Any]]:
    """Predictions by name, as plain values: of ``usual_names``, and where data parallelism does not fit, of the fastest way of ``fits``
    that does. All are priced by this simulator. What would take many seconds has none: strategies of too many tiles, or too many in two of
    their equal copies (servers never have equal copies); and where data parallelism is such a one, pipelines and ways that fit."""
    found: dict[str, dict[str, Any]] = {}
    quick, usual = quick_evaluator(simulator), usual_strategies(simulator)
    brief = _takes_long(simulator, BASELINE, usual[BASELINE])
    for name, strategy in usual.items():
        if name != BASELINE and _takes_long(simulator, name, strategy):
            found[name] = _record(None, None)
            continue
        asked = simulator if is_large(strategy) else quick
        found[name] = _record(asked.makespan_ns(strategy), asked.overflow_bytes(strategy))
    if PIPELINE in usual_names(simulator.graph, simulator.topology):
        found |= {PIPELINE: _record(None, None)} if brief else _pipeline(simulator)
    if not brief and found[BASELINE]["overflow_bytes"] and (way := fastest_that_fits(simulator)) is not None:
        found.setdefault(way.name, _record(way.time_ns, 0))
    return found


def _takes_long(simulator: Simulator, name: str, strategy: Strategy) -> bool:
    """Whether to price a strategy, with its memory, takes many seconds."""
    if not (is_large(strategy) if name in SYNCHRONIZED else tile_count(strategy) > MOST_TILES):
        return False
    folding = simulator.folding(strategy)
    return isinstance(folding, str) or tile_count(folding.copies.strategy) > MOST_FOLDED_TILES


def _record(predicted_ns: int | None, overflow_bytes: int | None) -> dict[str, Any]:
    return {"predicted_ns": predicted_ns, "overflow_bytes": overflow_bytes}


def _pipeline(simulator: Simulator) -> dict[str, dict[str, Any]]:
    """The best pipeline by name; nothing if the model has none here."""
    space, evaluator = build_space(simulator.graph, simulator.topology.device_count), quick_evaluator(simulator)
    best = best_pipeline(space, simulator.topology, evaluator, simulator.costs, simulator.optimizer_states)
    return {} if best is None else {PIPELINE: _record(best.cost_ns, best.overflow_bytes)}
