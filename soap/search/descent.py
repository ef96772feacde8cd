"""Descent: a greedy phase of informed, larger changes. It is not part of the Metropolis-Hastings chain.

An operator that is split unlike its neighbours pays for the redistribution on both sides. So a chain that moves one operator at a time
needs many proposals to cross the ridge between two good strategies. Descent proposes changes of several operators at once and takes a
change exactly if it is better: fewer bytes beyond the memory first, then less time. It makes no claim of detailed balance; the record keeps
its proposals apart from the chain's (column ``phase``).

- ``adopt``: the whole of a reference strategy that was not evaluated as a start; each of them once, at the beginning.
- ``borrow``: a stretch of operators (in topological order, of random length) takes the configurations of a reference strategy.
- ``borrow-kind``: the same for all operators of one kind, or for one repeated-layer group.
- ``align``: an operator, with all its repeated layers, follows a neighbour.
- ``spread``: an operator, with its repeated layers, gets a new configuration, and the operators around it follow outwards for some steps.
- ``synchronize``: a parameter, or all parameters that have a choice, get another way of synchronizing.
- ``prefetch``: one group of values more, or less, is gathered ahead.
- ``recompute``: a set of operators, or the equal sets of all repeated layers, is recomputed, or but for its products, or offloads what it
  keeps, or no longer does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from soap.search.alignment import aligned_with
from soap.search.metropolis import Proposal, changed
from soap.search.space import MOST_PREFETCHED, Space
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.marks import mark_of, with_each_mark
from soap.strategy.recomputation import LEVELS

SPREADS = (0, 1, 2, 3, 4, 6, 8)
"""Distances, in operators, to which a new configuration spreads."""

Change = Mapping[int, OpConfig]
"""Operator position -> new configuration."""


def borrow(rng: random.Random, space: Space, strategy: Strategy) -> Change:
    """A stretch of operators gets the configurations of a reference strategy."""
    reference = rng.choice(space.references)
    count = len(space.graph.operators)
    length = min(count, 1 << rng.randrange(count.bit_length()))
    first = rng.randrange(count - length + 1)
    return _taken(space, reference, range(first, first + length))


def borrow_kind(rng: random.Random, space: Space, strategy: Strategy) -> Change:
    """All operators of a kind, or a repeated-layer group, get the configurations of a reference strategy."""
    reference = rng.choice(space.references)
    i = rng.choice(space.movable)
    if rng.random() < 0.5:
        return _taken(space, reference, space.group_of[i])
    kind = space.graph.operators[i].kind
    return _taken(space, reference, (j for j, op in enumerate(space.graph.operators) if op.kind == kind))


def align(rng: random.Random, space: Space, strategy: Strategy) -> Change:
    """An operator and its repeated layers follow the corresponding neighbour."""
    i = rng.choice(space.movable)
    if not space.edges[i]:
        return {}
    edge_number = rng.randrange(len(space.edges[i]))
    u = rng.random()
    change = {}
    for j in space.group_of[i]:
        if edge_number < len(space.edges[j]):
            edge = space.edges[j][edge_number]
            source = strategy.operators[space.graph.operators[edge.neighbour].name]
            options = aligned_with(space.graph, source, j, edge)
            if options:
                change[j] = options[int(u * len(options))]
    return change


def spread(rng: random.Random, space: Space, strategy: Strategy) -> Change:
    """A new configuration for an operator and its repeated layers; the operators around them follow."""
    i = rng.choice(space.movable)
    new = space.operators[i].draw_structured(rng)
    change = dict.fromkeys(space.group_of[i], new)
    frontier = list(change)
    for _ in range(rng.choice(SPREADS)):
        reached: list[int] = []
        for j in frontier:
            for edge in space.edges[j]:
                if edge.neighbour in change:
                    continue
                back = next((e for e in space.edges[edge.neighbour] if e.neighbour == j), None)
                options = aligned_with(space.graph, change[j], edge.neighbour, back) if back else []
                if options:
                    change[edge.neighbour] = options[0]
                    reached.append(edge.neighbour)
        frontier = reached
    return change


def _taken(space: Space, reference: Strategy, positions: Iterable[int]) -> Change:
    return {i: reference.operators[space.graph.operators[i].name] for i in positions}


CHANGES: Mapping[str, tuple[float, Callable[[random.Random, Space, Strategy], Change]]] = {
    "borrow": (3.0, borrow),
    "borrow-kind": (2.0, borrow_kind),
    "align": (2.0, align),
    "spread": (3.0, spread),
}
"""Name -> (weight, function)."""


SYNCHRONIZE_SHARE = 0.1
"""Share of the proposals that synchronize parameters differently, if any parameter has a choice."""


def synchronize(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """Synchronize a parameter, or all that have the choice, in another way."""
    name = rng.choice(list(space.syncs))
    sync = rng.choice(space.syncs[name])
    names = [other for other, own in space.syncs.items() if sync in own] if rng.random() < 0.5 else [name]
    moved = tuple(other for other in names if strategy.sync(other) != sync)
    if not moved:
        return None
    return Proposal(strategy.with_changes(parameters=dict.fromkeys(moved, sync)), "synchronize", moved)


PREFETCH_SHARE = 0.05
"""Share of the proposals that gather values earlier or later, if some may be gathered."""


def prefetch(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """One group of values more, or less, gathered ahead, where some are gathered."""
    gathered = (tensor.name for tensor in space.graph.parameters if strategy.sync(tensor.name).contract.gathers_values)
    first, step = next(gathered, None), rng.choice((-1, 1))
    after = strategy.prefetch + step
    if first is None or after < 0 or (step > 0 and after > MOST_PREFETCHED):
        return None
    return Proposal(replace(strategy, prefetch=after), "prefetch", (first,))


RECOMPUTE_SHARE = 0.25
"""Share of the proposals that recompute, where memory binds."""


def recompute(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """Recompute a set of operators, or let it offload what it keeps, and half of the time the sets of their repeated layers with it, all of
    them to one extent."""
    number = rng.randrange(len(space.marks))
    sets = next(sets for sets in space.by_field.values() if space.marks[number] in sets)
    chosen = space.marks[number]
    known = {own.position for each in sets for own in each}
    alike = {own.position: set(space.group_of[own.position]) if rng.random() < 0.5 else {own.position} for own in chosen}
    members = {i: own for own in chosen for i in alike[own.position] & known}
    every = [{space.graph.operators[i].name: members[i].at(extent) for i in sorted(members)} for extent in LEVELS]
    held = {name: mark_of(strategy.operators[name]) for name in every[0]}
    marks = rng.choice([own for own in every if own != held])
    moved = tuple(name for name in held if marks[name] != held[name])
    return Proposal(with_each_mark(strategy, {name: marks[name] for name in moved}), "recompute", moved)


def propose_descent(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """A larger change of ``strategy``; None if the one drawn changes nothing."""
    if space.syncs and (not space.movable or rng.random() < SYNCHRONIZE_SHARE):
        return synchronize(rng, space, strategy)
    if space.gathers and rng.random() < PREFETCH_SHARE:
        return prefetch(rng, space, strategy)
    if space.marks and (not space.movable or rng.random() < RECOMPUTE_SHARE):
        return recompute(rng, space, strategy)
    if not space.movable:
        return None
    names = [name for name in CHANGES if space.references or not name.startswith("borrow")]
    name = rng.choices(names, weights=[CHANGES[n][0] for n in names])[0]
    return _proposal(space, strategy, name, CHANGES[name][1](rng, space, strategy))


def adopt(space: Space, strategy: Strategy, reference: Strategy) -> Proposal | None:
    """All configurations of a reference strategy; None if they are those of ``strategy``."""
    return _proposal(space, strategy, "adopt", _taken(space, reference, range(len(space.graph.operators))))


def _proposal(space: Space, strategy: Strategy, name: str, change: Change) -> Proposal | None:
    new = {space.graph.operators[i].name: config for i, config in sorted(change.items()) if space.allows(i, config)}
    moved = changed(strategy, new)
    return Proposal(strategy.with_changes(moved), name, tuple(moved)) if moved else None
