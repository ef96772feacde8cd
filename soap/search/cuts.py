"""Better strategies than one operator alone can reach: two adjacent operators change at once, and all that follow them.

A cut is an edge between two operators. Every pair of their structured configurations is tried. Operators around it follow the nearer end:
each takes the first configuration that aligns it with the operator through which it was reached (``alignment``). This goes up to the
distance ``radius`` from the cut. Operators farther away stay as they are, and so do those without an aligned configuration in the space.
With radius 1 the pair changes alone.

Strategies of two halves, each on devices of its own, are often many single changes apart, but one cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from soap.search.alignment import Edge, aligned_with
from soap.search.metropolis import changed
from soap.search.space import Space
from soap.strategy.config import OpConfig, Strategy

if TYPE_CHECKING:
    from soap.simulator.engine import Engine

MAX_COMPARED = 30_000
"""A search makes at most so many comparisons at cuts, in whole rounds: that takes 2 to 5 seconds."""
MAX_ROUNDS = 5
"""Rounds over all cuts, at most."""


class Follower(NamedTuple):
    """An operator, and the edge to the operator that it follows."""

    position: int
    edge: Edge


class Cut(NamedTuple):
    """Two adjacent operators, and for each of them the operators that follow it, nearest first."""

    ends: tuple[int, int]
    followers: tuple[tuple[Follower, ...], tuple[Follower, ...]]


def pairs_of(space: Space) -> list[tuple[int, int]]:
    """Adjacent operators that have a choice, ascending."""
    movable = set(space.movable)
    found = {(i, edge.neighbour) for i in movable for edge in space.edges[i] if i < edge.neighbour and edge.neighbour in movable}
    return sorted(found)


def pair_count(space: Space) -> int:
    """Pairs of structured configurations of all adjacent operators: the comparisons of a round for each radius."""
    return sum(space.operators[a].structured_count * space.operators[b].structured_count for a, b in pairs_of(space))


def round_count(space: Space) -> int:
    """How often a search may look at all cuts; 0 if the space is too large."""
    return min(MAX_ROUNDS, MAX_COMPARED // max(1, 2 * pair_count(space)))


def find_cut(space: Space, ends: tuple[int, int], radius: int) -> Cut:
    """Which operators follow which end, up to a distance below ``radius``."""
    movable = set(space.movable)
    side, waiting = {ends[0]: 0, ends[1]: 1}, deque((end, 1) for end in ends)
    followers: tuple[list[Follower], list[Follower]] = ([], [])
    while waiting:
        position, distance = waiting.popleft()
        for neighbour in dict.fromkeys(edge.neighbour for edge in space.edges[position]) if distance < radius else ():
            if neighbour in movable and neighbour not in side:
                side[neighbour] = side[position]
                back = next(edge for edge in space.edges[neighbour] if edge.neighbour == position)
                followers[side[position]].append(Follower(neighbour, back))
                waiting.append((neighbour, distance + 1))
    return Cut(ends, (tuple(followers[0]), tuple(followers[1])))


def spread(space: Space, position: int, config: OpConfig, followers: tuple[Follower, ...]) -> dict[int, OpConfig]:
    """An operator's configuration, and those of all operators that follow it, by position."""
    found = {position: config}
    for follower, edge in followers:
        if edge.neighbour in found:
            for aligned in aligned_with(space.graph, found[edge.neighbour], follower, edge):
                if space.operators[follower].log_weight(aligned) > float("-inf"):
                    found[follower] = aligned
                    break
    return found


def changes_at(space: Space, cut: Cut) -> Iterator[dict[str, OpConfig]]:
    """The configurations that a cut tries, by name."""
    names = [op.name for op in space.graph.operators]
    halves = []
    for end, followers in zip(cut.ends, cut.followers, strict=True):
        spreads = (spread(space, end, config, followers) for config in space.operators[end].structured())
        halves.append([{names[position]: config for position, config in found.items()} for found in spreads])
    for first in halves[0]:
        for second in halves[1]:
            yield first | second


def improve_by_cuts(
    engine: Engine,
    space: Space,
    overflow_bytes: Callable[[Strategy], int],
    accepted: Callable[[Strategy, tuple[str, ...], int], None] = lambda strategy, names, cost_ns: None,
) -> tuple[bool, int]:
    """One round over all cuts of the whole graph, then over the pairs alone. ``engine`` holds a strategy that fits into memory.
    Returns whether a better one was found, and how many strategies were compared. A strategy that is better and fits is taken at once,
    and ``accepted`` is called with it, the operators that changed, and its cost in ns."""
    improved, compared = False, 0
    strategy = engine.strategy
    for radius in (len(space.graph.operators), 1):
        for ends in pairs_of(space):
            for configs in changes_at(space, find_cut(space, ends, radius)):
                changes = changed(strategy, configs)
                if not changes:
                    continue
                compared += 1
                cost_ns = engine.propose_changes(changes, at_most_ns=engine.makespan_ns - 1)
                better = strategy.with_changes(changes)
                if cost_ns is None or overflow_bytes(better) > 0:
                    engine.reject()
                    continue
                engine.accept()
                strategy, improved = better, True
                accepted(better, tuple(changes), cost_ns)
    return improved, compared
