"""What of SOAP's classes the golden figures need, as text. The one place to adapt when classes are renamed, moved or laid out otherwise.

The texts say what a plan does, in words that outlive its classes: tiles with their regions, what moves with its bytes, who keeps a
parameter and what travels for it (owner, payload, residence: whatever the methods of synchronization are called), and when each task
begins and ends. They hold no representation of an object, no name of a class and no name of a task. So a change of
the code that keeps plans and predictions keeps the texts, to the letter; adapt the functions here to the new classes and leave
``predictions/*.json`` as they are.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import soap
from soap.cluster.topology import Topology
from soap.model.graph import RECURRENT_KINDS, OperatorGraph
from soap.plan.plan import Plan, remote_parts
from soap.profiles.roofline import RooflineCosts
from soap.search.options import SearchOptions
from soap.simulator.communication.prices import Communication
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import execution_order, simulate
from soap.simulator.simulate import Simulation, Simulator, costs_hash
from soap.simulator.tasks import Task, TaskGraph
from soap.strategy.classical import CLASSICAL, SYNCHRONIZED
from soap.strategy.config import OpConfig, Strategy, SyncConfig, settled
from soap.strategy.json_file import strategy_hash
from soap.strategy.megatron import hybrid
from soap.strategy.sync import SPARSE_ALL_GATHER, parameter_server
from soap.strategy.sync_contracts import Within

Box = Sequence[tuple[int, int]]
DIGITS = 6
"""Hexadecimal digits of a digest in a fixture."""


def digest(lines: Iterable[str]) -> str:
    """Of the text of these lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]


# What is simulated


@cache
def graph_of(model: str) -> OperatorGraph:
    """The graph of ``NAME:SIZE@BATCH`` of the zoo, or ``NAME:SIZE@BATCH/DTYPE``.

    Without the footprints of recurrent layers: these are found by running them, and another machine's library may take another workspace.
    """
    spec, _, dtype = model.partition("/")
    graph = soap.load(f"zoo:{spec}", plan_only=True, dtype=dtype or None).graph
    recurrent = {op.name for op in graph.operators if op.kind in RECURRENT_KINDS}
    return replace(graph, footprints={name: own for name, own in graph.footprints.items() if name not in recurrent})


def simulator_of(graph: OperatorGraph, topology: Topology, optimizer_states: int) -> Simulator:
    """With estimated costs: nothing is measured."""
    return Simulator(graph, topology, RooflineCosts(topology, optimizer_states), optimizer_states)


def costs_hash_of(topology: Topology, optimizer_states: int) -> str:
    """What names the durations of tasks and transfers in files and stores."""
    return costs_hash(RooflineCosts(topology, optimizer_states), Communication(topology))


@dataclass(frozen=True)
class Wanted:
    """A strategy to simulate. ``pull_together``: as the runtime pulls; without it as systems do that aggregate gradients alone."""

    strategy: Strategy
    pull_together: bool = True


ALWAYS = ("parameter_server",)
"""Strategies of which there are figures whatever the graph, of those with other synchronizations."""


def strategies_of(graph: OperatorGraph, topology: Topology, seed: str) -> dict[str, Wanted]:
    """By name: classical ones, a pipeline, other synchronizations (of tables only where there are some), and three drawn at random."""
    count = topology.device_count
    found = {name: make(graph, topology) for name, make in CLASSICAL.items()}
    found["pipeline"] = hybrid(graph, topology, tensor=2, pipeline=2)
    chosen = {name: make for name, make in SYNCHRONIZED.items() if name in ALWAYS or graph.sparse}
    found |= {name: make(graph, topology) for name, make in chosen.items()}
    found |= {f"drawn-{k}": drawn(graph, count, f"{seed} {k}", synchronized=k > 0) for k in range(3)}
    wanted = {name: Wanted(strategy) for name, strategy in found.items()}
    if graph.sparse:
        wanted["hybrid, pulled apart"] = Wanted(found["hybrid"], pull_together=False)
    return wanted


MOST_DRAWN_TILES = 16


def drawn(graph: OperatorGraph, device_count: int, seed: str, *, synchronized: bool) -> Strategy:
    """A legal strategy drawn at random; with ``synchronized`` also how each parameter is kept in step.

    It is drawn here, not by ``soap.strategy.classical``, so that it stays the same when that draws otherwise.
    """
    rng = random.Random(seed)  # of its numbers only random()'s are the same with every version of Python

    def below(limit: int) -> int:
        return int(rng.random() * limit)

    operators = {}
    for op in graph.operators:
        degrees, room = [1] * len(op.factors), min(2 * device_count, MOST_DRAWN_TILES)
        for i in sorted(range(len(degrees)), key=lambda _: rng.random()) if op.partitionable else ():
            if rng.random() < 0.6:
                degrees[i] = 1 + below(min(op.factors[i].size, room))
                room //= degrees[i]
        replicas = 1 + below(room) if rng.random() < 0.25 else 1
        tiles = prod(degrees) * replicas
        first, scattered = below(device_count), rng.random() < 0.5
        devices = [below(device_count) if scattered else (first + i) % device_count for i in range(tiles)]
        operators[op.name] = OpConfig(tuple(degrees), tuple(devices), replicas)
    parameters = {}
    for parameter in graph.parameters if synchronized else ():
        rows = parameter.name in graph.sparse
        ways: tuple[Within, ...] = ("none", "host")
        choices = [SyncConfig(), *(parameter_server(parts, within, rows=rows) for parts in (1, 3) for within in ways)]
        choices += [SPARSE_ALL_GATHER] if rows else []
        parameters[parameter.name] = choices[below(len(choices))]
    strategy = settled(graph, Strategy(operators, {n: sync for n, sync in parameters.items() if sync != SyncConfig()}), device_count)
    strategy.validate(graph, device_count)
    return strategy


