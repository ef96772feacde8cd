"""Predicting the time of an iteration: simulation, costs, and explanations."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from soap.api.deciding import known_spreads_of, range_record, timed
from soap.api.models import Cluster, Model, graph_of, topology_of
from soap.api.strategies import simulated_name
from soap.cluster.kinds import has_gpus
from soap.cluster.memory_budget import with_memory_budget
from soap.cluster.topology import Topology
from soap.errors import ProfileError, SoapWarning
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.profiles.roofline import RooflineCosts
from soap.search.deciding import DECIDING_DRAWS
from soap.search.explanation import Line, Synchronized, Unkept
from soap.search.explanation import explain as explain_operators
from soap.search.explanation import explain_synchronization as explain_parameters
from soap.search.explanation import explain_unkept as explain_marks
from soap.search.options import OPTIMIZER_STATES, check_costs
from soap.search.starts import BASELINE
from soap.simulator.costs import CostModel, CostSource
from soap.simulator.folded import FoldedSimulation
from soap.simulator.kernels import Kernels, joined
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.strategy.megatron import staged
from soap.strategy.stages import chunks_of, devices_of_stages, stages_of_chunks

if TYPE_CHECKING:
    from soap.profiles.corrections import Correction
    from soap.profiles.entries import Entry
    from soap.profiles.store import Store
    from soap.simulator.incremental import IncrementalSimulator
    from soap.simulator.tasks import TaskGraph


T = TypeVar("T")


def asked(
    model: Model,
    cluster: Cluster,
    strategy: Strategy | str,
    *,
    optimizer_states: int,
    costs: CostSource,
    memory_budget: str | None,
    kernels: Kernels = "eager",
    sum_dtype: str | None = None,
) -> tuple[Simulator, Strategy]:
    """The simulator of a model on a cluster, and the strategy to simulate, which may have been named."""
    topology = with_memory_budget(topology_of(cluster), memory_budget)
    simulator = simulator_for(model, topology, optimizer_states=optimizer_states, costs=costs, kernels=kernels, sum_dtype=sum_dtype)
    return simulator, simulated_name(strategy, simulator) if isinstance(strategy, str) else strategy


def simulate(
    model: Model,
    cluster: Cluster,
    strategy: Strategy | str,
    *,
    optimizer_states: int = OPTIMIZER_STATES,
    costs: CostSource = "auto",
    memory_budget: str | None = None,
    kernels: Kernels = "eager",
    sum_dtype: str | None = None,
) -> Prediction:
    """Predict one training iteration. ``strategy``: may be the name of a classical one, such as ``data_parallel``. ``optimizer_states``:
    tensors of a parameter's size that the optimizer keeps. ``memory_budget``: how much of each device's memory plans may use, such as
    ``80%`` or ``20GB``. ``kernels``, ``sum_dtype``: as for ``simulator_for``. SoapError in one line if the arguments do not fit together.
    """
    given: dict[str, Any] = {"optimizer_states": optimizer_states, "costs": costs, "memory_budget": memory_budget, "kernels": kernels}
    simulator, strategy = asked(model, cluster, strategy, **given, sum_dtype=sum_dtype)
    found = simulator.run(strategy)
    return Prediction(found.plan, found.tasks, found.schedule, found.optimizer_states, simulator, strategy)


@dataclass(frozen=True)
class Prediction(Simulation):
    """The outcome of ``simulate``: a simulation that also knows how sure it is."""

    simulator: Simulator
    strategy: Strategy

    @cached_property
    def range(self) -> dict[str, Any]:
        """``predicted_range``; found when it is first asked for, by playing the strategy under draws of the costs."""
        return predicted_range(self.simulator, self.strategy, len(self.tasks.tasks))


def predicted_range(simulator: Simulator, strategy: Strategy, tasks: int) -> dict[str, Any]:
    """How sure the prediction of a strategy's time is, and that it beats data parallelism: ``range_record``, which is ``range`` in the
    commands' JSON. ``tasks``: how many the strategy has."""
    usual = simulator.data_parallel
    compiled = plays_compiled(tasks, DECIDING_DRAWS)
    plan, reference = timed(simulator, {"plan": strategy, BASELINE: usual}, usual, compiled=compiled)
    return range_record(plan, reference, known_spreads_of(simulator).step_factor)


