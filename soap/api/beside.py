"""Several jobs on one cluster: how long a step of each takes alone, and beside the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from soap.api.models import Cluster, Model, graph_of, topology_of
from soap.api.predictions import simulator_for, with_links
from soap.api.strategies import load_strategy, simulated_name
from soap.cluster.fewer import part_of
from soap.cluster.memory_budget import with_memory_budget
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.files import read_text
from soap.model.graph import OperatorGraph
from soap.model.json_text import Schema, Unfit, one_line, parse_json, read_as, record
from soap.search.options import OPTIMIZER_STATES
from soap.simulator.beside import Job as Beside
from soap.simulator.beside import beside, check_apart
from soap.simulator.costs import CostSource
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.units import format_bytes


@dataclass(frozen=True)
class Job:
    """A model that trains by a strategy on some of a cluster's devices. ``strategy``: the name of one, or a path to the file of one that
    was made for these devices. ``devices``: their names, or those of hosts; nothing: all. ``name``: what reports call it."""

    model: Model
    strategy: Strategy | str | Path
    devices: Sequence[str] = ()
    name: str = ""


_WORD = Annotated[str, Schema(minLength=1)]
_JOB = record(("builtin", "strategy", "devices"), model=_WORD, builtin=_WORD, strategy=_WORD, devices=tuple[str, ...])
_EXPECTED = "expected an object with model, builtin or strategy, and a list devices"
MAX_BYTES = 2**20


def simulate_beside(
    jobs: Sequence[Job],
    cluster: Cluster,
    *,
    optimizer_states: int = OPTIMIZER_STATES,
    costs: CostSource = "auto",
    memory_budget: str | None = None,
) -> tuple[Beside, ...]:
    """Predict a step of each of these jobs, alone and while all train on the cluster, each on devices of its own: what they share is
    hosts, with their links and the cores of servers. SoapError in one line if they do not fit together."""
    topology = with_links(with_memory_budget(topology_of(cluster), memory_budget), costs)
    return beside_of([job_simulation(job, topology, optimizer_states=optimizer_states, costs=costs) for job in jobs], topology)


def beside_of(simulations: Sequence[Simulation], topology: Topology) -> tuple[Beside, ...]:
    """``simulate_beside`` of jobs that are simulated alone, each on a part of the cluster. Devices are each job's own, so what they hold is
    known; what jobs hold in the memory of hosts adds up: StrategyError if that is more than a host has."""
    if len(simulations) < 2:
        raise StrategyError(f"{len(simulations)} jobs beside each other; expected two at least")
    tasks = [simulation.tasks for simulation in simulations]
    check_apart(tasks, topology)
    for host, *uses in zip(topology.hosts, *(simulation.host_memory for simulation in simulations), strict=True):
        if host.memory_bytes is not None and sum(uses) > host.memory_bytes:
            own, have = " + ".join(format_bytes(use) for use in uses), format_bytes(host.memory_bytes)
            raise StrategyError(
                f"host {host.name!r} would hold {own} of {len(uses)} jobs; expected at most its memory, {have}: fewer of them beside each "
                "other, or with less on servers and offloaded"
            )
    return beside(tasks, topology)


def job_simulation(job: Job, topology: Topology, *, optimizer_states: int = OPTIMIZER_STATES, costs: CostSource = "auto") -> Simulation:
    """A job on its part of the cluster, alone. StrategyError if it is a stale one, or does not fit into memory."""
    part = part_of(topology, job.devices) if job.devices else topology
    graph = graph_of(job.model, part)
    simulator = simulator_for(graph, part, optimizer_states=optimizer_states, costs=costs)
    strategy = _strategy(job, graph, simulator)
    if strategy.stale:
        raise StrategyError(f"a stale strategy ({strategy.consistency}) beside other jobs; expected one that has steps of the whole batch")
    found = simulator.run(strategy)
    if not found.fits:
        raise StrategyError(f"job {job.name or graph.name!r} does not fit into the memory of {part.name!r}; expected one that does")
    return found


def _strategy(job: Job, graph: OperatorGraph, simulator: Simulator) -> Strategy:
    if isinstance(job.strategy, Strategy):
        return job.strategy
    if isinstance(job.strategy, Path):
        return load_strategy(job.strategy, graph, simulator.topology)
    return simulated_name(job.strategy, simulator)


def load_job(path: str | Path) -> Job:
    """A job from a file: a JSON object with ``model``, ``strategy`` (a file) or ``builtin`` (a name), and ``devices`` (a list of names;
    all if left out). Models and files are as on the command line. StrategyError in one line if it is no such file."""
    text = read_text(path, what="job", error=StrategyError, limit_bytes=MAX_BYTES)
    try:
        found = read_as(_JOB, parse_json(text))
    except (ValueError, RecursionError) as cause:
        said = f"{cause.place or 'job'}: {cause}" if isinstance(cause, Unfit) else f"no JSON: {one_line(str(cause))}; {_EXPECTED}"
        raise StrategyError(f"{path}: {said}") from None
    if len(found.keys() & {"builtin", "strategy"}) != 1:
        raise StrategyError(f"{path}: {_EXPECTED}")
    strategy = Path(found["strategy"]) if "strategy" in found else found["builtin"]
    return Job(found["model"], strategy, found.get("devices", ()), Path(path).name)
