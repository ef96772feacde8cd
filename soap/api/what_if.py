"""What-if: where the choice between a plan and data parallelism turns over, and what a plan would be on other clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from soap.api.models import topology_of
from soap.api.predictions import plays_compiled, simulator_for
from soap.errors import StrategyError, first_line
from soap.profiles.scaled import ScaledCosts
from soap.search.sensitivity import Figure, Sensitivity, known_figures, sensitivities, with_figure
from soap.simulator.costs import CostSource
from soap.simulator.folded import FoldedSimulation
from soap.simulator.lowering import lower
from soap.simulator.reference import simulate
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy


@dataclass(frozen=True)
class Elsewhere:
    """A plan on another cluster of as many devices, which are taken by number. ``usual_ns``: data parallelism there. ``refused``: why the
    plan cannot be there, in one line; then there are no figures."""

    cluster: str
    time_ns: int = 0
    overflow_bytes: int = 0
    usual_ns: int = 0
    refused: str = ""


MOST_PLAYED = 200
"""About as often two plans are simulated."""


def gain_with(simulator: Simulator, plan: Strategy, usual: Strategy) -> Callable[[Figure, float], float]:
    """The gain of a plan over another one on the simulator's cluster with a figure times a factor. Answers are kept."""
    known = [(strategy, simulator.predict(strategy)) for strategy in (plan, usual)]
    compiled = plays_compiled(max(len(own.tasks.tasks) for _, own in known), MOST_PLAYED)

    @cache
    def gain(figure: Figure, factor: float) -> float:
        topology = with_figure(simulator.topology, figure, factor)
        costs = ScaledCosts(simulator.costs, simulator.topology, topology, simulator.optimizer_states)
        there = Simulator(simulator.graph, topology, costs, simulator.optimizer_states, simulator.training)
        times = [_time_ns(there, strategy, own, compiled=compiled) for strategy, own in known]
        return times[1] / times[0]

    return gain


def _time_ns(simulator: Simulator, strategy: Strategy, known: Simulation | FoldedSimulation, *, compiled: bool) -> int:
    """The time of an iteration. ``known``: on a cluster with other figures; what a strategy means does not depend on them."""
    if isinstance(known, FoldedSimulation):
        return simulator.predict(strategy).makespan_ns
    if not compiled:
        return simulate(lower(known.plan, simulator.topology, simulator.costs)).makespan_ns
    from soap.simulator.engine import Engine  # compiled code

    engine = Engine(simulator.shared)
    engine.load(strategy)
    return engine.simulate()


def elsewhere(simulator: Simulator, plan: Strategy, clusters: Sequence[str], *, costs: CostSource = "auto") -> list[Elsewhere]:
    """A plan on other clusters, in their order, for the simulator's training. TopologyError if one is unknown. ``costs``: as for
    ``simulate``."""
    found = []
    for name in clusters:
        topology = topology_of(name)
        try:
            there = simulator_for(
                simulator.graph, topology, optimizer_states=simulator.optimizer_states, costs=costs, training=simulator.training
            )
            time_ns, overflow_bytes = there.cost(plan)
            usual_ns = there.cost(there.data_parallel)[0]
        except StrategyError as error:
            found.append(Elsewhere(name, refused=first_line(error)))
        else:
            found.append(Elsewhere(name, time_ns, overflow_bytes, usual_ns))
    return found


def sensitivity(simulator: Simulator, plan: Strategy, usual: Strategy) -> list[Sensitivity]:
    """How the choice between two plans depends on each figure of the cluster. StrategyError if one does not fit it."""
    return sensitivities(gain_with(simulator, plan, usual), known_figures(simulator.topology))
