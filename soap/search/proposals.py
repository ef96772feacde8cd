"""Proposals of the Metropolis-Hastings chain, and why each of them keeps detailed balance.

A proposal carries ``log_ratio`` = log [weight(S*) q(S | S*) / (weight(S) q(S* | S))], where q is the probability with which the
move proposes a state and ``weight`` the reference measure of the space. With the acceptance of ``soap.search.metropolis`` each
move alone is then in detailed balance with the target, and so is any mixture of them with fixed weights. In every move the
operator is drawn uniformly from ``Space.movable``, which does not depend on the state.

- ``redraw``: one operator, a new configuration drawn from the reference measure: q(S* | S) is proportional to weight(S*), so
  log_ratio = 0.
- ``place``: one operator, same grid, another structured placement, uniformly. The set of placements depends on the grid alone,
  so q is symmetric. From a shuffled placement there is no such move.
- ``split``: one operator, same devices, another grid with as many tiles, uniformly; no effect unless the devices are a
  structured placement of both grids. Symmetric, since the set of grids depends on the number of tiles alone.
- ``informed``: one operator, drawn from a distribution d: INFORMED_SHARE x (a candidate, uniformly) + (1 - INFORMED_SHARE) x
  (redraw). Candidates are the configurations aligned with the neighbours and those that the reference strategies give the
  operator; none depends on the operator's own configuration, so forward and backward draw from the same d and
  log_ratio = log weight(S*) - log weight(S) + log d(S) - log d(S*).
- ``group``: an operator is drawn; all operators of its repeated-layer group that have the same configuration (the set M) get
  another structured configuration, uniformly. No effect if a member outside of M has that configuration already, as the way
  back would then move it too. Otherwise any member of M, in either direction, draws exactly this move: symmetric.
- ``sync``: one parameter gets another of its ways of synchronizing, both drawn uniformly: symmetric.
- ``prefetch``: one group of values more, or less, is gathered ahead, as likely: symmetric.
- ``recompute``: a set of operators that all stay as they are, or are recomputed, or but for their products, becomes another of these three;
  or one that all stays offloads what it keeps, or the reverse: symmetric, as there are as many others wherever that leads.

A current state outside of the space (weight 0) is never proposed, so it is transient and the target does not constrain the way
out: from there ``log_ratio`` is 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log

from soap.search.alignment import aligned_configs
from soap.search.space import MOST_PREFETCHED, Space, grid_of
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.kept import mark_of, with_each_mark
from soap.strategy.recomputation import LEVELS

INFORMED_SHARE = 0.5
"""Share of the informed move's draws that come from the candidates."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed strategy; ``operators`` names what was changed (operators, or parameters of a sync move; for the prefetch the first
    gathered parameter stands)."""

    strategy: Strategy
    move: str
    operators: tuple[str, ...]
    log_ratio: float = 0.0


Move = Callable[[random.Random, Space, Strategy], Proposal | None]


def changed(strategy: Strategy, placements: Mapping[str, OpConfig]) -> dict[str, OpConfig]:
    """The proposal that splits and places operators as ``placements`` says, without those that are like that already; None if nothing
    changes. Every move ends here: it chooses how operators are split and where they run, and the rest of a configuration stays."""
    old = strategy.operators
    new = {name: old[name].placed_like(config) for name, config in placements.items()}
    return {name: config for name, config in new.items() if config is not old[name]}


def redraw(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """A new configuration of one operator."""
    i = rng.choice(space.movable)
    return _changed(space, strategy, "redraw", i, space.operators[i].draw(rng))


def place(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """The same grid of one operator on other devices."""
    i = rng.choice(space.movable)
    old = strategy.operators[space.graph.operators[i].name]
    options = space.operators[i].placements(grid_of(old))
    if not options or _shuffled(space, i, old):
        return None
    new = old.placed(old.degrees, rng.choice(options), old.replicas, old.shares)
    return _changed(space, strategy, "place", i, new)


def split(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """Another grid of one operator on the same devices."""
    i = rng.choice(space.movable)
    old = strategy.operators[space.graph.operators[i].name]
    grids = space.operators[i].grids_by_tiles.get(len(old.devices), ())
    if not grids or _shuffled(space, i, old):
        return None
    grid = rng.choice(grids)
    if not space.operators[i].is_structured(grid, old.devices):
        return None
    return _changed(space, strategy, "split", i, old.placed(grid[1:], old.devices, grid[0]))


def informed(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """A configuration of one operator that suits its neighbours, or one that a reference strategy gives it."""
    i = rng.choice(space.movable)
    name = space.graph.operators[i].name
    candidates = informed_candidates(space, strategy, i)
    own, old = space.operators[i], strategy.operators[name]
    new = rng.choice(candidates) if candidates and rng.random() < INFORMED_SHARE else old.placed_like(own.draw(rng))
    if own.log_weight(new) == -inf:
        return None
    log_ratio = 0.0
    if own.log_weight(old) > -inf:
        log_ratio = own.log_weight(new) - own.log_weight(old)
        log_ratio += _log_density(space, i, candidates, old) - _log_density(space, i, candidates, new)
    return _changed(space, strategy, "informed", i, new, log_ratio)


def informed_candidates(space: Space, strategy: Strategy, position: int) -> list[OpConfig]:
    """Candidates of an operator, repetitions included. How they are split and placed does not depend on its own configuration in
    ``strategy``; the rest of them is taken from that configuration."""
    name = space.graph.operators[position].name
    candidates = aligned_configs(space.graph, strategy, position, space.edges[position])
    candidates += [reference.operators[name] for reference in space.references]
    return [strategy.operators[name].placed_like(candidate) for candidate in candidates]


def _log_density(space: Space, position: int, candidates: Sequence[OpConfig], config: OpConfig) -> float:
    """Logarithm of the informed move's probability of drawing ``config``."""
    drawn = exp(space.operators[position].log_probability(config))
    if not candidates:
        return log(drawn)
    return log(INFORMED_SHARE * candidates.count(config) / len(candidates) + (1 - INFORMED_SHARE) * drawn)


