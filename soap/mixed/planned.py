"""Virtual workers as a strategy, and the way back: ``Strategy.workers`` has the groups, operators' devices say which stage they are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from soap.errors import StrategyError
from soap.mixed.partitioning import WorkerPlan
from soap.model.batch import sample_dims, sample_factor, samples_of
from soap.model.graph import OperatorGraph, TensorKind
from soap.strategy.config import Strategy, settled
from soap.strategy.grids import fill
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