def explain(simulator: Simulator, strategy: Strategy, simulation: Simulation | None = None) -> list[Line]:
    """Explain a strategy, operator by operator: its cost compared with data parallelism, the effect of setting it back to that, and what
    limits it. With micro-batches or stages it is compared with data parallelism in these, inside each stage.

    ``simulation``: the strategy's own, if it exists already.
    """
    from soap.simulator.incremental import IncrementalSimulator

    if not IncrementalSimulator.begins_at_once():
        announce_compiling()
    baseline = simulator.data_parallel
    if strategy.stages or strategy.microbatches > 1:
        baseline = usual_in_stages(simulator.graph, replace(strategy, parameters={}), simulator.topology)
    runs = simulation or simulator.run(strategy), simulator.run(baseline)
    return explain_operators(simulator.graph, *runs, (strategy, baseline), IncrementalSimulator(simulator))


def explain_synchronization(simulator: Simulator, strategy: Strategy) -> list[Synchronized]:
    """The cost of all-reducing those parameters that a strategy synchronizes by another method."""
    from soap.simulator.incremental import IncrementalSimulator

    return explain_parameters(strategy, IncrementalSimulator(simulator))


def explain_unkept(simulator: Simulator, strategy: Strategy) -> list[Unkept]:
    """What it would be to keep what a strategy recomputes, or offloads."""
    from soap.simulator.incremental import IncrementalSimulator

    return explain_marks(simulator.graph, strategy, IncrementalSimulator(simulator))


def simulator_for(
    model: Model,
    cluster: Cluster,
    *,
    optimizer_states: int = OPTIMIZER_STATES,
    costs: CostSource = "auto",
    measured_updates: bool = True,
    training: PlannedTraining = PLAIN,
    kernels: Kernels = "eager",
    sum_dtype: str | None = None,
) -> Simulator:
    """A simulator of this model on this cluster, with the best costs and link figures that are known. ``kernels``: which of an operator's
    calls are one kernel on GPUs (``simulator.kernels``); measured are ``eager`` ones, so others are estimated. ``sum_dtype``: as for
    ``load``. ProfileError if there are no GPUs for the kernels, ModelError if the model was loaded with another ``sum_dtype``."""
    topology = with_links(topology_of(cluster), costs)
    graph = joined(graph_of(model, topology, sum_dtype), kernels)
    if kernels != "eager" and not has_gpus(topology):
        raise ProfileError(f"kernels {kernels!r} on {topology.name}: expected GPUs; on processors calls are eager")
    if kernels != "eager":
        return Simulator(graph, topology, RooflineCosts(topology, optimizer_states, kernels), optimizer_states, training)
    return Simulator(graph, topology, costs_for(topology, optimizer_states, costs, measured_updates), optimizer_states, training)


def costs_for(
    topology: Topology, optimizer_states: int = OPTIMIZER_STATES, costs: CostSource = "auto", measured_updates: bool = True
) -> CostModel:
    """The cost model of a cluster. With ``costs="auto"``: the measurements of ``soap-profile`` for its devices, with the corrections of
    ``soap-compare --calibrate``, if there are any; for a preset's devices also those that come with this package. Otherwise estimates.

    ``measured_updates``: whether ``soap-profile`` measures updates of this optimizer. A store that cannot be read is a warning, and counts
    as empty.
    """
    if _takes_measurements(costs):
        from soap.profiles.lookup import ProfiledCosts, read_corrections, read_profiles
        from soap.profiles.shipped import shipped_entries

        nothing: tuple[dict[str, list[Entry]], dict[str, list[Correction]]] = {}, {}
        profiles, corrections = _from_store(lambda store: (read_profiles(topology, store), read_corrections(topology, store)), nothing)
        origins = {}
        for name, (place, entries) in shipped_entries(topology).items():
            own = profiles.get(name, [])
            known = {entry.key for entry in own}
            profiles[name] = [*own, *(entry for entry in entries if entry.key not in known)]
            origins[name] = f"{'soap-profile, and ' * bool(own)}{place.text}; comes with this package"
        if profiles or corrections:
            return ProfiledCosts(topology, profiles, optimizer_states, corrections, measured_updates, origins)
    return RooflineCosts(topology, optimizer_states)


