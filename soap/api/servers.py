"""Plans of servers and workers: the search for them, and how they train in their steady state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from soap.api.models import Cluster, Model, topology_of
from soap.api.predictions import asked, simulator_for
from soap.api.strategies import save_strategy
from soap.cluster.memory_budget import with_memory_budget
from soap.search.options import OPTIMIZER_STATES
from soap.simulator.costs import CostSource
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from soap.strategy.consistency import ASYNC, Consistency, parse
from soap.strategy.grids import device_order

if TYPE_CHECKING:
    from soap.elastic.layout import ElasticPlan
    from soap.elastic.simulation.design import Design
    from soap.elastic.simulation.steady import Steady

MOST_SIMULATED = 200
"""Plans that a search simulates, by default."""


@dataclass(frozen=True)
class ServersOutcome:
    """``strategy``: the plan with the most samples per second, and ``report`` how it trains. ``designs``: by name, how Twitter's two
    designs and the naive one train on the same machines. ``simulated``: plans that were; ``possible``: plans that there are, at most.
    ``complete``: whether nothing ended the search before it was done: budget, time, or Ctrl-C. ``proven``: whether no other plan can be
    quicker; else it is one that no single change makes quicker, or what was found until the end."""

    simulator: Simulator
    strategy: Strategy
    plan: ElasticPlan
    report: Steady
    designs: Mapping[str, Steady]
    simulated: int
    possible: int
    complete: bool
    proven: bool

    @property
    def record(self) -> dict[str, Any]:
        """What a strategy file records of the search, as plain values."""
        counts = {"evaluations": self.simulated, "possible": self.possible, "complete": self.complete, "proven": self.proven}
        rates = {name: own.samples_per_second for name, own in self.designs.items()}
        return {"samples_per_second": self.report.samples_per_second, "designs": rates, "search": counts}

    def save(self, path: str) -> None:
        """Write the strategy with its record. SoapError if that fails."""
        save_strategy(path, self.strategy, self.simulator.graph, self.simulator.topology, self.record)


def find_servers(
    model: Model,
    cluster: Cluster,
    consistency: str = ASYNC,
    *,
    budget: int = MOST_SIMULATED,
    seconds: float | None = None,
    optimizer_states: int = OPTIMIZER_STATES,
    costs: CostSource = "auto",
    memory_budget: str | None = None,
    progress: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> ServersOutcome:
    """Search how many of a cluster's machines are servers and how many workers, in how many partitions, and along which axis each table,
    for the most samples per second. ``consistency``: ``sync``, ``bounded:D`` or ``async``. Workers share the model's batch.

    ``budget``: plans to simulate at most; ``seconds``: time for it. ``progress``: show a bar on stderr if that is a terminal. ``stopped``:
    asked now and then; once it returns True, the best so far is the outcome. SoapError in one line if model or cluster cannot be used: a
    model without tables, one machine alone, tables for which no servers have room."""
    from soap.elastic.planned import strategy_of
    from soap.elastic.searching import Search

    bounds = parse(consistency)
    topology = with_memory_budget(topology_of(cluster), memory_budget)
    simulator = simulator_for(model, topology, optimizer_states=optimizer_states, costs=costs)
    graph, deadline = simulator.graph, inf if seconds is None else time.monotonic() + seconds
    best, count = 0.0, 0
    with tqdm(unit="plan", disable=None if progress else True, leave=False) as bar:

        def seen(rate: float) -> None:
            nonlocal best, count
            best, count = max(best, rate), count + 1
            bar.set_postfix_str(f"{best:,.0f} samples/s", refresh=False)
            bar.update()

        def ended() -> bool:
            return count >= budget or time.monotonic() > deadline or stopped()

        machines = graph, simulator.topology, simulator.costs
        found = Search(*machines, None, bounds, optimizer_states=optimizer_states, stopped=ended, simulated=seen).find()
    strategy = strategy_of(found.plan, graph)
    try:
        designs = {} if stopped() else _designs(simulator, bounds)
    except KeyboardInterrupt:  # what was found stays
        designs = {}
    counts = found.simulated, found.possible, not found.interrupted, found.proven
    return ServersOutcome(simulator, strategy, found.plan, found.report, designs, *counts)


def simulate_servers(
    model: Model,
    cluster: Cluster,
    strategy: Strategy | str,
    *,
    optimizer_states: int = OPTIMIZER_STATES,
    costs: CostSource = "auto",
    memory_budget: str | None = None,
) -> Steady:
    """How a strategy of servers and workers trains in its steady state. ``strategy``: may be a name, such as ``bipartite:2+async``.
    SoapError in one line if it is not of that form (``soap.elastic.planned``)."""
    simulator, strategy = asked(model, cluster, strategy, optimizer_states=optimizer_states, costs=costs, memory_budget=memory_budget)
    return steady(simulator, strategy)


def steady(simulator: Simulator, strategy: Strategy) -> Steady:
    """The same of a simulator that is there."""
    from soap.elastic.planned import plan_of
    from soap.elastic.simulation.design import design_of

    return _steady(simulator, design_of(plan_of(strategy, simulator.graph), simulator.graph))


def _designs(simulator: Simulator, consistency: Consistency) -> dict[str, Steady]:
    from soap.elastic.simulation.design import three_designs

    machines = device_order(simulator.topology)
    return {name: _steady(simulator, own) for name, own in three_designs(simulator.graph, machines, consistency).items()}


def _steady(simulator: Simulator, design: Design) -> Steady:
    from soap.elastic.simulation.design import Traffic, needs_of_graph
    from soap.elastic.simulation.steady import simulate
    from soap.elastic.simulation.work import EstimatedWork

    graph, topology = simulator.graph, simulator.topology
    traffic = Traffic(design, needs_of_graph(graph, [*design.layout.tables], design.batch))
    return simulate(topology, traffic, EstimatedWork(graph, topology, simulator.costs, traffic))
