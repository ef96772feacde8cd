"""Virtual workers as a strategy, and the way back: ``Strategy.workers`` has the groups, operators' devices say which stage they are in.

What a strategy of virtual workers asks of ranks and servers: who computes which operators, and which server has which parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.mixed.partitioning import Placement, WorkerPlan, kept_minibatches
from soap.model.batch import sample_dims, sample_factor, samples_of
from soap.model.graph import OperatorGraph, TensorKind
from soap.model.regions import Interval, balanced
from soap.strategy.config import Strategy, settled
from soap.strategy.consistency import parse
from soap.strategy.grids import fill
from soap.strategy.marks import require_unmarked
from soap.strategy.sync import fitted, parameter_server
from soap.strategy.workers import Workers

Stages = tuple[tuple[int, int], ...]
"""Of a worker: (device, first operator) of each stage."""


def strategy_of(plans: Sequence[WorkerPlan], graph: OperatorGraph, servers: int, consistency: str, device_count: int) -> Strategy:
    """The strategy that means these workers. ``graph``: of all workers' minibatches together, one each; its operators are those of the
    graph that ``plans`` were made for. ``servers``: how many have a part of each parameter. StrategyError in one line if the samples do not
    divide, or the consistency is none for workers."""
    workers = Workers(tuple(tuple(stage.device for stage in plan.stages) for plan in plans), plans[0].in_flight)
    orders = [tuple(_device_of(plan, position) for plan in plans) for position in range(len(graph.operators))]
    trained = [tensor.name for tensor in graph.parameters if tensor.requires_grad]
    syncs = {name: fitted(graph, name, parameter_server(servers)) for name in trained}
    made = replace(settled(graph, fill(graph, orders, {}), device_count), parameters=syncs, consistency=consistency, workers=workers)
    made.validate(graph, device_count)
    return made


def stages_of(strategy: Strategy, graph: OperatorGraph) -> tuple[Stages, ...]:
    """By worker, its stages in the graph's order. StrategyError if a stage has several runs of operators, or there are no workers."""
    if strategy.workers is None:
        raise StrategyError("the strategy has no virtual workers; expected some: Strategy.workers")
    found: list[list[tuple[int, int]]] = [[] for _ in strategy.workers.groups]
    for position, op in enumerate(graph.operators):
        if sample_factor(op) is None:  # it is where what it reads is
            continue
        for stages, device in zip(found, strategy.operators[op.name].devices, strict=True):
            if stages and stages[-1][0] == device:
                continue
            if any(own == device for own, _ in stages):
                raise StrategyError(f"operator {op.name!r} is on device {device} again; expected a stage's operators in a row")
            stages.append((device, position))
    return tuple(tuple([(stages[0][0], 0), *stages[1:]]) for stages in found)


def minibatch_dims(graph: OperatorGraph) -> dict[str, int]:
    """By input, the dimension that is divided among workers. Labels of which each tile of an exact plan reads all, as their mean counts the
    whole batch, are divided here too: a minibatch's loss is its own mean."""
    found, samples = sample_dims(graph), samples_of(graph)
    for op in graph.operators if samples else ():
        for operand in op.inputs if sample_factor(op) is not None else ():
            tensor = graph.tensors[operand.tensor]
            if tensor.kind is TensorKind.INPUT and tensor.name not in found and samples in tensor.shape:
                found[tensor.name] = tensor.shape.index(samples)
    return found


def minibatch_of(strategy: Strategy, graph: OperatorGraph) -> int:
    """Samples of a worker's minibatch."""
    return (samples_of(graph) or 0) // (1 if strategy.workers is None else len(strategy.workers.groups))


def _device_of(plan: WorkerPlan, position: int) -> int:
    return next(stage.device for stage in reversed(plan.stages) if stage.first <= position)


