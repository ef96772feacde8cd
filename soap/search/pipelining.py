"""Pipelines as a choice of the search: the start ``pipeline``, and the space around a strategy with micro-batches.

Rough costs put all pipelines of a cluster into an order (``soap.search.pipelines``); the first few are simulated, and the best is a start.
Which passes follow each other, and which devices a stage has, only the moves of ``soap.search.pipeline_moves`` change; chains move
operators inside the devices of their stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.model.micro_batches import MicroBatches
from soap.plan.scheduling import Orders
from soap.search.able import Able
from soap.search.constraints import Allowed, brought_inside
from soap.search.metropolis import Evaluator
from soap.search.pipelines import Pipeline, pipelines
from soap.search.space import Space, build_space
from soap.search.starts import PIPELINE, Start, evaluated
from soap.simulator.costs import CostModel
from soap.strategy.config import NOTHING, Strategy, settled_config
from soap.strategy.megatron import staged
from soap.strategy.stages import chunks_of, stages_of

MOST_SIMULATED = 12
MOST_TILES = 4_000_000
"""All pipelines together that are simulated to find the best one: at least two, and tiles of all micro-batches."""
PROMISING = 0.95
"""Where nobody asks for pipelines, one is simulated if rough costs expect it to take less than this share of the best start."""


def pipelined(graph: OperatorGraph, topology: Topology, pipeline: Pipeline) -> Strategy:
    """The strategy of a pipeline."""
    strategy = staged(graph, topology, pipeline.blocks, pipeline.stages, tensor=pipeline.tensor)
    stages = stages_of(graph, pipeline.chunks)
    return replace(strategy, microbatches=pipeline.microbatches, stages=stages, schedule=str(pipeline.schedule))


def legal(graph: OperatorGraph, topology: Topology, strategy: Strategy) -> bool:
    """Whether its stages, micro-batches and schedule suit the graph."""
    try:
        strategy.validate(graph, topology.device_count)
        Orders(graph).order(strategy)
    except StrategyError:
        return False
    return True


def best_pipeline(
    graph: OperatorGraph,
    topology: Topology,
    evaluator: Evaluator,
    costs: CostModel,
    optimizer_states: int,
    *,
    space: Space | None = None,
    at_most_ns: float | None = None,
) -> Start | None:
    """The best of the pipelines that are simulated; None if there is none. ``space``: leaves those out that it does not allow.
    ``at_most_ns``: None if rough costs expect the best one that fits to take longer."""
    found = pipelines(graph, topology, costs, optimizer_states)
    if at_most_ns is not None and (not found or found[0].lacking_bytes or found[0].expected_ns > at_most_ns):
        return None
    legals = (own for own in (pipelined(graph, topology, one) for one in found) if legal(graph, topology, own))
    chosen = (own for own in legals if space is None or brought_inside(space, own) is own)
    starts = [evaluated(evaluator, PIPELINE, own) for own in _first(chosen)]
    return min(starts, key=lambda start: start.score, default=None)


def _first(strategies: Iterator[Strategy]) -> Iterator[Strategy]:
    """The first few, fewer of them if they are large."""
    tiles = 0
    for number, strategy in enumerate(islice(strategies, MOST_SIMULATED)):
        tiles += strategy.microbatches * sum(len(config.devices) for config in strategy.operators.values())
        if number > 1 and tiles > MOST_TILES:
            return
        yield strategy


def pipeline_start(
    space: Space, topology: Topology, evaluator: Evaluator, starts: Sequence[Start], *, wanted: bool | None
) -> Strategy | None:
    """The start ``pipeline``; None if there is none. ``wanted``: True: in any case; None: if rough costs say that it is faster than all of
    ``starts`` that fit; False: never."""
    if wanted is False or not hasattr(evaluator, "engine_costs") or any(start.strategy.microbatches > 1 for start in starts):
        return None
    able: Able = evaluator
    fitting = [start.cost_ns for start in starts if start.fits]
    at_most_ns = None if wanted or not fitting else PROMISING * min(fitting)
    found = best_pipeline(
        space.graph, topology, evaluator, able.engine_costs, able.optimizer_states, space=space, at_most_ns=at_most_ns
    )
    return None if found is None else found.strategy


def is_cut(strategy: Strategy) -> bool:
    """Whether a strategy has micro-batches."""
    return strategy.microbatches > 1


def stage_devices(graph: OperatorGraph, strategy: Strategy) -> Mapping[int, tuple[int, ...]]:
    """By chunk: the devices of its stage, ascending. Without stages: all that it uses."""
    chunks = chunks_of(graph, strategy.stages)
    found: dict[int, set[int]] = {}
    for chunk, op in zip(chunks, graph.operators, strict=True):
        if settled_config(op, 1) is None:
            found.setdefault(chunk, set()).update(strategy.operators[op.name].devices)
    groups = {chunk: {device for own in found.values() if own & devices for device in own} for chunk, devices in found.items()}
    return {chunk: tuple(sorted(devices)) for chunk, devices in groups.items()}


def space_of(space: Space, strategy: Strategy) -> Space | None:
    """The part of a space in which a strategy with micro-batches may move: every operator on its stage's devices, split no further than the
    smallest micro-batch, and only what micro-batches allow. None if nothing is left to an operator."""
    graph, cut = space.graph, MicroBatches(space.graph, strategy.microbatches)
    devices = stage_devices(graph, strategy)
    chunks = chunks_of(graph, strategy.stages)
    allowed: dict[str, Allowed] = {}
    for position, op in enumerate(graph.operators):
        if settled_config(op, 1) is not None:
            continue
        own = space.allowed[position] if space.allowed else None
        own = own or Allowed(None, frozenset(), tuple(range(space.device_count)))
        left = tuple(device for device in own.devices if device in devices[chunks[position]])
        sizes = [cut.least_size(position, i) for i in range(len(op.factors))]
        if not left or (own.grid is not None and any(a > b for a, b in zip(own.grid[1:], sizes, strict=True))):
            return None
        allowed[op.name] = replace(own, devices=left)
    syncs = {name: tuple(own for own in choices if not own.contract.gathers_values) for name, choices in space.syncs.items()}
    found = build_space(
        graph, space.device_count, allowed=allowed, syncs={name: own for name, own in syncs.items() if len(own) > 1}, cut=cut,
        references=(strategy,),
    )  # fmt: skip
    repeated = tuple(own for own in space.recompute if all(cut.may_repeat(position) for position in own))
    return replace(found, recompute=repeated)
