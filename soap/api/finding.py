"""``find``: the search with the costs, links and starts that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from soap.api.deciding import draws_for
from soap.api.models import Cluster, Model, topology_of
from soap.api.outcome import SearchOutcome
from soap.api.predictions import announce_compiling, simulator_for
from soap.cluster.memory_budget import with_memory_budget
from soap.cluster.presets import family
from soap.cluster.topology import Topology
from soap.errors import SoapError
from soap.search.chains import search as search_graph
from soap.search.constraints import pairs_of
from soap.search.deciding import DEFAULT_CONFIDENCE
from soap.search.options import SearchOptions, without_fields
from soap.search.polish import MAX_POLISHED
from soap.search.starts import DYNAMIC, RANDOM, check_start
from soap.simulator.draws import Draws, Risk
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from soap.strategy.named import warn_without_effect
from soap.time_limit import TimeLimit

DEFAULT_OPTIONS = SearchOptions()

SEARCH_SHARE = 0.75
"""Share of a time limit that is for the search; the rest is for deciding what is kept."""

MOST_DRAWN_TILES = 2**12
"""A search compares plans by the most likely costs alone if there are more operators times devices: a draw is played as a whole, while a
proposal is simulated by what it changes. What the search finds is judged under draws in any case (``SearchOutcome.decision``)."""


@without_fields
def find(
    model: Model,
    cluster: Cluster,
    options: SearchOptions = DEFAULT_OPTIONS,
    *,
    progress: bool = False,
    improved: Callable[[int], None] = lambda cost_ns: None,
    stopped: Callable[[], bool] = lambda: False,
    polish: bool = True,
) -> SearchOutcome:
    """Search for the strategy with the shortest predicted iteration, on average over draws of the costs:
    ``soap.find(model, cluster, soap.SearchOptions(budget=500))``.

    ``progress``: show a bar on stderr if that is a terminal. ``improved``: called with each new best cost in ns. ``stopped``: asked now and
    then; once it returns True, the search ends as by Ctrl-C, with the best so far (``result.interrupted``). ``polish``: make the result
    locally optimal in the end, if the space is small enough (``soap.search.polish``), which may take longer than the proposals.

    Nothing is measured or run. Equal arguments give equal results, on any number of cores, unless ``seconds`` ends the search. By then the
    decision is made, too, if need be by the search's costs alone (``brief``). SoapError in one line if model, cluster or options cannot be
    used, or nothing was evaluated in time; InfeasibleError if no strategy fits into memory.
    """
    with TimeLimit(options.seconds) as limit:
        try:
            found = _searched(model, cluster, options, limit, progress=progress, improved=improved, stopped=stopped, polish=polish)
        except KeyboardInterrupt:
            if stopped() or not limit.over:
                raise
            early = f"nothing was evaluated within {options.seconds:.3g} s of searching; expected more time, or a smaller model"
            raise SoapError(early) from None
    return found if options.seconds is None or found.result.interrupted else _decided_within(limit, found)


def _searched(
    model: Model,
    cluster: Cluster,
    options: SearchOptions,
    limit: TimeLimit,
    *,
    progress: bool,
    improved: Callable[[int], None],
    stopped: Callable[[], bool],
    polish: bool,
) -> SearchOutcome:
    """Search within a part of the limit."""
    simulator = simulator_for(
        model,
        with_memory_budget(topology_of(cluster), options.memory_budget),
        optimizer_states=options.optimizer_states,
        costs=options.costs,
        measured_updates=options.measured_updates,
        training=options.training,
        kernels=options.kernels,
        sum_dtype=options.sum_dtype,
    )
    for name in options.starts or ():
        if name not in (RANDOM, DYNAMIC):
            check_start(name)
            warn_without_effect(name, simulator.topology)
    from soap.simulator.incremental import IncrementalSimulator

    draws = _compared_by(simulator, options)
    evaluator = IncrementalSimulator(simulator, draws)
    if progress and not evaluator.begins_at_once():
        announce_compiling()
    result = search_graph(
        simulator.graph,
        simulator.topology,
        evaluator,
        options,
        progress=progress,
        improved=improved,
        stopped=stopped,
        further_starts=_dynamic_start(simulator, options.starts),
        polish_up_to=MAX_POLISHED if polish else 0,
        limit=limit,
        share=SEARCH_SHARE,
    )
    pins, forbidden = pairs_of(options.pins), pairs_of(options.forbidden)
    confidence = _usual_confidence(simulator.topology) if options.confidence is None else options.confidence
    return SearchOutcome(simulator, result, pins=pins, forbidden=forbidden, confidence=confidence, compared_by=draws)


def _usual_confidence(topology: Topology) -> float:
    """Where plans can be run, what was not run must be sure; elsewhere the fastest plan on average is taken."""
    return 0.0 if family(topology.name) is None else DEFAULT_CONFIDENCE


def _decided_within(limit: TimeLimit, found: SearchOutcome) -> SearchOutcome:
    """The outcome with its decision made and its plan simulated; shortened, if the limit or Ctrl-C ends that."""
    try:
        with limit:
            _ = found.decision, found.simulation
            return found
    except KeyboardInterrupt:
        return found.shortened()


def _compared_by(simulator: Simulator, options: SearchOptions) -> Draws | None:
    tiles = len(simulator.graph.operators) * simulator.topology.device_count
    if options.risk is None or tiles > MOST_DRAWN_TILES:
        return None
    return draws_for(simulator, options.draws, Risk(options.risk))


def _dynamic_start(simulator: Simulator, starts: Sequence[str] | None) -> dict[str, Callable[[], Strategy]]:
    """Name -> start that dynamic programming finds. It is made if it is asked for; by default, if that takes seconds at most."""
    from soap.search.dynamic import MAX_PAIRS, dynamic_strategy, pair_count
    from soap.search.rough_costs import RoughCosts
    from soap.search.space import build_space

    if starts is not None and DYNAMIC not in starts:
        return {}
    space = build_space(simulator.graph, simulator.topology.device_count)
    if starts is None and pair_count(space) > MAX_PAIRS:
        return {}
    return {DYNAMIC: lambda: dynamic_strategy(space, RoughCosts(simulator.shared))}
