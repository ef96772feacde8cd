"""The times of strategies under every draw of the costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from soap.simulator.draws import DrawnTasks, Draws
from soap.simulator.folded import FoldedSimulation
from soap.simulator.reference import simulate
from soap.simulator.simulate import Simulation, Simulator, is_large
from soap.strategy.config import Strategy


class DrawnTimes(NamedTuple):
    """``usual_ns``: time of an iteration under the most likely costs. ``times_ns``: under each draw. ``messages``: number of communications
    in an iteration."""

    usual_ns: int
    times_ns: tuple[int, ...]
    messages: int


def reference_times_ns(outcome: Simulation | FoldedSimulation, draws: Draws) -> tuple[int, ...]:
    """[draw]: the makespan of a simulated strategy, by the reference simulation."""
    drawn = DrawnTasks(outcome.tasks, draws, outcome.between_hosts)
    return tuple(simulate(drawn.under(draw)).makespan_ns for draw in range(draws.count))


def drawn_times(simulator: Simulator, strategies: Iterable[Strategy], draws: Draws, *, compiled: bool = True) -> list[DrawnTimes]:
    """The times of each strategy, under the same draws. ``compiled``: by compiled code; else by the reference, which is slower, needs no
    compiler, and gives the same times. StrategyError if a strategy does not fit the graph or the cluster."""
    if not compiled:
        outcomes = map(simulator.predict, strategies)
        return [DrawnTimes(own.makespan_ns, reference_times_ns(own, draws), own.messages) for own in outcomes]
    from soap.simulator.drawn_engine import DrawnEngine, make_engine  # compiled code
    from soap.simulator.folded_bound import folded_engine, messages

    whole, found = None, []
    for strategy in strategies:
        folding = simulator.folding(strategy, nearly=True) if is_large(strategy) else ""
        if isinstance(folding, str):
            whole = whole or make_engine(simulator.shared, draws)
            engine, loaded = whole, strategy
        else:
            engine, loaded = folded_engine(folding, simulator.costs, draws), folding.copies.strategy
        assert isinstance(engine, DrawnEngine)
        engine.load(loaded)
        engine.simulate()
        sent = int(np.count_nonzero(engine.state.moved[engine.taken()])) if isinstance(folding, str) else messages(folding, engine)
        found.append(DrawnTimes(engine.usual_ns, tuple(engine.times_ns().tolist()), sent))
    return found