def with_links(topology: Topology, costs: CostSource = "auto") -> Topology:
    """The same cluster. With ``costs="auto"``, its links have the figures that ``soap-profile links`` has measured, if it has.

    A store that cannot be read is a warning, and counts as empty.
    """
    if not _takes_measurements(costs) or topology.device_count < 2:
        return topology
    from soap.profiles.measured_links import with_stored_links

    return _from_store(lambda store: with_stored_links(topology, store), topology)


def _takes_measurements(costs: CostSource) -> bool:
    check_costs(costs)
    return costs == "auto"


def _from_store(read: Callable[[Store], T], otherwise: T) -> T:
    """Read from the user's store. If that fails, warn and return ``otherwise``."""
    from soap.profiles.store import Store

    try:
        return read(Store())
    except ProfileError as cause:
        warnings.warn(f"{cause}; going on with estimates", SoapWarning, stacklevel=1)  # always from this line, so that it shows once
        return otherwise


def resources_record(simulation: Simulation | FoldedSimulation) -> dict[str, Any]:
    """Peaks of the devices, and the bytes that they send each other, as a strategy file records them."""
    return {"memory_bytes": list(simulation.peak_bytes), "bytes_moved": simulation.bytes_moved}


def costs_record(simulator: Simulator, tasks: TaskGraph) -> dict[str, Any]:
    """The sources of a simulation's costs, as plain values. ``shares``: source (measured to estimated) -> its share of the compute time.
    ``corrected``: the share that ``soap-compare --calibrate`` has corrected, whatever its source. ``links``: how links were measured, in
    one line; None if their figures come from the cluster's description."""
    from soap.profiles.shares import corrected, shares

    return {
        "description": simulator.costs.description,
        "hash": simulator.costs_hash,
        "shares": shares(simulator.costs, tasks),
        "corrected": corrected(simulator.costs, tasks),
        "links": simulator.topology.links_source or None,
    }


MANY_PLAYED = 2**17
"""So many tasks are played by compiled code, even if it has to be compiled first, which takes as long as playing them without it."""


def plays_compiled(tasks: int, times: int) -> bool:
    """Whether to play so many tasks so many times by compiled code: if it is there, or it is worth compiling, which is announced."""
    from soap.simulator.incremental import IncrementalSimulator

    if IncrementalSimulator.begins_at_once():
        return True
    if tasks * times < MANY_PLAYED:
        return False
    announce_compiling()
    return True


def quick_evaluator(simulator: Simulator) -> Simulator | IncrementalSimulator:
    """What answers questions for times and memory soonest: the compiled simulator, which gives the same answers, if it is compiled already,
    else ``simulator`` itself."""
    from soap.simulator.incremental import IncrementalSimulator

    return IncrementalSimulator(simulator) if IncrementalSimulator.begins_at_once() else simulator


def announce_compiling() -> None:
    """Tell a user at a terminal that the first minute is spent compiling."""
    if sys.stderr is not None and sys.stderr.isatty():
        print("compiling the simulator for this machine, once: less than a minute", file=sys.stderr)


def usual_in_stages(graph: OperatorGraph, strategy: Strategy, topology: Topology) -> Strategy:
    """The strategy with data parallelism inside each of its stages, on the devices that they use already; without stages, on all of these.
    It may have more micro-batches than its own configurations allow."""
    chunks = chunks_of(graph, strategy.stages)
    stage_of = stages_of_chunks(max(chunks, default=0) + 1, strategy.schedule)
    groups = [sorted(own) or [0] for own in devices_of_stages(graph, strategy)]
    made = staged(graph, topology, [stage_of[chunk] for chunk in chunks], groups, microbatches=strategy.microbatches)
    return replace(strategy, operators=made.operators)