@dataclass(frozen=True)
class Stage:
    """Operators ``first`` to ``end`` (excluded) of the graph, on a device. ``parameters``: trained ones that it reads, in the graph's
    order. ``receives``, ``sends``: activations from the stage before and to the next one, also those only handed on."""

    device: int
    first: int
    end: int
    parameters: tuple[str, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """A part of a parameter, numbers ``span`` of it end to end, on a server."""

    parameter: str
    span: Interval
    server: int


@dataclass(frozen=True)
class WavePlan:
    """``workers``: by worker, its stages; the device of a stage is the rank that computes it. ``bound``: D, in waves; None: no bound.
    ``samples``: of a minibatch. ``servers``: by server, the rank in whose process it is. ``pieces``: by parameter, where it is.
    ``sizes_bytes``: of all tensors of which stages send some, for one minibatch, and of trained parameters; ``differentiable``: those that
    have a gradient."""

    workers: tuple[tuple[Stage, ...], ...]
    in_flight: int
    bound: int | None
    samples: int
    servers: tuple[int, ...]
    pieces: Mapping[str, tuple[Piece, ...]]
    sizes_bytes: Mapping[str, int]
    differentiable: frozenset[str]

    @cached_property
    def by_rank(self) -> Mapping[int, tuple[int, int]]:
        """Rank -> (worker, stage)."""
        return {stage.device: (w, s) for w, own in enumerate(self.workers) for s, stage in enumerate(own)}

    def room(self, worker: int) -> tuple[int, ...]:
        """By stage, how many minibatches it may have begun and not finished."""
        return kept_minibatches(len(self.workers[worker]), self.in_flight)

    def held_by(self, server: int) -> tuple[Piece, ...]:
        """A server's pieces; their order is that of numbers in messages."""
        return tuple(piece for own in self.pieces.values() for piece in own if piece.server == server)

    def read_by(self, worker: int, stage: int, server: int) -> tuple[int, ...]:
        """Numbers of a server's pieces that a stage's parameters have."""
        names = set(self.workers[worker][stage].parameters)
        return tuple(number for number, piece in enumerate(self.held_by(server)) if piece.parameter in names)

    def placement(self, graph: OperatorGraph, topology: Topology) -> Placement:
        """How much of each stage's parameters is on which host's server."""
        shares = []
        for own in self.workers:
            of_stages: list[Mapping[int, int]] = []
            for stage in own:
                held = Counter[int]()
                for piece in (piece for name in stage.parameters for piece in self.pieces[name]):
                    size = (piece.span[1] - piece.span[0]) * graph.tensors[piece.parameter].itemsize
                    held[topology.devices[self.servers[piece.server]].host] += size
                of_stages.append(held)
            shares.append(tuple(of_stages))
        return Placement(tuple(shares))

    def activation_bytes(self, worker: int) -> tuple[int, int]:
        """What a worker's stages send each other for a minibatch: forward, and back as gradients."""
        sent = [name for stage in self.workers[worker] for name in stage.sends]
        return sum(self.sizes_bytes[name] for name in sent), sum(self.sizes_bytes[name] for name in sent if name in self.differentiable)


def wave_plan(strategy: Strategy, graph: OperatorGraph, topology: Topology) -> WavePlan:
    """The plan of a strategy with virtual workers. ``graph``: of all minibatches together. StrategyError for what they cannot run."""
    cut, workers = stages_of(strategy, graph), strategy.workers
    assert workers is not None
    require_unmarked(graph, strategy, "minibatches of a worker overlap")
    users = {name: [position for position, _ in uses] for name, uses in graph.parameter_users.items()}
    trained = [tensor.name for tensor in graph.parameters if tensor.requires_grad]
    made = tuple(_stages(own, graph, users, trained) for own in cut)
    hosts = sorted({topology.devices[stage.device].host for own in made for stage in own})
    servers = tuple(min(stage.device for own in made for stage in own if topology.devices[stage.device].host == host) for host in hosts)
    pieces = {}
    for name in trained:
        sync = strategy.sync(name)
        if not sync.contract.has_servers:
            raise StrategyError(f"parameter {name!r} is synchronized by {sync.word}; expected servers to own it: parameter_server")
        beside = next((topology.devices[stage.device].host for stage in made[0] if name in stage.parameters), hosts[0])
        pieces[name] = _pieces(name, _numbers(graph, name), sync.partitions, hosts.index(beside), len(hosts))
    count = len(made)
    sent = {name for own in made for stage in own for name in stage.sends}
    sizes = {name: _of_minibatch(graph, name, count) for name in sent} | {name: graph.tensors[name].bytes for name in trained}
    differentiable = frozenset(name for name in sent if graph.tensors[name].requires_grad)
    bound, samples = parse(strategy.consistency).bound, minibatch_of(strategy, graph)
    return WavePlan(made, workers.in_flight, bound, samples, servers, pieces, sizes, differentiable)


def _stages(
    cut: Sequence[tuple[int, int]], graph: OperatorGraph, users: Mapping[str, Sequence[int]], trained: Sequence[str]
) -> tuple[Stage, ...]:
    firsts = [first for _, first in cut]
    ends = [*firsts[1:], len(graph.operators)]
    crossing = [_crossing(graph, border) for border in (*firsts, len(graph.operators))]
    names: list[list[str]] = [[] for _ in cut]
    for name in trained:
        readers = {next(s for s in reversed(range(len(cut))) if firsts[s] <= position) for position in users.get(name, ())} or {0}
        if len(readers) > 1:
            two = sorted(readers)[:2]
            raise StrategyError(
                f"parameter {name!r} is read in stages {two[0]} and {two[1]} of a worker; expected one stage: put its operators together"
            )
        names[readers.pop()].append(name)
    return tuple(
        Stage(device, first, ends[s], tuple(names[s]), crossing[s] if s else (), crossing[s + 1] if s + 1 < len(cut) else ())
        for s, (device, first) in enumerate(cut)
    )


def _crossing(graph: OperatorGraph, border: int) -> tuple[str, ...]:
    """Activations that are made before the border and read behind it, in the order of their making."""
    return tuple(
        name
        for name, (producer, _) in graph.producers.items()
        if producer < border and graph.tensors[name].kind is TensorKind.ACTIVATION
        if any(reader >= border for reader, _ in graph.consumers.get(name, ()))
    )


def _pieces(name: str, numbers: int, partitions: int, beside: int, servers: int) -> tuple[Piece, ...]:
    """A parameter in one part is on the server beside its stage; in more, on the first servers evenly."""
    if partitions == 1:
        return (Piece(name, (0, numbers), beside),)
    return tuple(Piece(name, span, number) for number, span in enumerate(balanced(numbers, min(partitions, servers, numbers))))


def _of_minibatch(graph: OperatorGraph, name: str, workers: int) -> int:
    """Bytes of an activation in one worker's minibatch: its part of the samples, if the activation has any."""
    position, output = graph.producers[name]
    op = graph.operators[position]
    factor = sample_factor(op)
    divided = factor is not None and any(dim.factor == factor for dim in op.outputs[output].dims)
    return graph.tensors[name].bytes // (workers if divided else 1)


def _numbers(graph: OperatorGraph, name: str) -> int:
    return graph.tensors[name].bytes // graph.tensors[name].itemsize
