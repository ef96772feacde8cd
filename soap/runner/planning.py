"""The strategy of a runner: searched as its configuration says, with equal numbers of partitions for marked parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from soap import api
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.model.sparse_shares import with_alphas
from soap.plan.compression.training import PlannedTraining
from soap.plan.running.execution_order import ExecutionOrder
from soap.runner.config import RunnerConfig
from soap.runtime.updates.trial import optimizer_states, try_optimizer
from soap.search.options import SearchOptions
from soap.simulator.reference import execution_order
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import in_one_partition


def planned(
    graph: OperatorGraph, topology: Topology, config: RunnerConfig, groups: Sequence[Sequence[str]]
) -> tuple[Strategy, ExecutionOrder]:
    """The strategy, and its tiles in the order in which their forward and backward passes begin."""
    graph = with_alphas(graph, list((config.alpha or {}).items()))
    trainable = {tensor.name: tensor.shape for tensor in graph.parameters if tensor.requires_grad}
    tried = try_optimizer(config.recipe.layout(trainable), trainable)
    states = optimizer_states(tried, sparse=bool(graph.sparse))
    known, training = tried.measured, PlannedTraining(clips=config.clip_norm is not None)
    simulator = api.simulator_for(
        graph, topology, optimizer_states=states, costs=config.costs, measured_updates=known, training=training
    )
    if config.run_option == "ps":
        strategy = api.classical("parameter_server", graph, topology)
    else:
        syncs = [SyncConfig()] if config.run_option == "allreduce" else []
        options = SearchOptions(
            budget=config.budget,
            seed=config.seed,
            syncs=syncs,
            optimizer_states=states,
            measured_updates=known,
            uncut=tried.whole,
            together=tried.coupled,
            costs=config.costs,
            training=training,
        )
        strategy = api.find(graph, topology, options).strategy
    strategy = in_one_partition(alike(simulator, adapted(strategy, config), groups), tried.whole)
    simulation = simulator.run(strategy)
    return strategy, execution_order(simulation.tasks, simulation.schedule)


def adapted(strategy: Strategy, config: RunnerConfig) -> Strategy:
    """The strategy with partitions and local aggregation of parameters on servers as the configuration sets them."""
    for name, sync in _served(strategy).items():
        partitions = sync.partitions if config.search_partitions else config.partitions
        within = sync.within if config.local_aggregation else "none"
        strategy = strategy.with_parameter(name, replace(sync, partitions=partitions, within=within))
    return strategy


def alike(simulator: Simulator, strategy: Strategy, groups: Sequence[Sequence[str]]) -> Strategy:
    """The strategy with the same number of partitions for all parameters of a group on servers. Of the numbers that they have, the one that
    is predicted to be fastest is taken."""
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
    return {name: sync for name, sync in strategy.parameters.items() if sync.contract.has_servers}