# What comes of it

COLUMNS = ("makespan_ns", "peak_bytes", "strategy", "plan", "times", "order", "held")
"""Of an entry. ``peak_bytes``: the most to expect on any device. ``strategy``: its hash, shortened. Digests: ``plan``, what the plan does;
``times``, every task with its start and end; ``order``, tasks as their ids order them, and tiles as the runtime runs them; ``held``, the
most to expect on each device."""

Entry = list[int | str]
"""One value a column."""


def entry(simulator: Simulator, wanted: Wanted) -> Entry:
    """What the reference simulation says of a strategy."""
    simulation = simulator.run(wanted.strategy)
    if not wanted.pull_together:
        tasks = lower(simulation.plan, simulator.topology, simulator.costs, simulator.communication, pull_together=False)
        simulation = Simulation(simulation.plan, tasks, simulate(tasks), simulator.optimizer_states)
    tasks, schedule = simulation.tasks, simulation.schedule
    whats = [_what(tasks, task) for task in tasks.tasks]
    spans = [(int(start), int(end)) for start, end in zip(schedule.start_ns, schedule.end_ns, strict=True)]
    order = [what for _, what in sorted(zip([task.id for task in tasks.tasks], whats, strict=True), key=lambda pair: pair[0])]
    return [
        simulation.makespan_ns,
        max(simulation.peak_bytes),
        hash_of(wanted.strategy, simulator.graph)[:DIGITS],
        digest(sorted(plan_lines(simulation.plan))),
        digest(f"{start} {end} {what}" for (start, end), what in sorted(zip(spans, whats, strict=True))),
        digest([*order, *_runtime_order(simulation)]),
        digest(f"{device} {own}" for device, own in enumerate(simulation.peak_bytes)),
    ]


def _what(tasks: TaskGraph, task: Task) -> str:
    """A task without its times: kind, what it holds (devices, links, cores of hosts), bytes that move, who sends them, and its tile."""
    devices, links = tasks.topology.device_count, len(tasks.topology.links)

    def resource(number: int) -> str:
        if number < devices:
            return f"device{number}"
        return f"link{number - devices}" if number < devices + links else f"core{number - devices - links}"

    tile = "" if task.tile is None else _tile_name(tasks.plan, task.tile)
    flows = ",".join(f"{a}>{b}:{size}" for a, b, size in task.flows)
    return f"{task.kind.value} {tile} on {','.join(map(resource, task.resources))} moves {task.bytes} {flows}"


def _runtime_order(simulation: Simulation) -> Iterator[str]:
    order = execution_order(simulation.tasks, simulation.schedule)
    for name, tiles in (("forward", order.forward), ("backward", order.backward)):
        for tile in tiles:
            yield f"{name} {_tile_name(simulation.plan, tile)}"


def _tile_name(plan: Plan, position: int) -> str:
    tile = plan.tiles[position]
    return f"{plan.operator(tile).name}/{tile.index}"


def plan_lines(plan: Plan) -> Iterator[str]:
    """What the plan does, one line a thing; to be sorted, since positions in the plan's lists are nobody's business."""
    for position, tile in enumerate(plan.tiles):
        operands = (("reads", tile.inputs), ("uses", tile.parameters), ("makes", tile.outputs))
        regions = " ".join(f"{verb} {' '.join(map(_boxes, own))}" for verb, own in operands)
        rows = " on rows" if plan.as_run(tile).sparse_lookup else ""
        yield f"tile {_tile_name(plan, position)} replica {tile.replica} @{tile.device} {_boxes(tile.intervals)} {regions}{rows}"
    yield from _moving_lines(plan)
    yield from _summing_lines(plan)
    yield from _parameter_lines(plan)


