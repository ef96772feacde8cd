"""The files that commands write with ``--timeline``: the picture, and a description of what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import soap
from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.kinds import run_kind
from soap.cluster.presets import family
from soap.cluster.topology import Topology
from soap.errors import TimelineError
from soap.files import read_text
from soap.model.graph import OperatorGraph
from soap.simulator.analysis.timeline import MeasuredEvent, chrome_trace, measured_trace, middle_iteration, task_details
from soap.simulator.analysis.timeline_file import MAX_BYTES, Description, Origin, Timeline, dumps, loads
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation
from soap.strategy.config import Strategy
from soap.strategy.json_file import strategy_hash

if TYPE_CHECKING:
    from soap.cli.training import Job


def predicted_text(
    graph: OperatorGraph, strategy: Strategy, simulation: Simulation | FoldedSimulation, costs_hash: str, *, memory: bool = False
) -> str:
    """The file of a predicted iteration. ``memory``: with each device's memory over time."""
    topology, copies = simulation.topology, simulation.folding.count if isinstance(simulation, FoldedSimulation) else 1
    what = graph, topology, strategy, simulation
    described = _description("predicted", *what, simulation.makespan_ns, copies=copies, costs_hash=costs_hash)
    trace = chrome_trace(simulation.tasks, simulation.schedule, memory=simulation.memory_over_time if memory else ())
    return dumps([(trace, described)])


def measured_text(
    strategy: Strategy,
    simulation: Simulation,
    iterations: Sequence[Sequence[MeasuredEvent]],
    step_ns: int,
    micro_batches: int = 1,
    *,
    costs_hash: str,
    not_as_priced: str = "",
    scale: float = 1.0,
) -> str:
    """The file of a predicted iteration and a measured one, side by side. ``iterations``: the events of each traced iteration, of which the
    one of middle length is shown, with each task's median time. ``step_ns``: without tracing. ``scale``: of an emulation, by which measured
    times are divided. ``costs_hash``, ``not_as_priced``: see ``Description``."""
    graph, topology = simulation.plan.graph, simulation.topology
    predicted_ns = simulation.step_ns(micro_batches)
    what = graph, topology, strategy, simulation
    predicted = _description("predicted", *what, predicted_ns, micro_batches=micro_batches, costs_hash=costs_hash)
    made = _description("measured", *what, round(step_ns * scale), micro_batches=micro_batches, iterations=len(iterations))
    measured = replace(made, not_as_priced=not_as_priced)
    middle, medians_ns = middle_iteration([_in_cluster_time(events, scale) for events in iterations])
    known = task_details(simulation.tasks)
    details = {name: {**known.get(name, {}), "median_ns": time_ns} for name, time_ns in medians_ns.items()}
    names = [device.name for device in topology.devices]
    picture = measured_trace(middle, "measured", names, details)
    return dumps([(chrome_trace(simulation.tasks, simulation.schedule, "predicted"), predicted), (picture, measured)])


def read(path: str, origin: Origin) -> Timeline:
    """The only timeline of this origin in the file."""
    content = read_text(path, what="timeline", error=TimelineError, limit_bytes=MAX_BYTES)
    try:
        found = [timeline for timeline in loads(content) if timeline.description.origin == origin]
    except TimelineError as cause:
        raise TimelineError(f"timeline {path!r}: {cause}") from None
    if len(found) != 1:
        writer = "soap-run" if origin == "measured" else "soap-simulate, soap-search or soap-run"
        count = len(found) or "no"
        raise TimelineError(f"timeline {path!r} has {count} {origin} iterations; expected one: give what {writer} --timeline wrote")
    return found[0]


def _in_cluster_time(events: Sequence[MeasuredEvent], scale: float) -> list[MeasuredEvent]:
    return [(rank, name, kind, round(start * scale), round(end * scale)) for rank, name, kind, start, end in events]


def not_as_priced(job: Job, scale: float) -> str:
    """The options of a run that make its computations differ from those priced; "" if there are none. ``scale``: of an emulation."""
    kind = run_kind(job.topology)
    emulated = family(job.topology.name) == EMULATED
    options = {
        "--compile": job.compiled,
        f"--device {job.device_kind}": job.device_kind not in (None, kind),
        "--emulate": job.emulated and not emulated,
        "no --emulate": emulated and not job.emulated,
        f"--emulate-scale {scale:g}": scale != 1,
    }
    return ", ".join(option for option, given in options.items() if given)


def _description(
    origin: Origin,
    graph: OperatorGraph,
    topology: Topology,
    strategy: Strategy,
    simulation: Simulation | FoldedSimulation,
    iteration_ns: int,
    *,
    micro_batches: int = 1,
    iterations: int = 1,
    copies: int = 1,
    costs_hash: str = "",
) -> Description:
    versions: Mapping[str, str] = {"soap": soap.__version__}
    return Description(
        origin=origin,
        model=graph.name,
        model_hash=graph.hash,
        cluster=topology.name,
        cluster_hash=topology.hash,
        strategy_hash=strategy_hash(strategy, graph),
        optimizer=simulation.optimizer_states,
        iteration_ns=iteration_ns,
        micro_batches=micro_batches,
        iterations=iterations,
        copies=copies,
        link_bytes={name: size for name, size in simulation.link_bytes.items() if size} if origin == "predicted" else {},
        versions={**versions, "torch": version("torch")} if origin == "measured" else versions,
        costs_hash=costs_hash,
    )
