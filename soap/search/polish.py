"""Local optimality: no other structured configuration of one operator is better, and no other way of synchronizing one parameter.

``polish`` takes the first better configuration that fits into memory, operator by operator and parameter by parameter, round after
round, until all in a row have none. What was tried in full stays settled as long as nothing else changes: a configuration that was not
better than a slower strategy is not better than a faster one. If the space is small, ``soap.search.cuts`` then tries two adjacent
operators at once, with all that follows them; as long as that helps, both go on in turn. Nothing is drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from soap.search import cuts
from soap.search.metropolis import Proposal, changed
from soap.search.record import Recorder
from soap.search.space import Space
from soap.strategy.config import OpConfig, Strategy, SyncConfig

if TYPE_CHECKING:
    from soap.simulator.engine import Engine
    from soap.simulator.incremental import IncrementalSimulator

MAX_POLISHED = 10_000
"""A search polishes its result if all operators together have at most so many structured configurations: a round then takes 1 to 4
seconds."""

MAX_ROUNDS = 30
"""A search stops polishing after so many comparisons per configuration of the space."""

MEMORY_QUESTION = 20
"""A question for memory counts as so many comparisons, because Python answers it."""

MOVE = "polish"
"""Name of the move and of the phase in a search's history."""


@dataclass(frozen=True, slots=True)
class Polished:
    """Where polishing ended. ``compared``: number of configurations that were tried. ``locally_optimal``: whether none of all is better."""

    strategy: Strategy
    cost_ns: int
    compared: int
    locally_optimal: bool


def structured_count(space: Space) -> int:
    """Structured configurations of all operators, plus choices of all parameters: the comparisons of one round of polishing."""
    return sum(operator.structured_count for operator in space.operators) + sum(map(len, space.syncs.values()))


def polish(
    engine: Engine,
    space: Space,
    overflow_bytes: Callable[[Strategy], int],
    *,
    limit: int | None = None,
    accepted: Callable[[Proposal, int], None] = lambda proposal, cost_ns: None,
    heed: Callable[[], None] = lambda: None,
) -> Polished:
    """Improve the strategy that ``engine`` holds, which fits into memory, until it is locally optimal or ``limit`` configurations
    were compared. ``overflow_bytes`` is called for better strategies only, and counts as ``MEMORY_QUESTION`` comparisons. ``accepted``
    is called with each strategy that is taken and its cost in ns, ``heed`` before each comparison."""
    parts = _parts(space)
    strategy, compared, questions, settled, position = engine.strategy, 0, 0, 0, 0
    while settled < len(parts):
        improved, (name, choices) = False, parts[position]
        for offered in choices():
            choice = _chosen(strategy, name, offered)
            if choice is None:
                continue
            if limit is not None and compared + MEMORY_QUESTION * questions >= limit:
                return Polished(strategy, engine.makespan_ns, compared, False)
            heed()
            compared += 1
            cost_ns = (
                engine.propose_sync(name, choice, engine.makespan_ns - 1)
                if isinstance(choice, SyncConfig)
                else engine.propose(name, choice, engine.makespan_ns - 1)
            )
            if cost_ns is None:
                engine.reject()
                continue
            better = _with(strategy, name, choice)
            questions += 1
            if overflow_bytes(better) > 0:
                engine.reject()
                continue
            engine.accept()
            strategy, improved = better, True
            accepted(Proposal(strategy, MOVE, (name,)), cost_ns)
        settled = 1 if improved else settled + 1
        position = (position + 1) % len(parts)
    return Polished(strategy, engine.makespan_ns, compared, True)


Choice = OpConfig | SyncConfig


def _parts(space: Space) -> list[tuple[str, Callable[[], Iterable[Choice]]]]:
    """All that can be changed by itself, operators first, then parameters, each with a function that gives its choices."""
    parts: list[tuple[str, Callable[[], Iterable[Choice]]]] = []
    for op, own in zip(space.graph.operators, space.operators, strict=True):
        parts.append((op.name, own.structured))
    for name, syncs in space.syncs.items():
        parts.append((name, partial(iter, syncs)))
    return parts


def _chosen(strategy: Strategy, name: str, choice: Choice) -> Choice | None:
    """The change of an operator or a parameter to a choice; None if it is like that already."""
    if isinstance(choice, SyncConfig):
        return None if strategy.sync(name) == choice else choice
    return changed(strategy, {name: choice}).get(name)


def _with(strategy: Strategy, name: str, choice: Choice) -> Strategy:
    if isinstance(choice, SyncConfig):
        return strategy.with_parameter(name, choice)
    return strategy.with_operator(name, choice)


def polish_best(
    recorder: Recorder, space: Space, evaluator: IncrementalSimulator, most: int = MAX_POLISHED, heed: Callable[[], None] = lambda: None
) -> None:
    """Polish the best strategy of a search, if it fits, is not too large for an engine, and all operators together have at most ``most``
    configurations. ``heed``: raises an interrupt if the search is to end."""
    best, count = recorder.best, structured_count(space)
    if best is None or not best.fits or count > most or (engine := evaluator.engine_for(best.strategy)) is None:
        return

    def lacks(strategy: Strategy) -> int:
        """More than 0 if what the engine proposes lacks memory."""
        return 0 if evaluator.fits(strategy, engine) else 1

    def accepted(proposal: Proposal, cost_ns: int) -> None:
        recorder.proposal(MOVE, best.name, proposal, cost_ns, 0, True)

    def cut(strategy: Strategy, names: tuple[str, ...], cost_ns: int) -> None:
        accepted(Proposal(strategy, MOVE, names), cost_ns)

    rounds, improved = cuts.round_count(space), True
    while improved:
        outcome = polish(engine, space, lacks, limit=MAX_ROUNDS * count, accepted=accepted, heed=heed)
        recorder.polished, recorder.locally_optimal = recorder.polished + outcome.compared, outcome.locally_optimal
        improved = False
        if rounds > 0 and outcome.locally_optimal:
            rounds -= 1
            improved, compared = cuts.improve_by_cuts(engine, space, lacks, cut)
            recorder.polished += compared
