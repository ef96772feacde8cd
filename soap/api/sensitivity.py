"""What-if over figures of the cluster: where the choice between a plan and data parallelism turns over."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from soap.profiles.scaled import ScaledCosts
from soap.search.sensitivity import Figure, Sensitivity, known_figures, sensitivities, with_figure
from soap.simulator.lowering import lower
from soap.simulator.reference import simulate
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy


def gain_with(simulator: Simulator, plan: Strategy, usual: Strategy) -> Callable[[Figure, float], float]:
    """The gain of a plan over another one on the simulator's cluster with a figure times a factor. Answers are kept."""
    known = [(strategy, simulator.predict(strategy)) for strategy in (plan, usual)]

    @cache
    def gain(figure: Figure, factor: float) -> float:
        topology = with_figure(simulator.topology, figure, factor)
        costs = ScaledCosts(simulator.costs, simulator.topology, topology, simulator.optimizer_states)
        times = []
        for strategy, own in known:
            if isinstance(own, Simulation):  # what a strategy means does not depend on figures
                times.append(simulate(lower(own.plan, topology, costs)).makespan_ns)
            else:
                times.append(Simulator(simulator.graph, topology, costs, simulator.optimizer_states).predict(strategy).makespan_ns)
        return times[1] / times[0]

    return gain


def sensitivity(simulator: Simulator, plan: Strategy, usual: Strategy) -> list[Sensitivity]:
    """How the choice between two plans depends on each figure of the cluster. StrategyError if one does not fit it."""
    return sensitivities(gain_with(simulator, plan, usual), known_figures(simulator.topology))
