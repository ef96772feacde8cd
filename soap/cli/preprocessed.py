"""``--data``, and models and batches by what ``soap-preprocess`` wrote: ``--data preprocessed:OUT``, ``--alpha-from OUT``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from soap import api
from soap.cli.command import Parser, UsageError
from soap.cli.options import data_spec
from soap.cluster.topology import Topology
from soap.simulator.costs import CostSource
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy

if TYPE_CHECKING:
    from soap.cli.training import Job

PREFIX = "preprocessed:"
SIZED = ("zoo:dlrm",)
"""Models whose tables have as many rows as the data, if they are given data."""


def add_data(parser: Parser) -> None:
    """The option of whatever trains."""
    data_help = (
        "yields one sequence of tensors per step, the same on all ranks (compared in the first 8 steps, then in every 8th), "
        "or returns a torch dataset, of which each rank reads its samples; or zoo:NAME; or preprocessed:OUT, what soap-preprocess wrote "
        "(default: drawn like the example inputs, of which whole numbers other than indices and labels, such as offsets and masks, "
        "are taken as they are)"
    )
    parser.add_argument("--data", metavar="PKG.MOD:CALLABLE", type=data_spec, help=data_help)


def folder_of(data: str | None) -> str | None:
    """The folder of ``preprocessed:OUT``."""
    return data.removeprefix(PREFIX) if data is not None and data.startswith(PREFIX) else None


def sized(model: str, folder: str | None) -> str:
    """The model with tables as long as the dictionaries of the data. A model that brings its tables (a file, or ``:tables=``) stays."""
    name, at, batch = model.partition("@")
    if folder is None or not name.startswith(SIZED) or "=" in name:
        return model
    from soap.data import Preprocessed  # torch

    rows = Preprocessed(folder).table_rows
    if not rows:
        raise UsageError(f"{folder!r} has no categories; expected some, one for each table of {model}")
    return f"{name}:tables={'-'.join(str(max(1, count)) for count in rows)}{at}{batch}"


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
