"""The prediction of a run whose ranks read their own samples of its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from soap import api
from soap.cli.preprocessed import folder_of
from soap.cluster.topology import Topology
from soap.simulator.costs import CostSource
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy

if TYPE_CHECKING:
    from soap.cli.training import Job


def as_read(topology: Topology, data: str | None) -> Topology:
    """The cluster, which says whether devices are given their own samples of the data of ``--data``: of drawn and preprocessed data. What a
    user's callable returns is not known before the ranks call it; it counts as whole batches."""
    return replace(topology, own_samples=data is None or folder_of(data) is not None)


def simulated(simulator: Simulator, strategies: Mapping[str, Strategy], topology: Topology) -> dict[str, Simulation]:
    """Each strategy as it is played on ``simulator``'s cluster, which is ``topology`` as data are read. Memory is that of whole batches,
    never less than of parts: a rank draws a batch whole and keeps its own."""
    return {name: _holding_whole_batches(simulator.run(strategy), topology) for name, strategy in strategies.items()}


def simulator_of(job: Job, simulation: Simulation, costs: CostSource) -> Simulator:
    """The simulator that has made the simulation of a job, so that other plans are priced as that was."""
    graph = simulation.plan.graph
    return api.simulator_for(
        graph,
        as_read(job.topology, job.data),
        optimizer_states=simulation.optimizer_states,
        costs=costs,
        measured_updates=job.updating.tried(graph).measured,
        training=simulation.plan.training,
    )


def _holding_whole_batches(found: Simulation, topology: Topology) -> Simulation:
    plan = replace(found.plan, own_samples=topology.own_samples)
    return replace(found, plan=plan, tasks=replace(found.tasks, plan=plan, topology=topology))
