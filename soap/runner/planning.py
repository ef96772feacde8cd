"""The strategy of a runner: searched as its configuration says, with one number of partitions for parameters that share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from soap import api
from soap.graph import OperatorGraph
from soap.profiles.roofline import LEAST_DENSE_STATES
from soap.row_shares import with_alphas
from soap.runner.config import RunnerConfig
from soap.runtime.row_update import spares_rows
from soap.runtime.trainer import OptimizerFactory
from soap.simulator.reference import execution_order
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import ExecutionOrder
from soap.strategy import Strategy, SyncConfig
from soap.topology import Topology

SERVED = "parameter_server"


def planned(
    graph: OperatorGraph, topology: Topology, config: RunnerConfig, groups: Sequence[Sequence[str]]
) -> tuple[Strategy, ExecutionOrder]:
    """The strategy, and its tiles in the order in which their passes begin."""
    graph = with_alphas(graph, list((config.alpha or {}).items()))
    states = optimizer_states(config.optimizer)
    simulator = api.simulator_for(graph, topology, optimizer_states=states, costs=config.costs)
    if config.run_option == "ps":
        strategy = api.classical(SERVED, graph, topology)
    else:
        syncs = [SyncConfig()] if config.run_option == "allreduce" else []
        found = api.search(
            graph, topology, budget=config.budget, seed=config.seed, syncs=syncs, optimizer_states=states, costs=config.costs
        )
        strategy = found.strategy
    strategy = alike(simulator, adapted(strategy, config), groups)
    simulation = simulator.run(strategy)
    return strategy, execution_order(simulation.tasks, simulation.schedule)


def optimizer_states(make: OptimizerFactory) -> int:
    """How many tensors of a parameter's size an optimizer keeps, as predictions count them: tried on a parameter of its own. One that
    changes rows without gradient counts as Adam at least, which does so, too."""
    parameter = torch.zeros(2, 3, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    kept = [one for one in optimizer.state[parameter].values() if isinstance(one, torch.Tensor) and one.shape == parameter.shape]
    return len(kept) if spares_rows(optimizer, optimizer.param_groups[0]) else max(len(kept), LEAST_DENSE_STATES)


def adapted(strategy: Strategy, config: RunnerConfig) -> Strategy:
    """Served parameters as the configuration says, where it says something."""
    for name, sync in _served(strategy).items():
        partitions = sync.partitions if config.search_partitions else config.partitions
        together = sync.local_aggregation and config.local_aggregation
        strategy = strategy.with_parameter(name, replace(sync, partitions=partitions, local_aggregation=together))
    return strategy


def alike(simulator: Simulator, strategy: Strategy, groups: Sequence[Sequence[str]]) -> Strategy:
    """Served parameters of a group in equally many partitions: the number, of those that they have, that is predicted to be fastest."""
    for group in groups:
        served = {name: sync for name, sync in _served(strategy).items() if name in group}
        counts = sorted({sync.partitions for sync in served.values()})
        if len(counts) < 2:
            continue
        candidates = []
        for partitions in counts:
            changed = strategy
            for name, sync in served.items():
                changed = changed.with_parameter(name, replace(sync, partitions=partitions))
            candidates.append((simulator.cost(changed), changed))
        strategy = min(candidates, key=lambda found: (found[0][1] > 0, found[0][0]))[1]
    return strategy


def _served(strategy: Strategy) -> dict[str, SyncConfig]:
    return {name: sync for name, sync in strategy.parameters.items() if sync.method == SERVED}
