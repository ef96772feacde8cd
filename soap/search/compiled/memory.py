"""What a compiled chain keeps: where it stands, what it has seen, and room for the candidates of a move."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soap.simulator.compiled.graph_arrays import Floats, Ints, Longs

MOVES = ("redraw", "place", "swap", "informed", "group", "segment", "run", "sync")
REDRAW, PLACE, SWAP, INFORMED, GROUP, SEGMENT, RUN, SYNC = range(len(MOVES))

STEP, RANDOM, SWAPPED, COST, START, BEST, LOGGED, PENDING, WANTED_OPERATOR, WANTED_GRID, PLAYED, ESTIMATES, BEFORE = range(13)
"""Places in ``ChainTables.at``: steps done; the generator's state (``BEFORE``: at the end of the last step); whether the engine's trials
have changed places; current cost; the cost that beta is relative to; best cost; proposals in the log; whether a step waits for an answer
about memory; the operator and the grid of which no variant is known; tasks played; estimates made."""

NOTHING, ASKED, GRANTED, REFUSED = range(4)
"""Values of ``at[PENDING]``."""

CANDIDATES = 8
"""Candidates of an informed move, of a group's or of a run's."""

LONGEST_RUN = 8
"""Operators of a run at most."""

MOST_LISTED = 96
"""Configurations that an operator's neighbours and references suggest, at most; what is more is left out."""


class ChainTables(NamedTuple):
    """``grid``: by operator, its current one (-1: outside of the space); ``structured``: whether it is placed so. ``variant``: as
    ``GridTables.estimate``, -1 where none is made yet. ``weight``: of the moves. ``proposed``, ``accepted``, ``idle`` (without effect):
    by move. ``gained``: by move, ns by which what was accepted has improved the chain's best. ``best_…``: the best strategy, as in
    ``State`` (``best_sync``: by parameter).

    The log, per evaluated proposal: ``log_move``, ``log_operator`` (first one; -1 - parameter if that is what changes), ``log_count``,
    ``log_cost`` (-1: over the bound), ``log_accepted``.

    Candidates: slot k has ``c_grid[k]``, devices ``c_dev[k * devices:]``, ``c_log`` (logarithm of its weight). Slot 0 is the current
    configuration, 1 to ``CANDIDATES`` what a move has drawn, then what neighbours and references suggest. ``edited``: grids of the edit's
    operators. ``where``, ``stamp``: by device, for estimates. ``order``: devices, for drawing some.

    A run (``compiled.runs``): operators ``r_op``, each but the first one grown from that at place ``r_from`` of the run, its own edge
    ``r_edge`` leading there; ``r_place``: by operator, its place in the run (-1: none). Candidate k gives the one at place i the grid
    ``r_grid[k * LONGEST_RUN + i]`` on ``r_dev[(k * LONGEST_RUN + i) * devices:]``.
    """

    at: Longs
    grid: Ints
    structured: Ints
    variant: Ints
    weight: Floats
    proposed: Longs
    accepted: Longs
    idle: Longs
    gained: Longs
    best_variant: Ints
    best_replicas: Ints
    best_dev_ptr: Ints
    best_dev: Ints
    best_sync: Ints
    log_move: Ints
    log_operator: Ints
    log_count: Ints
    log_cost: Longs
    log_accepted: Ints
    c_grid: Ints
    c_dev: Ints
    c_log: Floats
    c_weight: Floats
    edited: Ints
    where: Ints
    stamp: Longs
    order: Ints
    r_op: Ints
    r_from: Ints
    r_edge: Ints
    r_place: Ints
    r_grid: Ints
    r_dev: Ints


def make_chain(operators: int, parameters: int, devices: int, configurations: int, tiles: int, log: int) -> ChainTables:
    """``configurations``: length of ``GridTables.estimate``; ``tiles``: room for those of any strategy; ``log``: proposals at most."""
    slots = 1 + CANDIDATES + MOST_LISTED
    sizes = {"at": 16, "variant": configurations, "best_dev_ptr": operators + 1, "best_dev": tiles, "best_sync": parameters}
    sizes |= {"c_dev": slots * devices}
    sizes |= dict.fromkeys(("weight", "proposed", "accepted", "idle", "gained"), len(MOVES))
    sizes |= dict.fromkeys(("c_grid", "c_log", "c_weight"), slots)
    sizes |= dict.fromkeys(("where", "stamp"), devices)
    sizes |= dict.fromkeys(("r_op", "r_from", "r_edge"), LONGEST_RUN)
    sizes |= {"r_grid": LONGEST_RUN * (1 + CANDIDATES), "r_dev": LONGEST_RUN * (1 + CANDIDATES) * devices}
    kinds = {"Longs": np.int64, "Floats": np.float64, "Ints": np.int32}
    fields: dict[str, Any] = {}
    for name, annotation in ChainTables.__annotations__.items():
        kind = next(own for key, own in kinds.items() if key in str(annotation))
        fields[name] = np.zeros(sizes.get(name, log if name.startswith("log_") else operators) + 1, kind)
    found = ChainTables(**fields)
    found.variant[:] = found.r_place[:] = -1
    return found._replace(order=np.arange(devices, dtype=np.int32))