def _moving_lines(plan: Plan) -> Iterator[str]:
    """Regions brought together for their readers, and in which messages and collectives they travel."""

    def holder(number: int) -> str:
        held = plan.holdings[number]
        return f"{_tile_name(plan, held.tile)}{'' if held.reduction is None else ' summed'}@{held.device}"

    def moved(tensor_of: Callable[[int], str], parts: Sequence[tuple[int, int]]) -> str:
        regions = [
            f"{tensor_of(fetch)}{_boxes(box)} {source}>{target} {_bytes(plan, tensor_of(fetch), box)}"
            for (fetch, _), (source, target, box, _) in zip(parts, remote_parts(plan, parts), strict=True)
        ]
        return "; ".join(regions)

    def tensor(fetch: int) -> str:
        return plan.fetches[fetch].tensor

    for held in plan.holdings:
        yield f"hold {held.tensor}{_boxes(held.box)} @{held.device} by {_tile_name(plan, held.tile)} {held.reduction is not None}"
    for fetch in plan.fetches:
        pieces = "; ".join(f"{_boxes(piece.box)} of {holder(piece.holding)}" for piece in fetch.pieces)
        readers = ", ".join(f"{_tile_name(plan, tile)}.{operand}" for tile, operand in fetch.consumers)
        yield f"fetch {fetch.tensor}{_boxes(fetch.box)} @{fetch.device} from {pieces} for {readers}"
    for message in plan.messages:
        yield f"message {message.source}>{message.target}: {moved(tensor, message.parts)}"
    for exchange in plan.exchanges:
        yield f"{exchange.pattern.value} of {exchange.tensor} among {exchange.devices}: {moved(tensor, exchange.parts)}"


def _summing_lines(plan: Plan) -> Iterator[str]:
    """Partial results that are added up; in which order, where, and what is left to whom."""
    for reduction in plan.reductions:
        op = plan.graph.operators[reduction.operator]
        made = plan.graph.tensors[op.outputs[reduction.output].tensor]
        size = _volume(reduction.box) * made.partial_itemsize
        tiles = ", ".join(_tile_name(plan, tile) for tile in reduction.tiles)
        cells = " ".join(map(_boxes, reduction.cells))
        yield (
            f"sum {made.name}{_boxes(reduction.box)} replica {reduction.replica} of {tiles} on {reduction.devices} {size} bytes "
            f"{'cells ' + cells if cells else 'whole'}"
        )


def _parameter_lines(plan: Plan) -> Iterator[str]:
    """Who keeps which region of a parameter, and how it is kept in step."""

    def uses(own: Sequence[tuple[int, int]]) -> str:
        return ", ".join(f"{_tile_name(plan, tile)}.{operand}" for tile, operand in own)

    def region(number: int) -> str:
        shard = plan.shards[number]
        return f"{shard.parameter}{_boxes(shard.box)} {_bytes(plan, shard.parameter, shard.box)} bytes"

    for number, shard in enumerate(plan.shards):
        yield f"keep {region(number)} on {shard.devices} trained {shard.trainable} for {uses(shard.uses)}"
    for sync in plan.syncs:
        words = f"payload {sync.contract.payload}, residence {sync.contract.residence}"
        if not sync.contract.has_servers:
            copies = f" in copies led by {sync.leaders}" * (sync.contract.owned_in_parts and sync.aggregated)
            yield f"sync owner {sync.contract.owner}, {words}: on {sync.readers}{copies} {'; '.join(map(region, sync.shards))}"
            continue
        servers = "; ".join(f"{region(number)} on {plan.shards[number].devices}" for number in sync.shards)
        yield (
            f"sync owner servers({len(sync.shards)}), {words}: {sync.parameter}{_boxes(sync.box)} readers {sync.readers} "
            f"through {sync.leaders} for {uses(sync.uses)}: {servers}"
        )


def _boxes(box: Box) -> str:
    return f"[{','.join(f'{a}:{b}' for a, b in box)}]"


def _volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def _bytes(plan: Plan, tensor: str, box: Box) -> int:
    return _volume(box) * plan.graph.tensors[tensor].itemsize


# Strategies and searches


def hash_of(strategy: Strategy, graph: OperatorGraph) -> str:
    """What names a strategy in files and stores."""
    return strategy_hash(strategy, graph)


def plan_digest(strategy: Strategy, graph: OperatorGraph, topology: Topology) -> str:
    """Of what its plan does."""
    return digest(sorted(plan_lines(build_plan(graph, strategy, topology))))


SEARCH_COLUMNS = ("cost_ns", "strategy", "evaluations", "way")
"""Of what a search found. ``way``: a digest of what each start and proposal cost, what a proposal changed, and whether it was accepted."""


def searched(graph: OperatorGraph, topology: Topology, optimizer_states: int, budget: int, seed: int) -> list[int | str]:
    """A value for each of ``SEARCH_COLUMNS``."""
    outcome = soap.find(
        graph, topology, SearchOptions(budget=budget, seed=seed, optimizer_states=optimizer_states, costs="estimate", cores=1)
    )
    found = outcome.result
    starts = [f"{start.cost_ns} {start.fits}" for start in found.starts]
    way = [f"{row.operator} {row.operators} {row.cost_ns} {row.accepted}" for row in found.rows]
    return [found.cost_ns, hash_of(found.strategy, graph), found.evaluations, digest(starts + way)]
