"""Pipelines as a choice of the search: the start ``pipeline``, and the space around a strategy with micro-batches.

Rough costs put all pipelines of a cluster into an order (``soap.search.pipelines``); the first few are simulated, and the best is a start.
Which passes follow each other, and which devices a stage has, only the moves of ``soap.search.pipeline_moves`` change; chains move
operators inside the devices of their stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from soap.cluster.topology import Topology
from soap.errors import SoapError, StrategyError, asked
from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph
from soap.search.constraints import Allowed, brought_inside, out_of_stage
from soap.search.pipelines import Pipeline, pipelines
from soap.search.space import Space, build_space
from soap.search.starts import Start
from soap.simulator.simulate import Simulator, tile_count
from soap.strategy.config import Strategy, settled_config
from soap.strategy.marks import FEATURES
from soap.strategy.megatron import staged
from soap.strategy.named import PIPELINE
from soap.strategy.stages import chunks_of, devices_of_stages, stages_of, stages_of_chunks

if TYPE_CHECKING:
    from soap.simulator.incremental import IncrementalSimulator

MOST_SIMULATED = 12
MOST_TILES = 4_000_000
"""All pipelines together that are simulated to find the best one: at least two, and tiles of all micro-batches."""
PROMISING = 0.95
"""Where nobody asks for pipelines, one is simulated if rough costs expect it to take less than this share of the best start."""


def pipelined(graph: OperatorGraph, topology: Topology, pipeline: Pipeline) -> Strategy:
    """The strategy of a pipeline."""
    count = pipeline.microbatches
    strategy = staged(graph, topology, pipeline.blocks, pipeline.stages, tensor=pipeline.tensor, microbatches=count)
    stages = stages_of(graph, pipeline.chunks)
    return replace(strategy, microbatches=count, stages=stages, schedule=str(pipeline.schedule))


def is_legal(space: Space, topology: Topology, strategy: Strategy) -> bool:
    """Whether a strategy's stages, micro-batches and schedule suit the graph, and the space allows it."""
    try:
        strategy.validate(space.graph, topology.device_count)
        space.orders.order(strategy)
        return brought_inside(space, strategy) is strategy
    except SoapError:
        return False


def best_pipeline(
    space: Space,
    topology: Topology,
    evaluator: Simulator | IncrementalSimulator,
    *,
    at_most_ns: float | None = None,
) -> Start | None:
    """The best of the pipelines that are simulated and that the space allows; None if there is none, or if rough costs expect the best one
    that fits to take longer than ``at_most_ns``."""
    graph, limit_ns = space.graph, inf if at_most_ns is None else at_most_ns
    found = pipelines(evaluator.shared, evaluator.optimizer_states, allowed=space.allowed, at_most_ns=limit_ns)
    if at_most_ns is not None and (not found or found[0].lacking_bytes or found[0].expected_ns > at_most_ns):
        return None
    legal = (own for own in (pipelined(graph, topology, one) for one in found) if is_legal(space, topology, own))
    starts: list[Start] = []
    for cost_ns, _, own in sorted((evaluator.makespan_ns(own), number, own) for number, own in enumerate(_first(legal))):
        starts.append(Start(PIPELINE, own, cost_ns, evaluator.overflow_bytes(own)))
        if starts[-1].fits:  # the fastest one; to ask about memory takes longer than to simulate
            break
    return min(starts, key=lambda start: start.score, default=None)


def _first(strategies: Iterator[Strategy]) -> Iterator[Strategy]:
    """The first few, fewer of them if they are large."""
    tiles = 0
    for number, strategy in enumerate(islice(strategies, MOST_SIMULATED)):
        tiles += tile_count(strategy)
        if number > 1 and tiles > MOST_TILES:
            return
        yield strategy


def pipeline_start(
    space: Space, topology: Topology, evaluator: IncrementalSimulator, starts: Sequence[Start], *, wanted: bool | None, named: bool
) -> Strategy | None:
    """The start ``pipeline``; None if there is none. ``wanted``: True: in any case; None: if the starts are not ``named`` by the user and
    rough costs expect it to be faster than all of ``starts`` that fit; False: never."""
    if wanted is False or (wanted is None and named):
        return None
    fitting = [start.cost_ns for start in starts if start.fits]
    at_most_ns = None if wanted or not fitting else PROMISING * min(fitting)
    found = best_pipeline(space, topology, evaluator, at_most_ns=at_most_ns)
    return None if found is None else found.strategy


def keeps_stages(space: Space, strategy: Strategy) -> bool:
    """Whether no operator is in a stage that the user's constraints rule out."""
    return out_of_stage(space, strategy) is None


def is_cut(strategy: Strategy) -> bool:
    """Whether a strategy has micro-batches or stages."""
    return strategy.microbatches > 1 or bool(strategy.stages)


def require_inside(strategy: Strategy, inside: Strategy) -> Strategy:
    """``inside``: the strategy as the user's constraints have it. StrategyError if that changes one with micro-batches."""
    if is_cut(strategy) and inside is not strategy:
        name = next((name for name, own in inside.operators.items() if own is not strategy.operators[name]), None)
        what = "a parameter" if name is None else f"operator {name!r}"
        asked_for = f"{asked('pins')}, {asked('forbidden')}"
        raise StrategyError(f"strategy in micro-batches: {what} breaks {asked_for} or what the optimizer needs; drop one of them")
    return inside


def space_of(space: Space, start: Start | None) -> Space | None:
    """The part of a space in which a start may move; all of it without micro-batches. With them: every operator on its stage's devices,
    split no further than the smallest micro-batch, and only what micro-batches allow. None if nothing is left to an operator."""
    if start is None or not is_cut(start.strategy):
        return space
    strategy = start.strategy
    graph, cut = space.graph, MicroBatches(space.graph, strategy.microbatches)
    chunks = chunks_of(graph, strategy.stages)
    stage_of, devices = stages_of_chunks(max(chunks) + 1, strategy.schedule), devices_of_stages(graph, strategy)
    allowed: dict[str, Allowed] = {}
    for position, op in enumerate(graph.operators):
        if settled_config(op, 1) is not None:
            continue
        own = space.allowed[position] if space.allowed else None
        own = own or Allowed(None, frozenset(), tuple(range(space.device_count)))
        left = tuple(device for device in own.devices if device in devices[stage_of[chunks[position]]])
        sizes = [cut.least_size(position, i) for i in range(len(op.factors))]
        if not left or (own.grid is not None and any(a > b for a, b in zip(own.grid[1:], sizes, strict=True))):
            return None
        allowed[op.name] = replace(own, devices=left)
    syncs = {name: tuple(own for own in choices if not own.contract.gathers_values) for name, choices in space.syncs.items()}
    found = build_space(
        graph, space.device_count, allowed=allowed, syncs={name: own for name, own in syncs.items() if len(own) > 1}, cut=cut,
        references=(strategy,),
    )  # fmt: skip
    for feature in FEATURES:
        sets = space.by_field.get(feature.field, ())
        some = (each for each in sets if not feature.repeats or all(cut.may_repeat(one.position) for one in each))
        found = found.with_sets(feature.field, some)
    return found