def group(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """A new configuration of all equal layers that are configured alike."""
    i = rng.choice(space.movable)
    names = [space.graph.operators[j].name for j in space.group_of[i]]
    old = strategy.operators[space.graph.operators[i].name]
    new = old.placed_like(space.operators[i].draw_structured(rng))
    if new == old or _shuffled(space, i, old) or any(strategy.operators[name] == new for name in names):
        return None
    moved = tuple(name for name in names if strategy.operators[name] == old)
    return Proposal(strategy.with_changes(dict.fromkeys(moved, new)), "group", moved)


def sync(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """Another synchronization of one parameter."""
    if not space.syncs:
        return None
    name = rng.choice(list(space.syncs))
    sync = rng.choice([other for other in space.syncs[name] if other != strategy.sync(name)])
    return Proposal(strategy.with_parameter(name, sync), "sync", (name,))


def prefetch(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """One group of values more, or less, gathered ahead, where some are gathered."""
    gathered = (tensor.name for tensor in space.graph.parameters if strategy.sync(tensor.name).contract.gathers_values)
    first, step = next(gathered, None), rng.choice((-1, 1))
    after = strategy.prefetch + step
    if first is None or after < 0 or (step > 0 and after > MOST_PREFETCHED):
        return None
    return Proposal(replace(strategy, prefetch=after), "prefetch", (first,))


def recompute(rng: random.Random, space: Space, strategy: Strategy) -> Proposal | None:
    """Recompute a set of operators that are alike to another extent, or let it offload what it keeps, or no longer."""
    if not space.marks:
        return None
    operators, chosen = space.graph.operators, rng.choice(space.marks)
    every = [{operators[own.position].name: own.at(extent) for own in chosen} for extent in LEVELS]
    distinct = [marks for k, marks in enumerate(every) if marks not in every[:k]]
    held = {name: mark_of(strategy.operators[name]) for name in every[0]}
    if held not in distinct:
        return None
    marks = rng.choice([marks for marks in distinct if marks != held])
    return Proposal(with_each_mark(strategy, marks), "recompute", tuple(held))


MOVES: Mapping[str, Move] = {
    "redraw": redraw, "place": place, "split": split, "informed": informed, "group": group, "sync": sync, "recompute": recompute,
    "prefetch": prefetch,
}  # fmt: skip


def move_weights(space: Space) -> dict[str, float]:
    """How often each move is drawn; fixed for a space. A move that can never have an effect has weight 0."""
    split_possible = any(len(g) > 1 for s in space.operators for t, g in s.grids_by_tiles.items() if t > 1)
    return {
        "redraw": 2.0,
        "place": 1.0,
        "split": 1.0 if split_possible else 0.0,
        "informed": 3.0,
        "group": 3.0 if space.groups else 0.0,
        "sync": 1.0 if space.syncs else 0.0,
        "recompute": 1.0 if space.marks else 0.0,
        "prefetch": 0.5 if space.gathers else 0.0,
    }


UNPLACED = ("sync", "recompute", "prefetch")
"""Moves that need no operator with a choice of configurations."""


class Kernel:
    """The mixture of all moves: draws one by weight and lets it propose."""

    def __init__(self, space: Space, weights: Mapping[str, float] | None = None) -> None:
        self.space = space
        chosen = {name: w for name, w in (weights or move_weights(space)).items() if w > 0 and (space.movable or name in UNPLACED)}
        self._moves = tuple(MOVES[name] for name in chosen)
        self._weights = tuple(chosen.values())

    def __call__(self, rng: random.Random, strategy: Strategy) -> Proposal | None:
        """A proposal from ``strategy``; None if the move drawn has no effect."""
        if not self._moves:
            return None
        return rng.choices(self._moves, weights=self._weights)[0](rng, self.space, strategy)


def _shuffled(space: Space, position: int, config: OpConfig) -> bool:
    """Whether the configuration is in the space but not a structured one."""
    if space.operators[position].is_structured(grid_of(config), config.devices):
        return False
    return space.operators[position].log_weight(config) > -inf


def _changed(
    space: Space, strategy: Strategy, move: str, position: int, config: OpConfig, log_ratio: float = 0.0
) -> Proposal | None:
    """The proposal that gives one operator this configuration, or None if it has it already."""
    name = space.graph.operators[position].name
    moved = changed(strategy, {name: config})
    return Proposal(strategy.with_changes(moved), move, (name,), log_ratio) if moved else None
